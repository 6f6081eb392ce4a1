"""The transfer engine: order, bounds, cancellation, and completion that means completion."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from statewise.radix.segment import Tier
from statewise.runtime.clock import SystemClock, thread_seconds
from statewise.runtime.tiers.store import Outcome
from statewise.runtime.tiers.transfer import (
    EngineOptions,
    Pacer,
    PageResult,
    Priority,
    Step,
    Transfer,
    TransferEngine,
)
from support.tier_pages import ManualClock

OK = PageResult(Outcome.OK)


def step(
    first: int, run: Callable[[], object] = lambda: None, count: int = 1, size: int = 10
) -> Step:
    def body() -> list[PageResult]:
        run()
        return [OK] * count

    return Step(first, count, size, body)


def transfer(
    *steps: Step,
    priority: Priority = Priority.LOAD,
    on_done: Callable[[Transfer], None] | None = None,
) -> Transfer:
    return Transfer("copy", Tier.DISK, priority, steps, on_done)


def engine_of(**options: float) -> TransferEngine:
    return TransferEngine(EngineOptions(**options), ManualClock())  # type: ignore[arg-type]


@pytest.fixture
def threaded() -> Iterator[TransferEngine]:
    engine = TransferEngine(EngineOptions(num_threads=2), SystemClock())
    yield engine
    engine.close()


def test_steps_run_in_order_of_priority_and_of_submission() -> None:
    engine = engine_of(num_threads=0)
    log: list[str] = []
    for name, priority in [
        ("d1", Priority.DEMOTE),
        ("p", Priority.PREFETCH),
        ("d2", Priority.DEMOTE),
    ]:
        engine.submit(transfer(step(0, lambda n=name: log.append(n)), priority=priority))
    two = transfer(step(0, lambda: log.append("l1")), step(1, lambda: log.append("l2")))
    engine.submit(two)
    assert engine.run_one()
    assert (two.num_ok, two.is_done) == (1, False)
    assert engine.drain()
    assert log == ["l1", "l2", "p", "d1", "d2"]
    assert two.is_done


def test_a_load_overtakes_a_demotion_that_has_begun() -> None:
    engine = engine_of(num_threads=0)
    log: list[str] = []
    steps = [step(i, lambda i=i: log.append(f"d{i}")) for i in range(3)]
    engine.submit(transfer(*steps, priority=Priority.DEMOTE))
    engine.run_one()
    engine.submit(transfer(step(0, lambda: log.append("load"))))
    engine.drain()
    assert log == ["d0", "load", "d1", "d2"]


def test_completion_is_delivered_once_and_by_poll() -> None:
    engine = engine_of(num_threads=0)
    done: list[Transfer] = []
    one = transfer(step(0), step(1), on_done=done.append)
    engine.submit(one)
    engine.run_one()
    assert engine.poll() == []
    engine.run_one()
    assert done == []
    assert engine.poll() == [one]
    assert done == [one]
    assert engine.poll() == []
    assert one.results == [OK, OK]
    assert one.num_ok == 2


def test_an_empty_transfer_is_done_at_once() -> None:
    engine = engine_of(num_threads=0)
    one = transfer()
    assert engine.submit(one)
    assert engine.poll() == [one]


def test_write_behind_is_bounded_in_bytes_and_loads_are_not() -> None:
    """F27: a queue that nobody drains does not grow."""
    engine = engine_of(num_threads=0, max_queued_bytes=25)
    demotions = [transfer(step(0), priority=Priority.DEMOTE) for _ in range(4)]
    assert [engine.submit(d) for d in demotions] == [True, True, False, False]
    assert engine.submit(transfer(step(0, size=1000)))
    assert engine.counters["demotions_refused"] == 2
    assert engine.queued_bytes(Priority.DEMOTE) == 20
    engine.drain()
    assert engine.queued_bytes(Priority.DEMOTE) == 0
    assert engine.submit(transfer(step(0, size=1000), priority=Priority.DEMOTE)), "alone, it may go"


def test_cancelling_drops_what_has_not_begun() -> None:
    engine = engine_of(num_threads=0)
    done: list[Transfer] = []
    one = transfer(step(0), step(1), step(2), on_done=done.append)
    engine.submit(one)
    engine.run_one()
    engine.cancel(one)
    engine.cancel(one)
    assert one.is_done
    assert engine.poll() == [one]
    assert done == [one]
    assert [r and r.outcome for r in one.results] == [Outcome.OK] + [Outcome.CANCELLED] * 2
    assert engine.queued_bytes(Priority.LOAD) == 0
    assert not engine.run_one()
    engine.cancel(one)
    assert engine.poll() == []


def test_a_cancelled_transfer_is_not_done_while_a_thread_is_in_it(threaded: TransferEngine) -> None:
    """F32: both ends stay leased until nobody touches them, cancelled or not."""
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        assert go_on.wait(30)

    one = transfer(step(0, slow), step(1))
    threaded.submit(one)
    assert begun.wait(30)
    threaded.cancel(one)
    assert threaded.poll() == []
    assert not one.is_done
    go_on.set()
    assert threaded.wait(one, 30)
    assert threaded.poll() == [one]


def test_steps_of_one_load_run_side_by_side(threaded: TransferEngine) -> None:
    both = threading.Barrier(2, timeout=30)
    one = transfer(step(0, both.wait), step(1, both.wait))
    threaded.submit(one)
    assert threaded.wait(one, 30)
    assert one.num_ok == 2


def test_demotions_leave_a_thread_for_loads(threaded: TransferEngine) -> None:
    go_on = threading.Event()
    demotions = [
        transfer(step(0, lambda: go_on.wait(30)), priority=Priority.DEMOTE) for _ in range(4)
    ]
    for one in demotions:
        threaded.submit(one)
    load = transfer(step(0))
    threaded.submit(load)
    assert threaded.wait(load, 30)
    assert not any(one.is_done for one in demotions)
    go_on.set()
    assert threaded.drain(30)
    assert len(threaded.poll()) == 5


def test_a_failing_medium_fails_pages_and_not_the_engine(threaded: TransferEngine) -> None:
    def fail() -> None:
        raise OSError("no such device")

    one, two = transfer(step(0, fail, count=3)), transfer(step(0))
    threaded.submit(one)
    threaded.submit(two)
    assert threaded.drain(30)
    assert {r.outcome for r in one.results if r} == {Outcome.FAILED}
    assert two.num_ok == 1
    assert len(threaded.poll()) == 2


def test_a_programmer_error_surfaces_in_poll(threaded: TransferEngine) -> None:
    def broken() -> None:
        raise AssertionError("broken invariant")

    one = transfer(step(0, broken))
    threaded.submit(one)
    assert threaded.wait(one, 30)
    with pytest.raises(AssertionError, match="broken invariant"):
        threaded.poll()


def test_a_step_that_forgets_a_page_is_a_programmer_error() -> None:
    engine = engine_of(num_threads=0)
    engine.submit(transfer(Step(0, 2, 10, lambda: [OK])))
    engine.run_one()
    with pytest.raises(AssertionError, match="1 results of 2 pages"):
        engine.poll()


def test_closing_cancels_waits_and_delivers() -> None:
    engine = TransferEngine(EngineOptions(num_threads=2), SystemClock())
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        assert go_on.wait(30)

    running = transfer(step(0, slow), priority=Priority.DEMOTE)
    queued = [transfer(step(0), priority=Priority.DEMOTE) for _ in range(3)]
    for one in (running, *queued):
        engine.submit(one)
    assert begun.wait(30)
    threading.Timer(0.05, go_on.set).start()
    engine.close()
    engine.close()
    assert set(engine.poll()) == {running, *queued}
    assert running.num_ok == 1
    assert engine.num_open == 0
    assert not [t for t in threading.enumerate() if t.name.startswith("transfer-")]


def test_what_ends_while_closing_may_ask_to_be_passed_on_and_is_refused() -> None:
    """A copy that closing waited for would be copied to the next tier: there is no time for it."""
    engine = engine_of(num_threads=0)
    answers: list[bool] = []

    def pass_on(_transfer: Transfer) -> None:
        answers.append(engine.submit(transfer(step(0), priority=Priority.DEMOTE)))

    one = transfer(step(0), priority=Priority.DEMOTE, on_done=pass_on)
    engine.submit(one)
    engine.run_one()
    engine.close()
    assert engine.poll() == [one]
    assert answers == [False]
    assert engine.num_open == 0


def test_demotions_rest_while_rows_decode_and_go_on_when_none_do() -> None:
    clock = ManualClock()
    engine = TransferEngine(EngineOptions(num_threads=1, decoding_share=1e-9), clock)
    engine.decoding = True
    first, second = (transfer(step(0), priority=Priority.DEMOTE) for _ in range(2))
    engine.submit(first)
    assert engine.wait(first, 30), "the first has used nothing yet"
    engine.submit(second)
    load = transfer(step(0))
    engine.submit(load)
    assert engine.wait(load, 30)
    assert not second.is_done, "it rests for a billion times what the first used"
    engine.decoding = False
    assert engine.wait(second, 30)
    engine.decoding = True
    third = transfer(step(0), priority=Priority.DEMOTE)
    engine.submit(third)
    assert engine.drain(30), "whoever waits for all of them does not wait for rests"
    assert third.num_ok == 1
    engine.close()


def test_loads_rest_while_rows_decode_unless_somebody_waits_for_them() -> None:
    clock = ManualClock()
    engine = TransferEngine(EngineOptions(num_threads=1, loading_share=1e-9), clock)
    engine.decoding = True
    used, first = threading.Event(), threading.Event()

    def use() -> None:
        began = thread_seconds()
        while thread_seconds() == began:
            pass
        first.set()

    one = transfer(step(0, use), step(1, used.set))
    engine.submit(one)
    assert first.wait(30)
    assert not used.wait(0.05), "it rests for a billion times what the first step used"
    engine.decoding = False
    assert used.wait(30)
    engine.decoding = True
    two = transfer(step(0))
    engine.submit(two)
    assert engine.wait(two, 30), "nothing decodes while somebody waits"
    three = transfer(step(0))
    engine.submit(three)
    assert engine.drain(30)
    assert three.num_ok == 1
    engine.close()


def test_loads_run_one_at_a_time_beside_rows_that_decode(threaded: TransferEngine) -> None:
    threaded.decoding = True
    lock, seen = threading.Lock(), []

    def alone() -> None:
        seen.append(lock.acquire(blocking=False))
        threading.Event().wait(0.01)
        lock.release()

    one = transfer(*(step(i, alone) for i in range(6)))
    threaded.submit(one)
    assert threaded.wait(one, 30)
    assert seen == [True] * 6
    threaded.decoding = False
    both = threading.Barrier(2, timeout=30)
    two = transfer(step(0, both.wait), step(1, both.wait))
    threaded.submit(two)
    assert threaded.wait(two, 30)


def test_poll_is_announced() -> None:
    told = threading.Event()
    engine = TransferEngine(EngineOptions(num_threads=1), SystemClock(), told.set)
    engine.submit(transfer(step(0)))
    assert told.wait(30)
    assert len(engine.poll()) == 1
    engine.close()


def test_the_pace_is_kept_on_average() -> None:
    clock = ManualClock(0.0)
    pacer = Pacer(100.0, clock)
    waited = 0.0
    for _ in range(10):
        delay = pacer.delay_s()
        waited += delay
        clock.now += delay
        pacer.spend(50)
    assert waited == pytest.approx(4.5)
    clock.now += 100
    assert pacer.delay_s() == 0.0
    assert Pacer(0.0, clock).delay_s() == 0.0


def test_paced_demotions_wait_and_loads_do_not() -> None:
    clock = ManualClock()
    engine = TransferEngine(EngineOptions(num_threads=1, demote_bytes_per_s=1.0), clock)
    first, second = (transfer(step(0, size=3600), priority=Priority.DEMOTE) for _ in range(2))
    engine.submit(first)
    assert engine.wait(first, 30)
    engine.submit(second)
    load = transfer(step(0))
    engine.submit(load)
    assert engine.wait(load, 30)
    assert not second.is_done, "its bytes may go in an hour"
    engine.close()
    assert second.results == [PageResult(Outcome.CANCELLED)]


def test_seconds_are_from_the_first_step_to_the_last() -> None:
    clock = ManualClock(0.0)
    engine = TransferEngine(EngineOptions(num_threads=0), clock)

    def tick() -> None:
        clock.now += 2

    one = transfer(step(0, tick), step(1, tick))
    engine.submit(one)
    clock.now += 5
    engine.drain()
    assert one.seconds == 4.0
