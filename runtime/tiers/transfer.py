r"""The transfer engine: I/O threads, tickets, priorities, bounded write-behind.

    submit -> queued -> running (step by step) -> done, failed pages and all -> poll: on_done
                 \--cancel--> what has not begun is CANCELLED; done when nothing runs any more

A transfer is cut into steps of a few megabytes. Loads have threads of their own, which take steps
in order of priority; those of one load run side by side, so that a medium always has a read to do
while another's bytes are checked. Demotions have one thread, at low priority: they run one after
the other, wait where a bandwidth bound says so, and are refused where too many bytes are queued:
then the caller lets go of the page instead. While `decoding` is set, both rest after each
step, so that they take no more than a share of the machine's processor time: what they take, rows
that decode do not have. Nothing here makes the control plane wait, except `wait`.

`on_done` runs in `poll`, on the control plane's thread, once for each transfer that was accepted,
and only when no thread touches its memory any more: until then both ends stay leased. An error
that no step should raise is raised by `poll`.

With no threads, `run_one` runs the next step: a simulation decides when I/O happens.
This module does not know what steps do.
"""

from __future__ import annotations

import contextlib
import enum
import heapq
import itertools
import math
import os
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from statewise.radix.segment import Tier
from statewise.runtime.clock import Clock, thread_seconds
from statewise.runtime.tiers.store import NO_HANDLE, Counters, Outcome

DEMOTE_NICENESS = 10
LOAD_NICENESS = 2


class Priority(enum.IntEnum):
    """Who goes first."""

    LOAD = 0  # a request waits for it
    PREFETCH = 1  # a request that is queued will want it
    DEMOTE = 2  # nobody waits


@dataclass(frozen=True, slots=True)
class PageResult:
    """What became of one page.

    `handle`: where it is now, for copies into a store. `bad_layers`: for loads, a bit for each
    layer whose digest is not the record's; the other layers of the block are good.
    """

    outcome: Outcome
    handle: int = NO_HANDLE
    bad_layers: int = 0
    reason: str = ""


CANCELLED = PageResult(Outcome.CANCELLED)


@dataclass(frozen=True, slots=True)
class Step:
    """Some pages of a transfer: the first one's index, how many, bytes, and what to do."""

    first: int
    count: int
    size_bytes: int
    run: Callable[[], Sequence[PageResult]]


class Transfer:
    """A ticket. The engine changes it; its owner reads it.

    `results` has one entry for each page, in order, None until it is known.
    """

    def __init__(
        self,
        kind: str,
        tier: Tier,
        priority: Priority,
        steps: Sequence[Step],
        on_done: Callable[[Transfer], None] | None = None,
    ) -> None:
        self.kind = kind
        self.tier = tier  # the slower end
        self.priority = priority
        self.num_pages = sum(step.count for step in steps)
        self.size_bytes = sum(step.size_bytes for step in steps)
        self.results: list[PageResult | None] = [None] * self.num_pages
        self.on_done = on_done
        self.submitted_s = self.started_s = self.finished_s = 0.0
        self.is_cancelled = False
        self.is_done = False  # no thread touches its memory any more
        self.error: BaseException | None = None
        self.pending: deque[Step] = deque(steps)
        self.num_running = 0

    @property
    def seconds(self) -> float:
        """From the first step's start to the last one's end."""
        return self.finished_s - self.started_s

    @property
    def num_ok(self) -> int:
        """Pages that arrived."""
        return sum(r is not None and r.outcome is Outcome.OK for r in self.results)


Heap = list[tuple[int, int, Transfer]]


class Pacer:
    """A bound on bytes per second, without bursts; 0: none."""

    def __init__(self, bytes_per_s: float, clock: Clock) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._next_s = 0.0

    def delay_s(self) -> float:
        """Seconds until the next bytes may go."""
        return max(0.0, self._next_s - self._clock.monotonic())

    def spend(self, size_bytes: int) -> None:
        """These bytes go now."""
        if self._bytes_per_s > 0:
            now = max(self._next_s, self._clock.monotonic())
            self._next_s = now + size_bytes / self._bytes_per_s

    def rest(self, seconds: float) -> None:
        """Nothing goes for so long, after what was to be waited for anyway."""
        self._next_s = max(self._next_s, self._clock.monotonic()) + seconds


@dataclass(frozen=True)
class EngineOptions:
    """How much the engine may do at a time. Bytes, bytes per second.

    While rows decode, `decoding_share` and `loading_share` are the parts of all processors' time
    that demotions and loads may take, `loads_beside_rows` how many steps of loads run at a time.
    """

    num_threads: int = (
        8  # for loads, which mostly wait for a medium; 0: steps run in `run_one` and `wait`
    )
    max_queued_bytes: int = 256 << 20  # of demotions
    demote_bytes_per_s: float = 0.0  # 0: unbounded
    step_bytes: int = 4 << 20
    decoding_share: float = 0.01
    loading_share: float = 0.2
    loads_beside_rows: int = 1


def num_processors() -> int:
    """Processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _lower_priority(niceness: int) -> None:
    """Let others than the calling thread go first, where threads have priorities of their own."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


class TransferEngine:
    """Runs transfers. `notify` is called from an I/O thread when `poll` has something."""

    def __init__(
        self,
        options: EngineOptions,
        clock: Clock,
        notify: Callable[[], None] | None = None,
    ) -> None:
        self.options = options
        self.counters = Counters()
        self._clock = clock
        self._notify = notify
        self._pacer = Pacer(options.demote_bytes_per_s, clock)
        # While rows decode: when demotions, and when loads, have rested.
        self._rests = {demotes: Pacer(0.0, clock) for demotes in (True, False)}
        self._shares = {True: options.decoding_share, False: options.loading_share}
        self._is_decoding = False
        self._num_loading = 0  # steps of loads that run
        self._num_draining = 0  # callers that wait for everything
        self._num_waiting = 0  # that wait for one transfer: nothing decodes meanwhile
        self._changed = threading.Condition()
        self._loads: Heap = []
        self._demotions: Heap = []
        self._order = itertools.count()
        self._finished: deque[Transfer] = deque()
        self._open: set[Transfer] = set()  # accepted, not done
        self._queued_bytes = dict.fromkeys(Priority, 0)
        self._is_closing = False
        kinds = [(self._loads, f"transfer-load-{i}") for i in range(options.num_threads)]
        kinds += [(self._demotions, "transfer-demote")] if kinds else []
        self._threads = [
            threading.Thread(target=self._work, args=(heap,), name=name, daemon=True)
            for heap, name in kinds
        ]
        for thread in self._threads:
            thread.start()

    # ---------------------------------------------------------------- control plane

    def submit(self, transfer: Transfer) -> bool:
        """Queue a transfer; False, and nothing will happen, where write-behind is full or over."""
        with self._changed:
            if self._is_closing and transfer.priority is Priority.DEMOTE:
                return False
            assert not self._is_closing, "the engine is closed"
            queued = self._queued_bytes[Priority.DEMOTE]
            if (
                transfer.priority is Priority.DEMOTE
                and queued
                and queued + transfer.size_bytes > self.options.max_queued_bytes
            ):
                self.counters.add("demotions_refused")
                return False
            self._accept(transfer)
            self._changed.notify_all()
        return True

    def _accept(self, transfer: Transfer) -> None:
        transfer.submitted_s = self._clock.monotonic()
        self._open.add(transfer)
        self._queued_bytes[transfer.priority] += transfer.size_bytes
        if transfer.pending:
            heap = self._demotions if transfer.priority is Priority.DEMOTE else self._loads
            heapq.heappush(heap, (transfer.priority, next(self._order), transfer))
        else:
            self._finish(transfer)

    def cancel(self, transfer: Transfer) -> None:
        """Begin no more steps; `on_done` still comes. Idempotent."""
        with self._changed:
            if transfer.is_done or transfer.is_cancelled:
                return
            transfer.is_cancelled = True
            for step in transfer.pending:
                self._set_results(transfer, step, [CANCELLED] * step.count)
                self._queued_bytes[transfer.priority] -= step.size_bytes
            transfer.pending.clear()
            self.counters.add("cancelled")
            if not transfer.num_running:
                self._finish(transfer)
            self._changed.notify_all()

    def poll(self) -> list[Transfer]:
        """Transfers that ended since the last call; their `on_done` has run."""
        done: list[Transfer] = []
        while True:
            with self._changed:
                if not self._finished:
                    return done
                transfer = self._finished.popleft()
            if transfer.error is not None:
                raise transfer.error
            if transfer.on_done is not None:
                transfer.on_done(transfer)
            done.append(transfer)

    def wait(self, transfer: Transfer, timeout_s: float | None = None) -> bool:
        """Until a transfer is done (`poll` still delivers it); False where time ran out."""
        if not self._threads:
            while not transfer.is_done and self.run_one():
                pass
            return transfer.is_done
        with self._changed:
            self._num_waiting += 1
            self._changed.notify_all()
            try:
                return self._changed.wait_for(lambda: transfer.is_done, timeout_s)
            finally:
                self._num_waiting -= 1

    def drain(self, timeout_s: float | None = None) -> bool:
        """Until nothing is queued or running; False where time ran out. Demotions do not rest."""
        if not self._threads:
            while self.run_one():
                pass
            return not self._open
        with self._changed:
            self._num_draining += 1
            self._changed.notify_all()
            try:
                return self._changed.wait_for(lambda: not self._open, timeout_s)
            finally:
                self._num_draining -= 1

    def settle(self) -> None:
        """Until nothing runs; see `Lanes` for what a store across a network makes of that."""
        self.drain()

    def open_transfers(self) -> list[Transfer]:
        """Transfers accepted and not done."""
        with self._changed:
            return list(self._open)

    @property
    def decoding(self) -> bool:
        """Rows decode: demotions keep to their share."""
        return self._is_decoding

    @decoding.setter
    def decoding(self, decoding: bool) -> None:
        if decoding != self._is_decoding:
            with self._changed:
                self._is_decoding = decoding
                self._changed.notify_all()

    @property
    def num_open(self) -> int:
        """Transfers accepted and not done."""
        return len(self._open)

    @property
    def num_awaited(self) -> int:
        """Transfers accepted, not done and not abandoned: a local medium comes back."""
        return len(self._open)

    def queued_bytes(self, priority: Priority) -> int:
        """Bytes of a priority that are not done."""
        return self._queued_bytes[priority]

    def close(self, hang_s: float = math.inf) -> None:
        """Cancel what has not begun, wait for what has, end the threads. Idempotent.

        `poll` delivers what was still open. `hang_s` bounds the wait for a remote store (`Lanes`).
        """
        del hang_s
        for transfer in list(self._open):
            self.cancel(transfer)
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._threads = []

    # ---------------------------------------------------------------- I/O threads

    def run_one(self) -> bool:
        """Run the next step on this thread; False where there is none. For engines of no threads.

        Bandwidth bounds are not waited for.
        """
        with self._changed:
            taken = self._take(self._loads) or self._take(self._demotions)
        if taken is None:
            return False
        self._run(*taken)
        return True

    def _work(self, heap: Heap) -> None:
        demotes = heap is self._demotions
        _lower_priority(DEMOTE_NICENESS if demotes else LOAD_NICENESS)
        while True:
            with self._changed:
                taken = None
                while taken is None:
                    delay = self._delay_s(demotes)
                    taken = None if delay or self._must_wait(heap) else self._take(heap)
                    if taken is None:
                        if self._is_closing:
                            return
                        self._changed.wait(delay or None)
            began = thread_seconds()
            self._run(*taken)
            if self._is_decoding:
                share = min(self._shares[demotes] * num_processors(), 1.0)
                with self._changed:
                    self._rests[demotes].rest((thread_seconds() - began) * (1.0 / share - 1.0))

    def _must_wait(self, heap: Heap) -> bool:
        """Whether a load would be one too many beside rows that decode."""
        bound = self.options.loads_beside_rows
        return self._is_decoding and heap is self._loads and self._num_loading >= bound

    def _delay_s(self, demotes: bool) -> float:
        """Seconds until the next demotion, or load, may go."""
        may_rest = self._is_decoding and not self._num_draining
        if not demotes:
            return self._rests[False].delay_s() if may_rest and not self._num_waiting else 0.0
        return max(self._pacer.delay_s(), self._rests[True].delay_s() if may_rest else 0.0)

    def _take(self, heap: Heap) -> tuple[Transfer, Step] | None:
        """Next step; the lock is held."""
        while heap:
            transfer = heap[0][2]
            if not transfer.pending:
                heapq.heappop(heap)
                continue
            if transfer.priority is Priority.DEMOTE:
                self._pacer.spend(transfer.pending[0].size_bytes)
            self._num_loading += transfer.priority is not Priority.DEMOTE
            if not transfer.started_s:
                transfer.started_s = self._clock.monotonic()
            transfer.num_running += 1
            return transfer, transfer.pending.popleft()
        return None

    def _run(self, transfer: Transfer, step: Step) -> None:
        results: Sequence[PageResult] = ()
        error: BaseException | None = None
        try:
            results = step.run()
            assert len(results) == step.count, f"{len(results)} results of {step.count} pages"
        except OSError as caught:
            results = [PageResult(Outcome.FAILED, reason=str(caught))] * step.count
        except BaseException as caught:
            error = caught
            results = [PageResult(Outcome.FAILED, reason=repr(caught))] * step.count
        with self._changed:
            transfer.error = transfer.error or error
            self._set_results(transfer, step, results)
            self._queued_bytes[transfer.priority] -= step.size_bytes
            transfer.num_running -= 1
            self._num_loading -= transfer.priority is not Priority.DEMOTE
            if not transfer.num_running and not transfer.pending:
                self._finish(transfer)
            if transfer.is_done or self._is_decoding:  # nobody waits for a step, but turns
                self._changed.notify_all()
        if transfer.is_done and self._notify is not None:
            self._notify()

    def _set_results(self, transfer: Transfer, step: Step, results: Sequence[PageResult]) -> None:
        assert len(results) == step.count, (
            f"{transfer.kind}: {len(results)} of {step.count} results"
        )
        transfer.results[step.first : step.first + step.count] = results
        for word, count in Counter(result.outcome.value for result in results).items():
            self.counters.add(f"{transfer.kind}_{word}", count)

    def _finish(self, transfer: Transfer) -> None:
        transfer.finished_s = self._clock.monotonic()
        transfer.is_done = True
        self._open.discard(transfer)
        self._finished.append(transfer)
