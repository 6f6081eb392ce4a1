"""The host tier: budgets, recency, and slots that are not reused while they are read (F32)."""

from __future__ import annotations

from typing import cast

import pytest

from statewise.runtime.clock import SystemClock
from statewise.runtime.tiers import tiers
from statewise.runtime.tiers.buffers import Arena, stacked
from statewise.runtime.tiers.host import HostTier, slots_within
from statewise.runtime.tiers.store import NO_HANDLE, Loss, Outcome, TierError
from support.tier_pages import (
    FULL,
    SHAPES,
    WINDOW,
    addresses,
    check_fetch,
    payload_of,
    record_of,
    store_pages,
)


def host_of(full: int = 4, window: int = 4) -> HostTier:
    return HostTier(SHAPES, [full, window])


def test_pages_come_back_by_key_and_by_handle() -> None:
    host = host_of()
    where = addresses(3)
    handles = store_pages(host, where)
    assert host.find([a.key for a in where]) == handles
    assert check_fetch(host, handles, where, FULL) == [Outcome.OK] * 3
    assert [host.key_of(h) for h in handles] == [a.key for a in where]
    assert host.find([b"?" * 16]) == [NO_HANDLE]
    assert host.fetch([99])[0].outcome is Outcome.MISSING


def test_a_full_group_evicts_its_oldest_and_no_other_groups() -> None:
    host = host_of()
    window = addresses(4, WINDOW)
    kept = store_pages(host, window, WINDOW)
    first = addresses(4)
    handles = store_pages(host, first)
    host.touch(handles[:1])
    assert host.oldest("full", 2) == handles[1:3]
    store_pages(host, addresses(2, seed=7))
    assert host.pop_dropped() == [
        (handles[1], first[1].key, Loss.ROOM),
        (handles[2], first[2].key, Loss.ROOM),
    ]
    assert host.pop_dropped() == []
    assert check_fetch(host, kept, window, WINDOW) == [Outcome.OK] * 4
    assert host.status().pages_by_group == {"full": 4, "window": 4}


def test_handles_never_mean_another_page() -> None:
    host = host_of(full=1)
    seen: set[int] = set()
    for seed in range(20):
        (handle,) = store_pages(host, addresses(1, seed=seed))
        assert handle not in seen
        seen.add(handle)
        for old in seen - {handle}:
            assert host.fetch([old])[0].outcome is Outcome.MISSING


def test_a_slot_that_is_read_is_not_reused() -> None:
    host = host_of(full=2)
    where = addresses(2)
    handles = store_pages(host, where)
    reading = host.fetch(handles[:1])
    host.free(handles)
    assert host.find([a.key for a in where]) == [NO_HANDLE] * 2
    taken = host.stage("full", 2)
    assert len(taken) == 1, "one slot is still read"
    taken[0].data[:] = 0
    row = reading[0].row
    assert row is not None
    assert (row.data == payload_of(where[0], FULL)).all()
    host.discard(taken)
    host.release(reading)
    assert len(host.stage("full", 2)) == 2


def test_a_page_that_is_read_is_not_evicted() -> None:
    host = host_of(full=2)
    handles = store_pages(host, addresses(2))
    reading = host.fetch(handles)
    assert host.stage("full", 1) == []
    host.release(reading[:1])
    assert len(host.stage("full", 1)) == 1
    host.release(reading[1:])


def test_what_is_staged_is_not_found_before_it_is_committed() -> None:
    """F12: a key is known only after its bytes are there."""
    host = host_of()
    where = addresses(2)
    rows = host.stage("full", 2)
    assert host.find([a.key for a in where]) == [NO_HANDLE] * 2
    host.discard(rows)
    assert host.num_free("full") == 4
    assert host.status().num_pages == 0


def test_a_known_key_keeps_its_page() -> None:
    host = host_of()
    where = addresses(2)
    assert store_pages(host, where) == store_pages(host, where)
    assert host.num_free("full") == 2
    assert host.status().counters["duplicates"] == 2


def test_rows_of_others_are_copied() -> None:
    host, arena = host_of(full=2), Arena(FULL.block_bytes, 8)
    where = addresses(3)
    rows = arena.take(3)
    pages = []
    for address, row in zip(where, rows, strict=True):
        row.data[:] = payload_of(address, FULL)
        pages.append((record_of(address, FULL, row.data), row))
    handles = host.commit(pages)
    for row in rows:
        row.data[:] = 0
    arena.give_back(rows)
    assert check_fetch(host, handles[1:], where[1:], FULL) == [Outcome.OK] * 2
    assert host.find([where[0].key]) == [NO_HANDLE], "the oldest went for the third"


def test_damage_is_found_and_dropped() -> None:
    """F21: any flipped bit of a payload is seen where it lands."""
    host = host_of()
    where = addresses(1)
    (handle,) = store_pages(host, where)
    (reading,) = host.fetch([handle])
    assert reading.row is not None
    reading.row.data[1234] ^= 16
    host.release([reading])
    assert check_fetch(host, [handle], where, FULL) == [Outcome.CORRUPT]
    assert check_fetch(host, [handle], where, FULL) == [Outcome.MISSING]
    assert host.status().counters["corrupt"] == 1
    assert host.pop_dropped() == [(handle, where[0].key, Loss.DAMAGED)]


def test_the_budget_is_split_by_weight_and_holds() -> None:
    slots = slots_within(SHAPES, [3.0, 1.0], 1 << 20)
    used = [n * shape.row_bytes for n, shape in zip(slots, SHAPES, strict=True)]
    assert sum(used) <= 1 << 20
    assert 2.8 < used[0] / used[1] < 3.2
    with pytest.raises(TierError, match="raise --host-cache-gb"):
        slots_within(SHAPES, [1.0, 1.0], 4000)


def test_memory_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object) -> HostTier:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(tiers, "HostTier", refuse)
    settings = tiers.TierSettings(host_bytes=1 << 20)
    with pytest.raises(TierError, match="lower --host-cache-gb"):
        tiers.open_tiers(SHAPES, cast(tiers.BlockIO, None), settings, SystemClock())


def test_closing_forgets_everything() -> None:
    host = host_of()
    where = addresses(2)
    store_pages(host, where)
    host.close()
    assert host.find([a.key for a in where]) == [NO_HANDLE] * 2
    assert host.num_free("full") == 4


def test_neighbouring_rows_are_one_array() -> None:
    arena = Arena(5000, 100, slab_bytes=1 << 20)
    rows = arena.take(10)
    together = stacked(rows)
    assert together is not None
    assert together.shape == (10, 8192)
    together[3, 7] = 9
    assert rows[3].whole[7] == 9
    assert stacked([rows[0], rows[1], rows[3]]) is None
    assert all(row.whole.ctypes.data % 4096 == 0 for row in rows)
    arena.give_back(rows)
    assert arena.num_in_use == 0
    assert len(arena.take(1000)) == 100
