"""Two engines as one: a remote store that hangs holds nothing else up."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from statewise.radix.segment import Tier
from statewise.runtime.clock import SystemClock
from statewise.runtime.tiers import lanes as lanes_module
from statewise.runtime.tiers.lanes import Lanes
from statewise.runtime.tiers.store import Outcome
from statewise.runtime.tiers.transfer import (
    EngineOptions,
    PageResult,
    Priority,
    Step,
    Transfer,
    TransferEngine,
)
from support.tier_pages import ManualClock


def lanes_of(num_threads: int) -> Lanes:
    clock = SystemClock() if num_threads else ManualClock()
    options = EngineOptions(num_threads, max_queued_bytes=100)
    return Lanes(TransferEngine(options, clock), TransferEngine(options, clock), clock)


def copy(tier: Tier, run: Callable[[], object], priority: Priority = Priority.LOAD) -> Transfer:
    def body() -> list[PageResult]:
        run()
        return [PageResult(Outcome.OK)]

    return Transfer("copy", tier, priority, [Step(i, 1, 60, body) for i in range(2)])


def test_a_store_that_hangs_holds_up_only_itself() -> None:
    lanes, answer = lanes_of(2), threading.Event()
    hung = [copy(Tier.REMOTE, lambda: answer.wait(20)) for _ in range(3)]
    for transfer in hung:
        assert lanes.submit(transfer)
    local = copy(Tier.DISK, lambda: None)
    assert lanes.submit(local)
    assert lanes.wait(local, 20)
    assert lanes.poll() == [local]
    assert lanes.num_open == 3
    assert not lanes.drain(0.01)
    lanes.cancel(hung[2])
    answer.set()
    assert lanes.drain(20)
    assert set(lanes.poll()) == set(hung)
    assert lanes.counters.as_dict() == {"cancelled": 1, "copy_cancelled": 2, "copy_ok": 6}
    lanes.close()


def test_steps_run_by_hand_and_bounds_are_each_lanes_own() -> None:
    lanes = lanes_of(0)
    for tier in (Tier.REMOTE, Tier.HOST):
        assert lanes.submit(copy(tier, lambda: None, Priority.DEMOTE))
        assert not lanes.submit(copy(tier, lambda: None, Priority.DEMOTE))
    assert lanes.queued_bytes(Priority.DEMOTE) == 240
    assert len(lanes.open_transfers()) == 2
    assert sum(lanes.run_one() for _ in range(9)) == 4
    assert len(lanes.poll()) == 2
    lanes.close()


def test_both_lanes_know_whether_rows_decode() -> None:
    lanes = lanes_of(0)
    lanes.decoding = True
    assert lanes.decoding
    assert all(engine.decoding for engine in lanes._engines)
    lanes.decoding = False
    assert not any(engine.decoding for engine in lanes._engines)


def test_what_hangs_is_abandoned_and_not_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_module, "HANG_S", 0.02)
    lanes, answer = lanes_of(1), threading.Event()
    hung = copy(Tier.REMOTE, lambda: answer.wait(20))
    assert lanes.submit(hung)
    until_running(hung)
    lanes.settle()
    assert (hung.is_done, hung.is_cancelled) == (False, True)
    assert (lanes.num_open, lanes.num_awaited) == (1, 0)
    assert lanes.open_transfers() == [hung], "its memory is still its own"
    assert lanes.drain(), "without a bound, and without it"
    local = copy(Tier.DISK, lambda: None)
    assert lanes.submit(local)
    lanes.settle()
    assert lanes.poll() == [local]
    lanes.close(0.0)
    assert not hung.is_done
    answer.set()
    assert lanes.wait(hung, 20)
    assert lanes.poll() == [hung]
    assert lanes.num_open == lanes.num_awaited == 0


def test_what_is_quick_enough_is_not_abandoned() -> None:
    lanes = lanes_of(1)
    transfer = copy(Tier.REMOTE, lambda: None)
    assert lanes.submit(transfer)
    lanes.settle()
    assert lanes.poll() == [transfer]
    assert transfer.num_ok == 2
    lanes.close()


def until_running(transfer: Transfer) -> None:
    while not transfer.num_running:
        pass
