"""Weights on their way from files into a model: a source per file format, one strict reader.

    WeightSource   names, shapes, bytes; knows one format (safetensors, GGUF)
    WeightReader   what a model asks: tensors by name and exact shape, fused where wanted

The reader keeps books: a tensor that is missing or has another shape raises at once, one that
nobody asked for raises in `finish`; every message names the file and the tensor. Tensors are
converted while they are copied to their place, in pieces, so that loading needs little more memory
than the model. `fingerprint` digests every byte of the weights (not a sample: two models that
differ in one tensor must not share cached state), while tensors are being converted.

This module knows no format and no architecture.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import Protocol

import torch
from torch import Tensor

from statewise.kernels.coded import Codes, stacked
from statewise.runtime.errors import ModelLoadError

Progress = Callable[[int, int, str], None]  # bytes read, bytes in all, tensor just read

DIGEST_BYTES = 16
FINGERPRINT_PIECE = 8 << 20


class WeightSource(Protocol):
    """Tensors of one checkpoint under their Hugging Face names."""

    def names(self) -> Iterable[str]:
        """All tensor names."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, outermost dimension first."""
        ...

    def size_bytes(self, name: str) -> int:
        """Bytes of a tensor in its file."""
        ...

    def place(self, name: str) -> str:
        """File (and its own name for the tensor) for messages; works for absent names too."""
        ...

    def read_into(self, name: str, out: Tensor) -> None:
        """Write a tensor to `out` (same shape, any float dtype)."""
        ...

    def codes(self, name: str) -> Codes | None:
        """Codes of a matrix, where the file keeps such; they give what `read_into` gives."""
        ...

    def buffers(self) -> Iterator[tuple[str, memoryview]]:
        """(identity, bytes) of every tensor in a fixed order, for the fingerprint."""
        ...

    def close(self) -> None:
        """Release files."""
        ...


class WeightReader:
    """Hands a model its tensors and checks that names and shapes match exactly."""

    def __init__(
        self, source: WeightSource, dtype: torch.dtype, progress: Progress | None = None
    ) -> None:
        self.dtype = dtype
        self._source = source
        self._progress = progress
        self._names = frozenset(source.names())
        self._unread = set(self._names)
        self._total_bytes = sum(source.size_bytes(n) for n in self._names)
        self._read_bytes = 0
        self._closed = Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="fingerprint")
        self._fingerprint: Future[bytes] = self._pool.submit(
            fingerprint, source, self._closed.is_set
        )

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds `name`."""
        return name in self._names

    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor that the checkpoint holds."""
        return self._source.shape(name)

    @property
    def wide_dtype(self) -> torch.dtype:
        """Type of what must not be rounded: float64 in a float64 model, else float32."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def tensor(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """Return the tensor, in the model's dtype where no other is asked for."""
        self._check(name, tuple(shape))
        out = torch.empty(*shape, dtype=dtype or self.dtype)
        self._read(name, out)
        return out

    def stacked(self, names: Sequence[str], rows: Sequence[int], *rest: int) -> Tensor:
        """Return several [rows_i, *rest] tensors as one [sum(rows), *rest] (fused projections)."""
        for name, count in zip(names, rows, strict=True):
            self._check(name, (count, *rest))
        out = torch.empty(sum(rows), *rest, dtype=self.dtype)
        first = 0
        for name, count in zip(names, rows, strict=True):
            self._read(name, out[first : first + count])
            first += count
        return out

    def codes(self, names: Sequence[str], rows: Sequence[int], width: int) -> Codes | None:
        """What `stacked` returns, as the codes that the file holds; None where it holds others.

        `taken` says that they are kept.
        """
        if self.dtype != torch.bfloat16:
            return None
        for name, count in zip(names, rows, strict=True):
            self._check(name, (count, width))
        parts = [self._source.codes(name) for name in names]
        found = [part for part in parts if part is not None]
        return stacked(found) if len(found) == len(parts) else None

    def taken(self, names: Sequence[str]) -> None:
        """Tensors were read by `codes`."""
        for name in names:
            self._note_read(name)

    def finish(self, may_be_unread: Callable[[str], bool]) -> str:
        """Check that nothing is left over; return the fingerprint of the weights, as hex."""
        extra = sorted(n for n in self._unread if not may_be_unread(n))
        if extra:
            more = f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""
            raise ModelLoadError(f"{self._source.place(extra[0])}: unexpected tensor{more}")
        return self._fingerprint.result().hex()

    def close(self) -> None:
        """Stop an unfinished fingerprint and release the files."""
        self._closed.set()
        self._pool.shutdown(cancel_futures=True)
        self._source.close()

    def _check(self, name: str, expected: tuple[int, ...]) -> None:
        place = self._source.place(name)
        if name not in self._names:
            raise ModelLoadError(f"{place}: tensor is missing (expected {list(expected)})")
        shape = self._source.shape(name)
        if shape != expected:
            raise ModelLoadError(
                f"{place}: tensor has shape {list(shape)}, expected {list(expected)}"
            )

    def _read(self, name: str, out: Tensor) -> None:
        self._source.read_into(name, out)
        self._note_read(name)

    def _note_read(self, name: str) -> None:
        self._unread.discard(name)
        self._read_bytes += self._source.size_bytes(name)
        if self._progress is not None:
            self._progress(self._read_bytes, self._total_bytes, name)


def fingerprint(source: WeightSource, is_cancelled: Callable[[], bool]) -> bytes:
    """Digest of names, types, shapes and all bytes of a checkpoint; empty where cancelled."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for identity, view in source.buffers():
        digest.update(f"{identity};{view.nbytes};".encode())
        for start in range(0, view.nbytes, FINGERPRINT_PIECE):
            if is_cancelled():
                return b""
            digest.update(view[start : start + FINGERPRINT_PIECE])
    return digest.digest()
