"""State at fewer bits: what lossy copies are made of, and how they are read again.

    layer of a copy = scales [V] float32 | numbers [V, D], one byte each | zeros to 4 bytes

    int8   scale = largest / 127    number = round(x / scale)      V  vectors of a layer's block
    fp8    scale = largest / 448    number = e4m3(x / scale)       D  numbers of a vector
    back   number * scale in float32, rounded once to the block's type

Reading is exact arithmetic with one rounding at each step, so that every machine reads the same
bytes into the same block: a copy's digests are those of what it is read into. What is not finite
reads as something that is not finite. Quantising a vector that was read from a copy may move it
again, by less than half a step.

The native library does it where there is one (`kernels/quantised`), torch elsewhere, with the same
bytes. A call is cut into pieces that torch computes on the calling thread: an I/O thread takes no
core from a step that runs beside it.

This module does not know blocks, rows or stores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from statewise.kernels import native
from statewise.kernels.interface import AttentionGeometry, EntryGeometry, GroupGeometry
from statewise.kernels.quantised import convert

Bytes = NDArray[np.uint8]
SCALE_BYTES = 4
PIECE = 32767  # numbers: below the size from which torch shares its work among threads
SMALLEST = 1e-30  # a vector without a larger number is kept as zeros
LARGEST = {"int8": 127.0, "fp8": 448.0}


@cache
def _e4m3() -> torch.Tensor:
    """[256] float32 value of each e4m3 byte."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)


def is_available(kind: str) -> bool:
    """Whether this torch has the numbers of a kind."""
    return kind == "int8" or (kind == "fp8" and hasattr(torch, "float8_e4m3fn"))


@dataclass(frozen=True)
class Quantiser:
    """One group's blocks: `vectors` a layer, of `dim` numbers of type `dtype` each."""

    kind: str
    vectors: int
    dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, kind: str, geometry: GroupGeometry, layer_bytes: int) -> Quantiser:
        """For a group whose layers' blocks have `layer_bytes`; ValueError for snapshots."""
        match geometry:
            case AttentionGeometry():
                dim = geometry.head_dim
            case EntryGeometry():
                dim = geometry.dim
            case _:
                raise ValueError("snapshots keep every bit")
        vectors, rest = divmod(layer_bytes, dim * geometry.dtype.itemsize)
        assert not rest, "a layer's block holds whole vectors"
        return cls(kind, vectors, dim, geometry.dtype)

    @property
    def copy_bytes(self) -> int:
        """Bytes of one layer of a copy."""
        return SCALE_BYTES * self.vectors + -(-self.vectors * self.dim // 4) * 4

    def quantise(self, payload: Bytes, out: Bytes) -> None:
        """A block's payload into a copy; both hold layers one after the other."""
        if native.is_available():
            convert(payload, out, **self._sizes(), back=False)
        else:
            self.quantise_by_torch(payload, out)

    def dequantise(self, body: Bytes, out: Bytes) -> None:
        """A copy into a block's payload."""
        if native.is_available():
            convert(out, body, **self._sizes(), back=True)
        else:
            self.dequantise_by_torch(body, out)

    def _sizes(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "dtype": self.dtype,
            "vectors": self.vectors,
            "dim": self.dim,
            "copy_bytes": self.copy_bytes,
        }

    def quantise_by_torch(self, payload: Bytes, out: Bytes) -> None:
        """Do the same without the native library."""
        whole, scales, numbers = self._views(payload, out)
        out.reshape(len(whole), -1)[:, SCALE_BYTES * self.vectors + self.vectors * self.dim :] = 0
        for piece in self._pieces(len(whole)):
            values = whole[piece].to(torch.float32)
            largest = values.abs().amax(dim=-1)
            # By tensors: torch takes the reciprocal of a single divisor, which rounds twice.
            top = torch.full_like(largest, LARGEST[self.kind])
            scale = torch.where(largest < SMALLEST, 1.0, largest / top)
            scales[piece] = scale
            numbers[piece] = self._numbers(values / scale.unsqueeze(-1).expand_as(values))

    def dequantise_by_torch(self, body: Bytes, out: Bytes) -> None:
        """Do the same without the native library."""
        whole, scales, numbers = self._views(out, body)
        for piece in self._pieces(len(whole)):
            values = self._values(numbers[piece])
            whole[piece] = values.mul_(scales[piece].unsqueeze(-1)).to(self.dtype)

    def _numbers(self, values: torch.Tensor) -> torch.Tensor:
        """[...] scaled float32 (changed) as bytes."""
        top = LARGEST[self.kind]
        if self.kind == "int8":
            return values.round_().clamp_(-top, top).to(torch.int8).view(torch.uint8)
        return values.clamp_(-top, top).to(torch.float8_e4m3fn).view(torch.uint8)

    def _values(self, numbers: torch.Tensor) -> torch.Tensor:
        if self.kind == "int8":
            return numbers.view(torch.int8).to(torch.float32)
        index = numbers.flatten().to(torch.int32)  # converting e4m3 goes number by number
        return _e4m3().index_select(0, index).view(numbers.shape)

    def _views(
        self, payload: Bytes, copy: Bytes
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(payload [L, V, D], scales [L, V], numbers [L, V, D]) over the bytes of both."""
        whole = torch.from_numpy(payload).view(self.dtype).view(-1, self.vectors, self.dim)
        layers = torch.from_numpy(copy).view(len(whole), -1)
        at = SCALE_BYTES * self.vectors
        scales = layers[:, :at].view(torch.float32)
        numbers = layers[:, at : at + self.vectors * self.dim]
        return whole, scales, numbers.view(whole.shape)

    def _pieces(self, layers: int) -> Iterator[tuple[slice, slice]]:
        """Slices of layers and vectors, at most `PIECE` numbers each where a vector is smaller."""
        vectors = min(max(PIECE // self.dim, 1), self.vectors)
        together = max(PIECE // (self.vectors * self.dim), 1)
        for layer in range(0, layers, together):
            for first in range(0, self.vectors, vectors):
                yield slice(layer, layer + together), slice(first, first + vectors)
