"""Tensors side by side in large mappings."""

from __future__ import annotations

import itertools
import weakref

import pytest
import torch

from statewise.kernels.cpu_backend import MIN_PACKED_BYTES, CpuOps
from statewise.kernels.huge_pages import ALIGNMENT, HUGE_PAGE_BYTES, HugePages
from support.native_kernels import needs_native


def span(x: torch.Tensor) -> tuple[int, int]:
    return x.data_ptr(), x.data_ptr() + x.nbytes


def test_tensors_are_aligned_and_apart() -> None:
    pages = HugePages(mapping_bytes=1 << 16)
    shapes = [(3,), (100, 7), (1 << 14,), (5, 5), (1 << 15,), (0, 4), (1,)]
    tensors = [pages.empty(shape, torch.float32) for shape in shapes]
    for i, x in enumerate(tensors):
        assert x.shape == shapes[i]
        assert not x.any()
        assert x.is_contiguous()
        assert x.data_ptr() % ALIGNMENT == 0
        x.fill_(i + 1)
    for i, x in enumerate(tensors):
        assert bool((x == i + 1).all())
    spans = sorted(span(x) for x in tensors if x.numel())
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


def test_small_tensors_share_a_mapping_and_large_ones_do_not() -> None:
    pages = HugePages(mapping_bytes=1 << 16)
    first, second = (pages.empty((100,), torch.float32) for _ in range(2))
    assert second.data_ptr() - first.data_ptr() == 448  # 400 bytes, aligned
    large = pages.empty((1 << 15,), torch.float32)
    assert large.data_ptr() % HUGE_PAGE_BYTES == 0
    third = pages.empty((1,), torch.float32)
    assert third.data_ptr() - second.data_ptr() == 448


def test_a_mapping_goes_with_its_last_tensor() -> None:
    pages = HugePages(mapping_bytes=1 << 12)
    kept = pages.empty((4,), torch.float32)
    storage = weakref.ref(kept.untyped_storage())
    del pages
    kept.fill_(3.0)
    assert kept.tolist() == [3.0] * 4
    del kept
    assert storage() is None


@needs_native
def test_packing_copies_what_is_large() -> None:
    ops = CpuOps()
    small = torch.randn(8, 8)
    assert ops.pack(small) is small
    large = torch.randn(MIN_PACKED_BYTES // 4, 2).t()
    packed = ops.pack(large)
    assert packed.is_contiguous()
    assert torch.equal(packed, large)
    assert packed.data_ptr() != large.data_ptr()


@needs_native
def test_rows_of_packed_weights_are_the_weights() -> None:
    ops = CpuOps()
    for shape in ((300, 128), (1000, 96), (33, 2048), (500, 100)):
        weight = torch.randn(shape).bfloat16()
        packed = ops.pack(weight)
        indices = torch.tensor([0, shape[0] - 1, 17, 17, 31, 32])
        assert torch.equal(ops.rows(packed, indices), weight[indices])
        assert torch.equal(ops.rows(packed, torch.arange(shape[0])), weight)
        for bad in (-1, shape[0]):
            with pytest.raises(IndexError):
                ops.rows(packed, torch.tensor([0, bad if bad > 0 else -shape[0] - 1]))
