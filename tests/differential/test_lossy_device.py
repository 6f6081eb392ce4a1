"""Device blocks through a tier of lossy copies: what lands, what is found out, how it is named."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from statewise.kernels.interface import AttentionGeometry, EntryGeometry, GroupGeometry
from statewise.kernels.select import select_backend
from statewise.radix import CacheSchema, GroupKind, Namespace, StateGroupSpec
from statewise.radix.lossy import KINDS, lossy_schema
from statewise.radix.segment import Tier
from statewise.runtime.memory.block_store import DeviceStore
from statewise.runtime.tiers.copies import Copier, DevicePage, LoadPage
from statewise.runtime.tiers.host import HostTier
from statewise.runtime.tiers.lossy_io import LossyIO
from statewise.runtime.tiers.page import PageAddress, shapes_of
from statewise.runtime.tiers.quantise import Quantiser
from statewise.runtime.tiers.store import Outcome
from statewise.runtime.tiers.tiers import Tiers, all_ok
from statewise.runtime.tiers.transfer import EngineOptions, Transfer, TransferEngine
from support.tier_pages import ManualClock

PAGE, BLOCKS, PAGES = 16, 24, 10
GEOMETRIES: dict[str, GroupGeometry] = {
    "full": AttentionGeometry(4, 2, 24, PAGE, torch.bfloat16, 1.0),
    "latent": EntryGeometry(40, PAGE, torch.float32),
}
SCHEMA = CacheSchema(
    PAGE,
    5,
    (
        StateGroupSpec("full", GroupKind.FULL, (0, 3), "heads", "v1", entry_bytes=2 * 2 * 24 * 2),
        StateGroupSpec(
            "latent", GroupKind.WINDOW, (1, 2, 4), "e", "v1", entry_bytes=160, window=64
        ),
    ),
    "model",
)


class Device:
    """Pools of two groups over a host tier of lossy copies."""

    def __init__(self, kind: str) -> None:
        self.schema: CacheSchema = lossy_schema(SCHEMA, kind)
        backend = select_backend("torch", torch.float32)[0]
        self.store = DeviceStore(self.schema, GEOMETRIES, backend, [BLOCKS, BLOCKS])
        generator = torch.Generator().manual_seed(0)
        for pool in self.store.groups:
            for layer in pool.layers:
                layer.copy_(torch.randn(layer.shape, generator=generator))
        self.io = LossyIO(self.store, self.schema)
        self.shapes = shapes_of(self.schema, self.io.layer_bytes)
        self.host = HostTier(self.shapes, [PAGES, PAGES])
        clock = ManualClock()
        self.engine = TransferEngine(EngineOptions(num_threads=0), clock)
        copier = Copier(self.shapes, self.io, clock, landing=self.io.landing)
        self.tiers = Tiers([self.host], copier, self.engine)
        chain = self.tiers.chain(Namespace())
        chain.extend(np.arange(PAGES * PAGE, dtype=np.int32).tobytes())
        self.where = [[self.tiers.address(chain, g, p) for p in range(PAGES)] for g in range(2)]

    def demote(self, group: int, damaged: bool = False) -> Transfer:
        """Blocks 0 .. PAGES-1, which must be as they were published."""
        sums = self.store.digests(group, np.arange(PAGES, dtype=np.int32))
        if damaged:
            sums[3] += np.uint64(1)
        pages = [DevicePage(group, p, self.where[group][p], PAGE, sums[p]) for p in range(PAGES)]
        transfer = self.tiers.demote(Tier.HOST, pages)
        assert transfer is not None
        self.engine.drain()
        return transfer

    def load(self, group: int) -> Transfer:
        """Into blocks PAGES .. 2 * PAGES - 1."""
        found = self.tiers.find(self.where[group])
        places = [place for place in found if place is not None]
        loads = [
            LoadPage(group, PAGES + i, place.handle, self.where[group][i].key)
            for i, place in enumerate(places)
        ]
        transfer = self.tiers.load(Tier.HOST, loads)
        self.engine.drain()
        return transfer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [0, 1])
def test_blocks_come_back_as_their_copies_read_and_no_other_way(kind: str, group: int) -> None:
    device = Device(kind)
    assert all_ok(device.demote(group))
    assert device.shapes[group].block_bytes < 0.66 * SCHEMA.groups[group].block_bytes(PAGE)
    assert all_ok(device.load(group))
    geometry = list(GEOMETRIES.values())[group]
    for layer in device.store.groups[group].layers:
        size = layer[0].numel() * layer.element_size()
        quantiser = Quantiser.of(kind, geometry, size)
        for page in range(PAGES):
            payload = layer[page].contiguous().view(torch.uint8).reshape(-1).numpy().copy()
            copy = np.empty(quantiser.copy_bytes, dtype=np.uint8)
            quantiser.quantise(payload, copy)
            quantiser.dequantise(copy, payload)
            landed = layer[PAGES + page].view(torch.uint8).reshape(-1).numpy()
            assert landed.tobytes() == payload.tobytes()
            assert not torch.equal(layer[page], layer[PAGES + page])


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_found_where_a_page_lands(kind: str) -> None:
    """Scales and numbers are covered by the digests of what they read as."""
    device = Device(kind)
    device.demote(0)
    handles = [place.handle for place in device.tiers.find(device.where[0]) if place is not None]
    layer_bytes = device.io.layer_bytes[0]
    for page, at in ((2, 3), (5, layer_bytes - 1), (7, layer_bytes + 2)):  # scale, number, scale
        (one,) = device.host.fetch([handles[page]])
        assert one.row is not None
        one.row.data[at] ^= 0x40
        device.host.release([one])
    results = device.load(0).results
    bad = {i: r.bad_layers for i, r in enumerate(results) if r is not None and r.bad_layers}
    assert bad == {2: 1, 5: 1, 7: 2}
    assert all(r is not None and (r.outcome is Outcome.OK) == (i not in bad)
               for i, r in enumerate(results))  # fmt: skip
    assert len([p for p in device.tiers.find(device.where[0]) if p is not None]) == PAGES - 3


def test_a_block_that_is_not_as_published_is_not_copied() -> None:
    results = Device("int8").demote(0, damaged=True).results
    outcomes = [r.outcome for r in results if r is not None]
    assert outcomes == [Outcome.CORRUPT if p == 3 else Outcome.OK for p in range(PAGES)]


def test_names_of_exact_and_lossy_pages_never_meet() -> None:
    """Not for a group of the same size either: the layout is part of the name."""
    keys: Counter[bytes] = Counter()
    sizes = [1000, 1000]
    for schema in (SCHEMA, *(lossy_schema(SCHEMA, kind) for kind in KINDS)):
        for address in _addresses(schema, sizes):
            keys[address.key] += 1
    assert len(keys) == 3 * 2 * PAGES
    assert max(keys.values()) == 1


def _addresses(schema: CacheSchema, sizes: list[int]) -> list[PageAddress]:
    shapes = shapes_of(schema, sizes)
    engine = TransferEngine(EngineOptions(num_threads=0), ManualClock())
    tiers = Tiers([], Copier(shapes, Device("int8").io, ManualClock()), engine)
    chain = tiers.chain(Namespace())
    chain.extend(np.arange(PAGES * PAGE, dtype=np.int32).tobytes())
    return [tiers.address(chain, g, p) for g in range(2) for p in range(PAGES)]
