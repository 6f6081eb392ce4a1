"""Demotion and loading end to end: what lands is what left, or it is not counted as loaded."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from statewise.radix.key import Namespace
from statewise.radix.segment import Tier
from statewise.runtime.clock import SystemClock
from statewise.runtime.tiers.copies import Copier, DevicePage, LoadPage
from statewise.runtime.tiers.disk import DiskTier
from statewise.runtime.tiers.host import HostTier
from statewise.runtime.tiers.page import PageAddress
from statewise.runtime.tiers.store import NO_HANDLE, Fetched, Outcome, TierStore
from statewise.runtime.tiers.tiers import Location, Tiers, all_ok
from statewise.runtime.tiers.transfer import EngineOptions, Transfer, TransferEngine
from support.tier_blocks import ArrayBlocks
from support.tier_pages import (
    FULL,
    SHAPES,
    WINDOW,
    ManualClock,
    addresses,
    open_disk,
    payload_of,
    tokens_of,
)

INDEX = replace(WINDOW, name="index", depends_on="full")
NUM_BLOCKS = 32


class World:
    """Blocks, stores and an engine whose steps run when the test says so."""

    def __init__(
        self, stores: Sequence[TierStore], shapes: Sequence = SHAPES, num_threads: int = 0
    ) -> None:
        self.blocks = ArrayBlocks(shapes, NUM_BLOCKS)
        clock = SystemClock() if num_threads else ManualClock()
        copier = Copier(shapes, self.blocks, clock, step_bytes=3 * 4096)
        self.engine = TransferEngine(EngineOptions(num_threads=num_threads), clock)
        self.tiers = Tiers(stores, copier, self.engine)

    def fill(self, group: int, where: Sequence[PageAddress]) -> list[DevicePage]:
        """Put the right payloads into blocks 0, 1, ..."""
        shape = self.blocks.shapes[group]
        pages = []
        for block, address in enumerate(where):
            self.blocks.pools[group][block] = payload_of(address, shape)
            pages.append(DevicePage(group, block, address, shape.page_size))
        return pages

    def demote(self, tier: Tier, pages: Sequence[DevicePage]) -> Transfer:
        transfer = self.tiers.demote(tier, pages)
        assert transfer is not None
        assert self.engine.wait(transfer, 30)
        return transfer

    def load(
        self, tier: Tier, group: int, where: Sequence[PageAddress], first: int = 16
    ) -> Transfer:
        """Load into blocks `first`, ..."""
        store = self.tiers.stores[tier]
        handles = store.find([a.key for a in where])
        pages = [
            LoadPage(group, first + i, handle, address.key)
            for i, (handle, address) in enumerate(zip(handles, where, strict=True))
        ]
        transfer = self.tiers.load(tier, pages)
        assert self.engine.wait(transfer, 30)
        return transfer

    def holds(self, group: int, block: int, address: PageAddress) -> bool:
        wanted = payload_of(address, self.blocks.shapes[group])
        return bool((self.blocks.pools[group][block] == wanted).all())


def host() -> HostTier:
    return HostTier(SHAPES, [16, 16])


def outcomes(transfer: Transfer) -> list[Outcome]:
    return [result.outcome for result in transfer.results if result is not None]


@pytest.fixture(params=["host", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> TierStore:
    return host() if request.param == "host" else open_disk(tmp_path / "c")


def test_pages_go_out_and_come_back(store: TierStore) -> None:
    world = World([store])
    full, window = addresses(8), addresses(8, WINDOW)
    pages = world.fill(0, full) + world.fill(1, window)
    assert all_ok(world.demote(store.tier, pages))
    for pool in world.blocks.pools:
        pool[:] = 0xEE
    assert all_ok(world.load(store.tier, 0, full))
    assert all_ok(world.load(store.tier, 1, window))
    for i in range(8):
        assert world.holds(0, 16 + i, full[i])
        assert world.holds(1, 16 + i, window[i])
    assert (world.blocks.pools[0][:16] == 0xEE).all(), "nothing else was touched"
    store.close()


def test_a_page_is_found_only_after_its_write_succeeded(store: TierStore) -> None:
    """F12, F19."""
    world = World([store])
    where = addresses(5)
    transfer = world.tiers.demote(store.tier, world.fill(0, where))
    assert transfer is not None
    for _ in range(10):
        found = [place is not None for place in world.tiers.find(where)]
        done = [result is not None for result in transfer.results]
        assert found == done
        world.engine.run_one()
    assert all(found)
    store.close()


def test_bytes_that_do_not_arrive_are_no_load(store: TierStore) -> None:
    """F22: the copy reports no error, and one layer's bytes are wrong all the same."""
    world = World([store])
    where = addresses(3)
    world.demote(store.tier, world.fill(0, where))

    def damage(group: int, blocks: Sequence[int]) -> None:
        if 17 in blocks:
            world.blocks.pools[group][17, 1500] ^= 1

    world.blocks.after_write = damage
    transfer = world.load(store.tier, 0, where)
    assert outcomes(transfer) == [Outcome.OK, Outcome.CORRUPT, Outcome.OK]
    result = transfer.results[1]
    assert result is not None
    assert result.bad_layers == 0b010, "and the layer is named"
    assert store.find([where[1].key]) == [NO_HANDLE], "the copy is dropped"
    assert [d.key for d in world.tiers.pop_dropped()] == [where[1].key]
    store.close()


def test_a_handle_of_another_page_is_no_load(store: TierStore) -> None:
    """F15: a stale reference may not bring foreign state."""
    world = World([store])
    where = addresses(2)
    world.demote(store.tier, world.fill(0, where))
    handles = store.find([a.key for a in where])
    pages = [LoadPage(0, 20, handles[1], where[0].key)]
    transfer = world.tiers.load(store.tier, pages)
    world.engine.wait(transfer)
    assert outcomes(transfer) == [Outcome.CORRUPT]
    assert (world.blocks.pools[0][20] == 0xEE).all(), "and it was not copied"
    store.close()


def test_a_record_of_another_number_of_layers_is_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody writes one by accident; whoever can write to a shared store might."""
    host = HostTier(SHAPES, [8, 8])
    world = World([host])
    where = addresses(2)
    world.demote(Tier.HOST, world.fill(0, where))
    real = host.fetch

    def shorter(handles: Sequence[int]) -> list[Fetched]:
        one, *others = real(handles)
        assert one.record is not None
        return [replace(one, record=replace(one.record, digests=one.record.digests[:-1])), *others]

    monkeypatch.setattr(host, "fetch", shorter)
    transfer = world.load(Tier.HOST, 0, where)
    assert outcomes(transfer) == [Outcome.CORRUPT, Outcome.OK]


def test_missing_pages_leave_their_blocks_alone(store: TierStore) -> None:
    world = World([store])
    where = addresses(3)
    world.demote(store.tier, world.fill(0, where))
    store.free(store.find([where[1].key]))
    transfer = world.load(store.tier, 0, where)
    assert outcomes(transfer) == [Outcome.OK, Outcome.MISSING, Outcome.OK]
    assert (world.blocks.pools[0][17] == 0xEE).all()
    store.close()


def test_a_device_that_cannot_be_read_stores_nothing(store: TierStore) -> None:
    world = World([store])

    def fail(_kind: str) -> None:
        raise OSError("device lost")

    world.blocks.before = fail
    where = addresses(5)
    transfer = world.demote(store.tier, world.fill(0, where))
    assert set(outcomes(transfer)) == {Outcome.FAILED}
    assert world.tiers.find(where) == [None] * 5
    world.blocks.before = lambda _kind: None
    assert all_ok(world.demote(store.tier, world.fill(0, where))), "and its rows came back"
    store.close()


def test_blocks_are_read_when_the_step_runs_and_stay_leased_until_then(store: TierStore) -> None:
    """F32: `on_done` comes only when the source is not read any more."""
    world = World([store], num_threads=1)
    reading, go_on = threading.Event(), threading.Event()

    def slow(_kind: str) -> None:
        reading.set()
        assert go_on.wait(30)

    world.blocks.before = slow
    done: list[Transfer] = []
    transfer = world.tiers.demote(store.tier, world.fill(0, addresses(2)), done.append)
    assert transfer is not None
    assert reading.wait(30)
    assert world.tiers.poll() == []
    assert not done
    go_on.set()
    assert world.engine.wait(transfer, 30)
    world.tiers.poll()
    assert done == [transfer]
    world.tiers.close()


def test_a_reader_that_looks_only_at_ready_pages_never_sees_poison(tmp_path: Path) -> None:
    """F31: pages of a load become readable one by one; what is not ready may hold anything."""
    disk = open_disk(tmp_path / "c")
    world = World([disk])
    where = addresses(9)
    world.demote(Tier.DISK, world.fill(0, where))
    handles = disk.find([a.key for a in where])
    world.blocks.pools[0][:] = 0xEE
    pages = [
        LoadPage(0, 16 + i, h, a.key) for i, (h, a) in enumerate(zip(handles, where, strict=True))
    ]
    transfer = world.tiers.load(Tier.DISK, pages)
    seen = []
    while not transfer.is_done:
        world.engine.run_one()
        seen.append(transfer.num_ok)
        for i, result in enumerate(transfer.results):
            if result is not None:
                assert world.holds(0, 16 + i, where[i])
            else:
                assert (world.blocks.pools[0][16 + i] == 0xEE).all()
    assert seen == [3, 6, 9]
    world.tiers.close()


# ------------------------------------------------------------------ several tiers


def test_the_fastest_copy_is_named(tmp_path: Path) -> None:
    disk = open_disk(tmp_path / "c")
    world = World([disk, host()])
    where = addresses(4)
    pages = world.fill(0, where)
    world.demote(Tier.DISK, pages)
    world.demote(Tier.HOST, pages[:2])
    tiers = [place.tier for place in world.tiers.find(where) if place]
    assert tiers == [Tier.HOST, Tier.HOST, Tier.DISK, Tier.DISK]
    assert world.tiers.find(addresses(1, seed=3)) == [None]
    world.tiers.free([place for place in world.tiers.find(where) if place])
    assert [place and place.tier for place in world.tiers.find(where)] == [Tier.DISK] * 2 + [
        None
    ] * 2
    world.tiers.close()


def test_the_oldest_of_the_host_are_on_disk_before_they_are_evicted(tmp_path: Path) -> None:
    disk = open_disk(tmp_path / "c")
    world = World([HostTier(SHAPES, [8, 8]), disk])
    where = [address for seed in range(10) for address in addresses(2, seed=seed)]
    for first in range(0, 20, 2):
        world.demote(Tier.HOST, world.fill(0, where[first : first + 2]))
        world.tiers.poll()
        world.engine.drain()
        world.tiers.poll()
    places = world.tiers.find(where)
    assert None not in places, "every page is somewhere"
    assert all(disk.find([a.key]) != [NO_HANDLE] for a in where[:12])
    for dropped in world.tiers.pop_dropped():
        assert dropped.tier is Tier.HOST
        assert dropped.elsewhere == Location(Tier.DISK, disk.find([dropped.key])[0])
    assert all_ok(world.load(Tier.DISK, 0, where[:6]))
    world.tiers.close()


def test_prefetched_pages_are_on_the_host(tmp_path: Path) -> None:
    disk = open_disk(tmp_path / "c")
    world = World([host(), disk])
    where = addresses(5)
    world.demote(Tier.DISK, world.fill(0, where))
    handles = disk.find([a.key for a in where])
    transfer = world.tiers.prefetch(Tier.DISK, [(h, "full") for h in handles])
    world.engine.wait(transfer)
    assert all_ok(transfer)
    assert [p and p.tier for p in world.tiers.find(where)] == [Tier.HOST] * 5
    assert all_ok(world.load(Tier.HOST, 0, where))
    assert all(world.holds(0, 16 + i, where[i]) for i in range(5))
    world.tiers.close()


# ------------------------------------------------------------------ indexes (F24)


def index_world(store: TierStore) -> tuple[World, list[PageAddress], list[PageAddress]]:
    world = World([store], (FULL, INDEX))
    chain = world.tiers.chain(Namespace())
    chain.extend(tokens_of(0, 4))
    base = [world.tiers.address(chain, 0, page) for page in range(4)]
    index = [world.tiers.address(chain, 1, page) for page in range(4)]
    return world, base, index


def test_an_index_is_stored_with_what_it_routes_into(tmp_path: Path) -> None:
    """F24: index keys whose compressed entries are not stored, or are others, are not found."""
    disk = open_disk(tmp_path / "c", shapes=(FULL, INDEX))
    world, base, index = index_world(disk)
    lonely = world.demote(Tier.DISK, world.fill(1, index))
    assert set(outcomes(lonely)) == {Outcome.REFUSED}
    assert all_ok(world.demote(Tier.DISK, world.fill(0, base) + world.fill(1, index)))
    assert None not in world.tiers.find(index)
    disk.free(disk.find([base[1].key]))
    assert [place is None for place in world.tiers.find(index)] == [False, True, False, False]
    rewritten = world.fill(0, base)[1]
    world.blocks.pools[0][1, 5] ^= 1
    assert all_ok(world.demote(Tier.DISK, [rewritten]))
    assert world.tiers.find(index)[1] is None, "the same tokens, other bytes"
    assert world.tiers.counters["dependency_mismatch"] == 2
    disk.close()
    disk = open_disk(tmp_path / "c", shapes=(FULL, INDEX))
    again = World([disk], (FULL, INDEX))
    assert [place is None for place in again.tiers.find(index)] == [False, True, False, False]
    again.tiers.close()


@pytest.mark.slow
def test_random_walks_never_bring_wrong_bytes(tmp_path: Path) -> None:
    """F15: each page carries its owner, in any order of demotions, loads and evictions."""
    rng = np.random.default_rng(5)
    disk: DiskTier = open_disk(tmp_path / "c", budget=300 << 10, extent=64 << 10)
    world = World([HostTier(SHAPES, [8, 8]), disk])
    owners = {salt: addresses(12, salt=salt) for salt in ("a", "b", "c")}
    loaded = 0
    for _ in range(150):
        salt = str(rng.choice(list(owners)))
        first = int(rng.integers(0, 9))
        where = owners[salt][first : first + 3]
        tier = Tier.HOST if rng.random() < 0.5 else Tier.DISK
        if rng.random() < 0.5:
            world.demote(tier, world.fill(0, where))
        else:
            world.blocks.pools[0][16:] = 0xEE
            transfer = world.load(tier, 0, where)
            for i, result in enumerate(outcomes(transfer)):
                assert result in (Outcome.OK, Outcome.MISSING)
                assert world.holds(0, 16 + i, where[i]) == (result is Outcome.OK)
                loaded += result is Outcome.OK
        world.tiers.poll()
        world.engine.drain()
    assert loaded > 50
    world.tiers.close()
