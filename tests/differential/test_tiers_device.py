"""Device blocks through every tier: the same bytes, the same digests, for every dtype and shape."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from statewise.kernels.interface import AttentionGeometry
from statewise.kernels.select import select_backend
from statewise.radix.key import Namespace
from statewise.radix.schema import CacheSchema, GroupKind, StateGroupSpec
from statewise.radix.segment import Tier
from statewise.runtime.memory.block_store import DeviceStore
from statewise.runtime.tiers.buffers import Arena, Row
from statewise.runtime.tiers.checksums import layer_digests
from statewise.runtime.tiers.copies import Copier, DevicePage, LoadPage
from statewise.runtime.tiers.device_io import DeviceIO, layer_bytes_of, pin
from statewise.runtime.tiers.host import HostTier
from statewise.runtime.tiers.page import shapes_of
from statewise.runtime.tiers.tiers import Tiers, all_ok
from statewise.runtime.tiers.transfer import EngineOptions, TransferEngine
from support.tier_pages import ManualClock, open_disk

PAGE, BLOCKS = 16, 24
GEOMETRIES = {
    "full": AttentionGeometry(4, 2, 24, PAGE, torch.bfloat16, 1.0),
    "window": AttentionGeometry(4, 1, 40, PAGE, torch.float32, 1.0, window=64),
}


def group_of(
    name: str, kind: GroupKind, layers: tuple[int, ...], window: int = 0
) -> StateGroupSpec:
    geometry = GEOMETRIES[name]
    size = 2 * geometry.num_kv_heads * geometry.head_dim * geometry.dtype.itemsize
    return StateGroupSpec(name, kind, layers, "layout", "v1", entry_bytes=size, window=window)


SCHEMA = CacheSchema(
    PAGE,
    5,
    (
        group_of("full", GroupKind.FULL, (0, 3)),
        group_of("window", GroupKind.WINDOW, (1, 2, 4), window=64),
    ),
    "model",
)


@pytest.fixture
def device() -> DeviceStore:
    store = DeviceStore(
        SCHEMA, GEOMETRIES, select_backend("torch", torch.float32)[0], [BLOCKS, BLOCKS]
    )
    generator = torch.Generator().manual_seed(0)
    for pool in store.groups:
        for layer in pool.layers:
            layer.copy_(torch.randn(layer.shape, generator=generator))
    return store


def rows_of(device: DeviceStore, group: int, count: int) -> list[Row]:
    size = layer_bytes_of(device)[group] * len(SCHEMA.groups[group].layers)
    return Arena(size, 64).take(count)


def raw(device: DeviceStore, group: int, block: int) -> bytes:
    """A block's bytes, layer after layer, the slow way."""
    layers = device.groups[group].layers
    return b"".join(bytes(layer[block].reshape(-1).view(torch.uint8).tolist()) for layer in layers)


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("neighbours", [True, False])
def test_rows_hold_the_blocks_bytes_and_digests_agree(
    device: DeviceStore, group: int, neighbours: bool
) -> None:
    io = DeviceIO(device)
    blocks = [5, 2, 23, 0]
    rows = rows_of(device, group, 8)[:: 1 if neighbours else 2][:4]
    digests = io.read(group, blocks, rows)
    for block, row, sums in zip(blocks, rows, digests, strict=True):
        assert row.data.tobytes() == raw(device, group, block)
        assert (layer_digests(row.data, len(SCHEMA.groups[group].layers)) == sums).all()
        assert not row.whole[row.size :].any()
    before = [raw(device, group, block) for block in range(BLOCKS)]
    landed = io.write(group, [9, 8, 7, 6], rows)
    assert (landed == digests).all()
    moved = dict(zip([9, 8, 7, 6], blocks, strict=True))
    for block in range(BLOCKS):
        assert raw(device, group, block) == before[moved.get(block, block)]


def test_a_payload_has_the_schemas_bytes(device: DeviceStore) -> None:
    shapes = shapes_of(SCHEMA, layer_bytes_of(device))
    assert [s.block_bytes for s in shapes] == [g.block_bytes(PAGE) for g in SCHEMA.groups]


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_poisoned_blocks_are_whole_again_after_a_load(
    device: DeviceStore, tmp_path: Path, tier: Tier
) -> None:
    shapes = shapes_of(SCHEMA, layer_bytes_of(device))
    disk = open_disk(tmp_path / "c", shapes=shapes)
    host = HostTier(shapes, [16, 16], pin)
    clock = ManualClock()
    engine = TransferEngine(EngineOptions(num_threads=0), clock)
    tiers = Tiers([host, disk], Copier(shapes, DeviceIO(device), clock), engine)
    chain = tiers.chain(Namespace())
    chain.extend(np.arange(10 * PAGE, dtype=np.int32).tobytes())
    where = [[tiers.address(chain, g, page) for page in range(10)] for g in range(2)]
    wanted = [[raw(device, g, block) for block in range(10)] for g in range(2)]
    pages = [DevicePage(g, b, where[g][b], PAGE) for g in range(2) for b in range(10)]
    demotion = tiers.demote(tier, pages)
    assert demotion is not None
    engine.drain()
    assert all_ok(demotion)
    for g in range(2):
        device.fill_blocks(g, range(BLOCKS), float("nan"))
        found = tiers.find(where[g])
        loads = [
            LoadPage(g, 12 + i, place.handle, where[g][i].key)
            for i, place in enumerate(found)
            if place is not None
        ]
        load = tiers.load(tier, loads)
        engine.drain()
        assert all_ok(load)
        assert load.num_ok == 10
        assert [raw(device, g, 12 + i) for i in range(10)] == wanted[g]
    tiers.close()
