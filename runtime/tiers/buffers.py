"""Rows of memory for pages: aligned for direct I/O, on huge pages, reused, bounded.

A row is one page's payload, padded to 4096 bytes; the padding stays zero. Rows of an arena lie
side by side in anonymous mappings that ask for huge pages, so that neighbours can be copied as one
array. Memory is touched when first used.

This module does not know what is in a row, and never gives memory back to the system before the
arena is dropped.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from statewise.runtime.tiers.page import round_up

Bytes = NDArray[np.uint8]
HUGE_PAGE = 2 << 20


def allocate(size: int) -> Bytes:
    """`size` zero bytes on a mapping of their own, aligned to a huge page (2 MiB)."""
    mapping = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE") and size >= HUGE_PAGE:
        with contextlib.suppress(OSError):  # a kernel built without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(mapping, dtype=np.uint8)
    offset = -raw.ctypes.data % HUGE_PAGE
    return raw[offset : offset + size]


def address_of(data: Bytes) -> int:
    """Where an array begins in memory."""
    address: int = data.__array_interface__["data"][0]
    return address


@dataclass(slots=True, eq=False)
class Row:
    """One page's memory. `owner` is the store or arena it must be given back to."""

    owner: object
    slot: int
    whole: Bytes  # [row_bytes], 4096-aligned
    size: int  # bytes of the payload
    group: str = ""
    address: int = 0  # where it lies in memory

    def __post_init__(self) -> None:
        """Find out where it lies, unless the owner knew."""
        self.address = self.address or address_of(self.whole)

    @property
    def data(self) -> Bytes:
        """[size] the payload."""
        return self.whole[: self.size]

    def clear_padding(self) -> None:
        """Zero what follows the payload."""
        if self.size < self.whole.size:
            self.whole[self.size :] = 0


class Arena:
    """Hands out rows of one size, at most `max_rows`; grows by `slab_rows`. Thread-safe."""

    def __init__(
        self, payload_bytes: int, max_rows: int, slab_bytes: int = 8 << 20, group: str = ""
    ) -> None:
        self.payload_bytes = payload_bytes
        self.row_bytes = round_up(payload_bytes)
        self.max_rows = max_rows
        self._slab_rows = max(1, slab_bytes // self.row_bytes)
        self._lock = threading.Lock()
        self._free: list[Row] = []
        self._num_rows = 0
        self._group = group

    @property
    def num_in_use(self) -> int:
        """Rows handed out."""
        with self._lock:
            return self._num_rows - len(self._free)

    def take(self, count: int) -> list[Row]:
        """`count` rows, neighbours where possible; fewer where the arena is at its bound."""
        with self._lock:
            while len(self._free) < count and self._num_rows < self.max_rows:
                self._grow(count - len(self._free))
            cut = max(len(self._free) - count, 0)
            taken = self._free[cut:]
            del self._free[cut:]
        taken.sort(key=lambda row: row.slot)
        return taken

    def _grow(self, wanted: int) -> None:
        rows = min(max(self._slab_rows, wanted), self.max_rows - self._num_rows)
        slab = allocate(rows * self.row_bytes).reshape(rows, self.row_bytes)
        first = self._num_rows
        new = [Row(self, first + i, slab[i], self.payload_bytes, self._group) for i in range(rows)]
        self._num_rows += rows
        self._free.extend(reversed(new))

    def give_back(self, rows: list[Row]) -> None:
        """Take rows back; they must be this arena's."""
        assert all(row.owner is self for row in rows), "a row of another arena"
        with self._lock:
            self._free.extend(sorted(rows, key=lambda row: -row.slot))
            assert len(self._free) <= self._num_rows, "a row was given back twice"


class Slab:
    """Memory of one read; it goes back to `slabs` when the last row in it was given back."""

    def __init__(self, slabs: Slabs, memory: Bytes) -> None:
        self.memory = memory
        self.address = address_of(memory)
        self._slabs = slabs
        self._num_rows = 0
        self._even: tuple[tuple[object, ...], list[Row]] = ((), [])

    @property
    def is_used(self) -> bool:
        """Whether a row was made of it and is not given back."""
        return self._num_rows > 0

    def row(self, start: int, end: int, size: int, group: str) -> Row:
        """Memory `start` to `end` as a row of `size` bytes; `Slabs.give_back` ends it."""
        self._num_rows += 1
        return Row(self, start, self.memory[start:end], size, group, self.address + start)

    def even_rows(self, count: int, first: int, step: int, size: int, group: str) -> list[Row]:
        """`count` rows of `size` bytes at `first`, `first + step`, ...; kept for the next time.

        Each ends where the next step begins.
        """
        kind = (first, step, size, group)
        known, rows = self._even
        if known != kind:
            rows = []
        for start in range(first + len(rows) * step, first + count * step, step):
            end = start - first + step
            rows.append(Row(self, start, self.memory[start:end], size, group, self.address + start))
        self._even = (kind, rows)
        self._num_rows += count
        return rows[:count]

    def forget_rows(self) -> None:
        """It is not kept: rows that were would keep its memory, being in a circle with it."""
        self._even = ((), [])

    def give_back(self, count: int = 1) -> None:
        """So many rows are used no more."""
        self._slabs.release(self, count)

    def drop(self, count: int) -> bool:
        """Count rows out; whether these were the last. The pool's lock is held."""
        assert self._num_rows >= count, "a row was given back twice"
        self._num_rows -= count
        return not self._num_rows


class Slabs:
    """Buffers for reads, a few of which are kept for the next ones. Thread-safe.

    One read fills one buffer, so what is kept is small, and warm in the processor's cache.
    """

    def __init__(self, size_bytes: int, num_kept: int = 8) -> None:
        self._size = size_bytes
        self._num_kept = num_kept
        self._lock = threading.Lock()
        self._free: list[Slab] = []
        self.num_in_use = 0

    def take(self, size: int) -> Slab:
        """At least `size` bytes."""
        with self._lock:
            self.num_in_use += 1
            if self._free and size <= self._size:
                return self._free.pop()
        return Slab(self, allocate(max(size, self._size)))

    def release(self, slab: Slab, count: int) -> None:
        """`count` rows of a slab are used no more."""
        with self._lock:
            if slab.drop(count):
                self._put(slab)

    def discard(self, slab: Slab) -> None:
        """Give back a slab of which no row was made."""
        with self._lock:
            self._put(slab)

    def _put(self, slab: Slab) -> None:
        self.num_in_use -= 1
        if slab.memory.size == self._size and len(self._free) < self._num_kept:
            self._free.append(slab)
        else:
            slab.forget_rows()


def stacked(rows: list[Row]) -> Bytes | None:
    """[n, row_bytes] one array over rows that lie at equal distances; None if they do not."""
    first = rows[0].whole
    base = rows[0].address
    step = rows[1].address - base if len(rows) > 1 else first.size
    if step < first.size or any(row.address != base + i * step for i, row in enumerate(rows)):
        return None
    return np.lib.stride_tricks.as_strided(first, shape=(len(rows), first.size), strides=(step, 1))
