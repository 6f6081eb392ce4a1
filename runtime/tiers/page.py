"""What a stored page is called and what is known about it: keys, shapes, records.

    chain[0] = H(namespace)                       namespace: salt and adapter, encoded injectively
    chain[i] = H(chain[i-1], tokens of page i)    32 bytes
    key      = H(chain, rest, position, binding)  16 bytes; rest: tokens of a partly filled page
    binding  = H(group name, stamp, layers, layer bytes, page size)

So a key stands for everything that decides a page's bytes: all tokens up to its end, whose they
are, which model, weights, layout and group. Pages of two models, tenants or layouts may share a
directory or a bucket: they never answer to each other's keys. A stored page is a pure function of
its key; whoever finds it intact may use it.

H is BLAKE2b, keyed with a secret where there is one: without the secret nobody can tell from
stored keys whether some prompt was seen.

This module does not store and does not look anything up.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from statewise.radix.key import TOKEN_BYTES, Namespace
from statewise.radix.schema import CacheSchema
from statewise.radix.stamp import Stamp, boundary_of

KEY_BYTES = 16
CHAIN_BYTES = 32
ALIGNMENT = 4096  # of records, rows and direct I/O
NO_KEY = bytes(KEY_BYTES)
MAX_LAYERS = 1 << 16

_ROOT, _PAGE, _KEY, _GROUP, _CONTENT = b"sw-root", b"sw-page", b"sw-key", b"sw-group", b"sw-content"


def round_up(size: int, unit: int = ALIGNMENT) -> int:
    """Return the least multiple of `unit` that is at least `size`."""
    return -(-size // unit) * unit


@functools.lru_cache(maxsize=256)
def encode_stamp(stamp: Stamp) -> bytes:
    """Encode injectively: each text with its length in front, then the weights epoch."""
    texts = (stamp.model_fingerprint, stamp.version, stamp.layout_id, stamp.boundary)
    parts = []
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        parts.append(struct.pack("<I", len(data)) + data)
    return b"".join(parts) + struct.pack("<q", stamp.weights_epoch)


@functools.lru_cache(maxsize=256)
def decode_stamp(data: bytes) -> Stamp:
    """Invert `encode_stamp`; ValueError for anything else."""
    texts = []
    at = 0
    for _ in range(4):
        if at + 4 > len(data):
            raise ValueError("a stamp ends early")
        (size,) = struct.unpack_from("<I", data, at)
        text = data[at + 4 : at + 4 + size]
        if len(text) != size:
            raise ValueError("a stamp ends early")
        texts.append(text.decode("utf-8", "surrogatepass"))
        at += 4 + size
    if len(data) != at + 8:
        raise ValueError("a stamp has the wrong length")
    (epoch,) = struct.unpack_from("<q", data, at)
    fingerprint, version, layout_id, boundary = texts
    return Stamp(fingerprint, version, layout_id, epoch, boundary)


@dataclass(frozen=True)
class GroupShape:
    """Bytes of one state group's pages, and what they mean.

    A payload is `num_layers` parts of `layer_bytes`, in the group's order of layers. `item_bytes`
    is the size of one number (for byte shuffling). `depends_on`: the group that an index routes
    into.
    """

    name: str
    stamp: Stamp
    num_layers: int
    layer_bytes: int
    page_size: int  # tokens
    item_bytes: int = 2
    depends_on: str | None = None
    binding: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check sizes and derive what keys are bound to."""
        if not 0 < self.num_layers < MAX_LAYERS or self.layer_bytes < 1 or self.page_size < 1:
            raise ValueError(f"group {self.name!r}: a page needs layers, bytes and tokens")
        name = self.name.encode("utf-8", "surrogatepass")
        sizes = (len(name), self.num_layers, self.layer_bytes, self.page_size)
        data = struct.pack("<4Q", *sizes) + name + encode_stamp(self.stamp)
        binding = blake2b(data, digest_size=32, person=_GROUP).digest()
        object.__setattr__(self, "binding", binding)

    @property
    def block_bytes(self) -> int:
        """Bytes of a page's payload."""
        return self.num_layers * self.layer_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of a payload, padded for direct I/O."""
        return round_up(self.block_bytes)


def shapes_of(
    schema: CacheSchema,
    layer_bytes: Sequence[int],
    weights_epoch: int = 0,
    item_bytes: int = 2,
) -> tuple[GroupShape, ...]:
    """Shapes of all groups of `schema`; `layer_bytes` are one layer's bytes of one block."""
    return tuple(
        GroupShape(
            group.name,
            Stamp(
                schema.model_fingerprint,
                group.version,
                group.layout_id,
                weights_epoch,
                boundary_of(group),
            ),
            len(group.layers),
            size,
            schema.page_size,
            item_bytes,
            group.depends_on,
        )
        for group, size in zip(schema.groups, layer_bytes, strict=True)
    )


@dataclass(frozen=True, slots=True)
class PageAddress:
    """Where a page belongs: its group, the number of tokens up to its end, its key.

    `base` is the key of the page that an index page routes into; empty for all others.
    """

    group: str
    position: int
    key: bytes
    base: bytes = b""


@dataclass(frozen=True, slots=True)
class PageRecord:
    """What is known about a stored page, beside its bytes.

    `digests` [num_layers] are those of its layers. `content` stands for them in one number;
    `dependency` is the `content` of the page at `address.base`, 0 where there is no base.
    """

    address: PageAddress
    num_tokens: int  # valid tokens in the page
    digests: NDArray[np.uint64]
    content: int
    dependency: int = 0
    created_s: float = 0.0


def content_of(digests: NDArray[np.uint64], secret: bytes = b"") -> int:
    """One number, never 0, for a page's digests."""
    data = np.ascontiguousarray(digests, dtype="<u8").tobytes()
    short = blake2b(data, digest_size=8, key=secret, person=_CONTENT).digest()
    return int.from_bytes(short, "little") or 1


class PrefixChain:
    """Addresses of the pages of one token sequence, page by page as it grows.

    `secret` (at most 64 bytes) keys every digest.
    """

    def __init__(self, namespace: Namespace, page_size: int, secret: bytes = b"") -> None:
        self.page_size = page_size
        self._secret = secret
        root = blake2b(namespace.key, digest_size=CHAIN_BYTES, key=secret, person=_ROOT)
        self._digests = [root.digest()]

    @property
    def num_pages(self) -> int:
        """Whole pages known so far."""
        return len(self._digests) - 1

    def extend(self, tokens: bytes) -> None:
        """Take in `tokens`: the whole sequence so far, as int32 bytes; known pages are skipped."""
        size = self.page_size * TOKEN_BYTES
        secret = self._secret
        for page in range(self.num_pages, len(tokens) // size):
            data = self._digests[-1] + tokens[page * size : (page + 1) * size]
            step = blake2b(data, digest_size=CHAIN_BYTES, key=secret, person=_PAGE)
            self._digests.append(step.digest())

    def address(self, shape: GroupShape, page: int, base: GroupShape | None = None) -> PageAddress:
        """Address of whole page `page`; `base` is the shape of the group it depends on."""
        position = (page + 1) * self.page_size
        digest = self._digests[page + 1]
        return self._address(shape, base, digest, b"", position)

    def address_at(
        self, shape: GroupShape, tokens: bytes, position: int, base: GroupShape | None = None
    ) -> PageAddress:
        """Address of what belongs to exactly `position`: a snapshot or a partly filled page.

        `tokens` are the sequence's int32 bytes, at least up to `position`. A snapshot's group
        differs from every paged group's, so the two never share a key.
        """
        pages = position // self.page_size
        self.extend(tokens[: pages * self.page_size * TOKEN_BYTES])
        rest = tokens[pages * self.page_size * TOKEN_BYTES : position * TOKEN_BYTES]
        return self._address(shape, base, self._digests[pages], rest, position)

    def _address(
        self, shape: GroupShape, base: GroupShape | None, digest: bytes, rest: bytes, position: int
    ) -> PageAddress:
        key = self._key(shape, digest, rest, position)
        under = self._key(base, digest, rest, position) if base is not None else b""
        return PageAddress(shape.name, position, key, under)

    def _key(self, shape: GroupShape, digest: bytes, rest: bytes, position: int) -> bytes:
        data = digest + shape.binding + struct.pack("<Q", position) + rest
        return blake2b(data, digest_size=KEY_BYTES, key=self._secret, person=_KEY).digest()
