"""Memory on huge pages for weights: reading them is what decoding costs.

Measured with one thread on a machine with 4 KiB pages by default: 9 GB/s from ordinary memory,
18 GB/s from huge pages. Weights are smaller than a huge page as often as not, so they are placed
side by side in large mappings; a mapping goes when the last tensor in it does.

Where the system has no huge pages this is ordinary memory. This module does not free single
tensors within a mapping: it is for what lives as long as the model.
"""

from __future__ import annotations

import contextlib
import mmap
from math import prod

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20
MAPPING_BYTES = 64 << 20
ALIGNMENT = 64  # bytes: a cache line, and a vector register


def _new_mapping(size_bytes: int) -> Tensor:
    """Return bytes on a mapping of their own, beginning at a huge page."""
    mapping = mmap.mmap(
        -1, size_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    raw = torch.frombuffer(mapping, dtype=torch.uint8)
    offset = -raw.data_ptr() % HUGE_PAGE_BYTES
    return raw[offset : offset + size_bytes]


class HugePages:
    """Places tensors one after the other in large mappings."""

    def __init__(self, mapping_bytes: int = MAPPING_BYTES) -> None:
        self._mapping_bytes = mapping_bytes
        self._free = torch.empty(0, dtype=torch.uint8)
        self.placed_bytes = 0  # of all tensors so far

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor of zeros, aligned to `ALIGNMENT`."""
        size = prod(shape) * dtype.itemsize
        if size == 0:
            return torch.empty(shape, dtype=dtype)
        taken = -(-size // ALIGNMENT) * ALIGNMENT
        self.placed_bytes += size
        if taken > self._free.numel():
            mapping = _new_mapping(max(taken, self._mapping_bytes))
            if taken > self._mapping_bytes:
                return mapping[:size].view(dtype).view(shape)
            self._free = mapping
        place, self._free = self._free[:size], self._free[taken:]
        return place.view(dtype).view(shape)

    def copy_of(self, x: Tensor) -> Tensor:
        """Return a contiguous copy of x."""
        return self.empty(tuple(x.shape), x.dtype).copy_(x)
