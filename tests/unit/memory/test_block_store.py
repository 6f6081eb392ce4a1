"""The device store: shapes, poison, copies that read before they write, digests."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from statewise.kernels.reference import TorchAttention
from statewise.runtime.memory.block_store import HUGE_PAGE, DeviceStore, allocate
from support.toy_model import ToyModel


def store(dtype: torch.dtype = torch.float32, *, poison: bool = False) -> DeviceStore:
    model = ToyModel(("window", "full", "shared", "window"), dtype=dtype)
    return DeviceStore(model.schema, model.geometries(), TorchAttention(), (8, 5), poison=poison)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_allocation_is_aligned_and_writable(dtype):
    clean, _mapping = allocate((3, 2, 5), dtype)
    assert clean.shape == (3, 2, 5)
    assert clean.data_ptr() % HUGE_PAGE == 0
    assert (clean == 0).all()
    clean[1] = 2
    assert clean.sum() == 20


@pytest.mark.parametrize("poison", [False, True])
def test_a_cleared_store_is_as_new(poison):
    s = store(poison=poison)
    tensors = [t for pool in s.groups for t in pool.layers]
    for _ in range(2):
        assert all((t.isnan() if poison else t == 0).all() for t in tensors)
        for t in tensors:
            t.fill_(7.0)
        s.clear()


def test_pools_have_one_tensor_per_owning_layer():
    s = store()
    assert [len(p.layers) for p in s.groups] == [2, 1]
    assert [p.layers[0].shape[0] for p in s.groups] == [8, 5]
    per_block = 2 * 2 * 4 * 8 * 4  # K and V, heads, page, head dim, bytes
    assert s.bytes_by_group() == {"window": 2 * 8 * per_block, "full": 5 * per_block}
    window, full = s.groups
    assert s.tensor(0, 0) is window.layers[0]
    assert s.tensor(0, 3) is window.layers[1]
    assert s.tensor(1, 1) is s.tensor(1, 2) is full.layers[0]  # layer 2 shares layer 1's
    with pytest.raises(KeyError, match="layer 1 has no state in group 'window'"):
        s.tensor(0, 1)


def test_a_group_without_geometry_is_refused():
    model = ToyModel(("full",))
    with pytest.raises(ValueError, match="'full' has no geometry"):
        DeviceStore(model.schema, {}, TorchAttention(), (4,))


def test_copies_read_every_source_before_writing():
    s = store()
    for tensor in s.groups[0].layers:
        tensor.copy_(torch.arange(8.0).view(8, 1, 1, 1, 1).expand_as(tensor))
    s.copy_blocks(0, [0, 1, 2], [1, 2, 0])
    for tensor in s.groups[0].layers:
        assert tensor[:4, 0, 0, 0, 0].tolist() == [2.0, 0.0, 1.0, 3.0]


@pytest.mark.parametrize("block", [-1, 8])
def test_a_block_outside_the_pool_is_a_programmer_error(block):
    s = store()
    with pytest.raises(AssertionError, match="outside the pool"):
        s.copy_blocks(0, [0], [block])
    with pytest.raises(AssertionError, match="outside the pool"):
        s.digests(0, np.array([block], dtype=np.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_flipped_bit_changes_the_digest_of_its_block_and_layer_only(dtype):
    s = store(dtype)
    generator = torch.Generator().manual_seed(0)
    for tensor in s.groups[0].layers:
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    blocks = np.array([1, 6, 3], dtype=np.int32)
    before = s.digests(0, blocks)
    assert before.shape == (3, 2)
    assert len(np.unique(before)) == before.size
    raw = s.groups[0].layers[1][6].view(torch.uint8).flatten()
    rng = np.random.default_rng(0)
    for _ in range(200):
        at, bit = int(rng.integers(len(raw))), int(rng.integers(8))
        raw[at] ^= 1 << bit
        changed = s.digests(0, blocks) != before
        assert changed.tolist() == [[False, False], [False, True], [False, False]]
        raw[at] ^= 1 << bit
    assert (s.digests(0, blocks) == before).all()


def test_moved_bytes_change_the_digest():
    s = store()
    layer = s.groups[1].layers[0]
    layer[0] = torch.arange(layer[0].numel(), dtype=torch.float32).view_as(layer[0])
    layer[1] = layer[0].flip(-1)
    layer[2] = layer[0].roll(1, dims=1)
    digests = s.digests(1, np.arange(3, dtype=np.int32))
    assert len(np.unique(digests)) == 3


def test_environments_say_where_blocks_lie_and_what_the_backend_reads():
    s = store(torch.bfloat16)
    window, full = s.environments()
    assert window.layout_id == "hnd-bf16-h2-p4-d8-v1"
    assert window.base_addresses == tuple(t.data_ptr() for t in s.groups[0].layers)
    assert len(full.base_addresses) == 1
    assert window.block_stride == full.block_stride == 2 * 2 * 4 * 8 * 2
    assert window.alignment == 2
