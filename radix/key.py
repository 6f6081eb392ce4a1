"""What the tree is keyed by: token ids as bytes, inside a namespace.

Token ids are int32 little-endian bytes, so that a node's whole run is compared by one `memcmp`
(`bytes.startswith(run, offset)`) with nothing copied, for pages of one token as for pages of 64.

A namespace is encoded with its parts' lengths in front: no two pairs of (salt, adapter) share an
encoding, whatever characters they hold.

This module does not know pages' contents or nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
TOKEN_BYTES = 4
_INT32 = np.dtype("<i4")


@dataclass(frozen=True, slots=True)
class Namespace:
    """Whose state may be shared: two requests share only if all parts are equal.

    `exact`: those who insist on exact state, where that of the others may rest on lossy copies.
    """

    salt: str = ""
    adapter: str = ""
    exact: bool = False
    key: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Encode injectively: length of the salt (top bit: exact), salt, adapter."""
        salt = self.salt.encode("utf-8", "surrogatepass")
        adapter = self.adapter.encode("utf-8", "surrogatepass")
        size = len(salt) | self.exact << 63
        object.__setattr__(self, "key", size.to_bytes(8, "little") + salt + adapter)


class TokenKey:
    """Token ids of one sequence, immutable.

    `ids` is any sequence of integers within int32; ValueError otherwise.
    """

    __slots__ = ("data", "num_tokens")

    data: bytes
    num_tokens: int

    def __init__(self, ids: Sequence[int] | NDArray[np.integer]) -> None:
        array = np.asarray(ids)
        if array.dtype != _INT32:
            array = _as_int32(array)
        self.data = array.tobytes()
        self.num_tokens = len(self.data) // TOKEN_BYTES

    @classmethod
    def from_bytes(cls, data: bytes) -> TokenKey:
        """Wrap int32 little-endian bytes without copying; ValueError on a partial token."""
        if len(data) % TOKEN_BYTES:
            raise ValueError(f"{len(data)} bytes are no whole number of int32 tokens")
        key = cls(())
        key.data = data
        key.num_tokens = len(data) // TOKEN_BYTES
        return key

    @property
    def ids(self) -> Int32:
        """[num_tokens] read-only view."""
        return np.frombuffer(self.data, dtype=_INT32)

    def __len__(self) -> int:
        return self.num_tokens

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenKey) and self.data == other.data

    def __hash__(self) -> int:
        return hash(self.data)

    def __repr__(self) -> str:
        return f"TokenKey({self.num_tokens} tokens)"


def _as_int32(array: NDArray[np.generic]) -> Int32:
    """Convert, refusing what does not fit."""
    if array.size == 0:
        return np.empty(0, dtype=_INT32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"token ids must be a row of integers, not {array.dtype}{array.shape}")
    info = np.iinfo(_INT32)
    if int(array.min()) < info.min or int(array.max()) > info.max:
        raise ValueError("token id outside int32")
    return array.astype(_INT32)


def common_tokens(run: bytes, data: bytes, offset: int) -> int:
    """Tokens that `run` and `data[offset:]` have in common from their starts."""
    num = min(len(run), len(data) - offset) // TOKEN_BYTES
    if num <= 0:
        return 0
    mine = np.frombuffer(run, dtype=_INT32, count=num)
    theirs = np.frombuffer(data, dtype=_INT32, count=num, offset=offset)
    differs = mine != theirs
    first = int(differs.argmax())
    return first if differs[first] else num
