"""What a remote store is asked about a prompt: little, once, and not for long.

    history     the first page that is missing here: a cold prompt costs one question. Where it is
                there, the end of the run of pages, eight at a time; the pages before are presumed
    index       each page, and each page it routes into: their content numbers must agree
    trailing    what the depth found needs; where it is not there, the deepest place below with it

A question is the header of one object. Answers go to the store's own memory (`tiers/known`), so the
next lookup finds what is there. Who waits for them waits for `MAX_ASKING_S` at most, whatever the
store does; a page wrongly presumed is a load that fails.

This module runs on the control plane's thread and does no I/O.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable

from statewise.radix import Match, Verdict
from statewise.radix.need import needed_ranges, needs_snapshot
from statewise.runtime.cache.stored import Look, StoredState
from statewise.runtime.clock import Clock
from statewise.runtime.counters import Labelled
from statewise.runtime.tiers.page import PageAddress
from statewise.runtime.tiers.store import AskedStore, Outcome
from statewise.runtime.tiers.tiers import Tiers
from statewise.runtime.tiers.transfer import Transfer

PATIENCE_S = 0.5  # for one round of questions
MAX_ASKING_S = 1.0  # of the store's time for all rounds about one prompt
FAN = 8  # questions asked side by side, to find the end of a run
MAX_QUESTIONS = 1024  # about one prompt
MAX_BELOW = 64  # of them, for trailing state below the depth
MAX_OPEN = 8  # prompts asked about at a time

Place = tuple[int, int]  # group and page; boundary for snapshots
Answers = Generator[list[PageAddress], list[bool], list[bool]]


def spread(lo: int, hi: int) -> list[int]:
    """At most `FAN` numbers of [lo, hi), evenly spread, ascending; the last is hi - 1."""
    n = min(FAN, hi - lo)
    return [lo + (hi - lo) * (i + 1) // n - 1 for i in range(n)]


class Questions:
    """The questions about one prompt, each depending on the answers before."""

    def __init__(
        self, state: StoredState, look: Look, store: AskedStore, step_pages: int, first: int
    ) -> None:
        """`first`: the first page whose history is missing here."""
        self._state, self._look, self._store = state, look, store
        self._step, self._first = step_pages, first
        self._schema = state.schema
        groups = self._schema.groups
        based = {self._schema.index_of(g.depends_on) for g in groups if g.depends_on is not None}
        self._bound = [g for g, spec in enumerate(groups) if g in based or spec.depends_on]
        self._windows = [g for g, spec in enumerate(groups) if spec.kind.is_window]
        self._snapshots = [g for g, spec in enumerate(groups) if spec.kind.is_snapshot]
        self.num_asked = self.num_found = 0

    def all(self) -> Generator[list[PageAddress], list[bool], None]:
        """Yields addresses to ask for and is sent whether each is there."""
        depth = yield from self._history()
        at = depth // self._step * self._step
        if at and not (yield from self._trailing_at(at)):
            yield from self._trailing_below(at)

    # ---------------------------------------------------------------- asking

    def _address(self, place: Place) -> PageAddress:
        group, page = place
        if group in self._snapshots:
            return self._state.snapshot_address(self._look.names, group, page)
        return self._state.page_address(self._look.names, group, page)

    def _has(self, place: Place) -> bool:
        """Whether it is on the device, or in a tier as far as is known."""
        group, page = place
        if group in self._snapshots:
            here = self._look.has_snapshot(group, page)
        else:
            here = bool(self._look.usable(group)[page])
        return here or self._state.find([self._address(place)])[0] is not None

    def _ask(self, places: list[Place]) -> Answers:
        """Whether each place's state is there; asks only for what is not known."""
        there = [self._has(place) for place in places]
        open_ones: list[tuple[int, PageAddress]] = []
        for i, place in enumerate(places):
            address = self._address(place)
            if not there[i] and not self._store.knows_absent(address.key):
                open_ones.append((i, address))
        del open_ones[MAX_QUESTIONS - self.num_asked :]
        if open_ones:
            self.num_asked += len(open_ones)
            answers = yield [address for _, address in open_ones]
            for (i, _), answer in zip(open_ones, answers, strict=True):
                there[i] = answer
                self.num_found += answer
        return there

    def _presume(self, group: int, start: int, end: int) -> None:
        """Take pages for stored, where nobody asks for their content."""
        if group not in self._bound:
            places = [(group, page) for page in range(start, end)]
            self._store.presume([self._address(p) for p in places if not self._has(p)])

    # ---------------------------------------------------------------- history

    def _history(self) -> Generator[list[PageAddress], list[bool], int]:
        """Depth of the prompt's history with what the store has of it."""
        first, end = self._first, self._look.num_pages
        groups = [g for g, spec in enumerate(self._schema.groups) if spec.kind.is_history]
        groups.sort(key=lambda g: first < end and bool(self._look.usable(g)[first]))
        for i, group in enumerate(groups if first < end else []):
            (there,) = yield from self._ask([(group, first if i == 0 else end - 1)])
            if there and i:
                continue
            if there:
                end = yield from self._deepest(group, first + 1, end)
            else:
                end = first if i == 0 else (yield from self._deepest(group, first, end - 1))
            if end == first:
                return first
        for group in groups:
            if group in self._bound:
                places = [(group, page) for page in range(first, end)]
                there_all = yield from self._ask(places)
                end = first + there_all.index(False) if False in there_all else end
        for group in groups:
            self._presume(group, first, end)
        return end

    def _deepest(
        self, group: int, lo: int, hi: int
    ) -> Generator[list[PageAddress], list[bool], int]:
        """End of the run of a group's pages that begins before `lo`; at most `hi`."""
        while lo < hi:
            pages = spread(lo, hi)
            there = yield from self._ask([(group, page) for page in pages])
            gap = there.index(False) if False in there else len(pages)
            hi = pages[gap] if gap < len(pages) else hi
            lo = pages[gap - 1] + 1 if gap else lo
        return lo

    # ---------------------------------------------------------------- trailing state

    def _trailing_at(self, boundary: int) -> Generator[list[PageAddress], list[bool], bool]:
        """Whether what trailing groups need at a boundary is there: both ends of each window."""
        position = boundary * self._schema.page_size
        ranges: list[tuple[int, int, int]] = []
        for group in self._windows:
            spec = self._schema.groups[group]
            needed = needed_ranges(spec, position, self._schema.page_size)
            ranges += [(group, lo, hi) for lo, hi in needed if lo < hi]
        places = [place for g, lo, hi in ranges for place in dict.fromkeys([(g, lo), (g, hi - 1)])]
        for group in self._snapshots:
            if needs_snapshot(self._schema.groups[group], position):
                places.append((group, boundary))
        there = yield from self._ask(places)
        if not all(there):
            return False
        for group, lo, hi in ranges:
            self._presume(group, lo, hi)
        return True

    def _trailing_below(self, at: int) -> Generator[list[PageAddress], list[bool], None]:
        """Find a place below `at` that has trailing state, the deepest first."""
        if self._snapshots:
            group, width = self._snapshots[0], self._step
            marks = range(at - self._step, 0, -self._step)
        elif self._windows:
            group, width = self._widest()
            marks = range(at - 1, -1, -width)  # every run of this width has one of these pages
        else:
            return
        for i in range(0, min(len(marks), MAX_BELOW), FAN):
            asked = list(marks[i : i + FAN])
            there = yield from self._ask([(group, mark) for mark in asked])
            for mark in [m for m, is_there in zip(asked, there, strict=True) if is_there]:
                boundary = mark
                if not self._snapshots:
                    boundary = yield from self._deepest(group, mark + 1, min(mark + width, at))
                boundary = boundary // self._step * self._step
                if boundary and (yield from self._trailing_at(boundary)):
                    return

    def _widest(self) -> tuple[int, int]:
        """The window group that needs most pages, and how many."""
        size = self._schema.page_size
        pages = {g: -(-self._schema.groups[g].window // size) for g in self._windows}
        group = max(pages, key=lambda g: pages[g])
        return group, max(pages[group], 1)


class Probe:
    """One prompt that a remote store is being asked about."""

    def __init__(self, questions: Questions, now_s: float) -> None:
        self.questions = questions
        self.asking = questions.all()
        self.transfer: Transfer | None = None  # the questions under way
        self.is_done = False
        self._begun_s = now_s
        self._spent_s = 0.0  # by the store, in rounds that have ended

    def ended(self, transfer: Transfer) -> None:
        """A round of questions has ended."""
        self._spent_s += transfer.finished_s - transfer.submitted_s

    def is_late(self, now_s: float) -> bool:
        """Whether its time is over; answers that have come and not been read are not late."""
        if self.transfer is None:
            return now_s - self._begun_s >= MAX_ASKING_S
        if self.transfer.is_done:
            return False
        seconds = now_s - self.transfer.submitted_s
        return seconds >= PATIENCE_S or self._spent_s + seconds >= MAX_ASKING_S


class Probes:
    """All prompts that are being asked about."""

    def __init__(self, state: StoredState, tiers: Tiers, clock: Clock) -> None:
        self._state, self._tiers, self._clock = state, tiers, clock
        self._open: set[Probe] = set()
        self._queued: deque[Probe] = deque()
        self._is_starting = False
        self.probes = Labelled(
            "Prompts that the remote store was asked about, by what came of it.", "outcome"
        )

    def begin(self, match: Match, verdicts: Iterable[Verdict], step_pages: int) -> Probe | None:
        """Ask about a prompt's pages that are not here; None where there is nothing to ask."""
        store = self._tiers.remote
        if store is None or not store.can_ask:
            return None
        look = self._state.look_at(match, verdicts)
        questions = Questions(self._state, look, store, step_pages, look.depth)
        probe = Probe(questions, self._clock.monotonic())
        self._queued.append(probe)
        self._start_next()
        return None if probe.is_done else probe

    def _start_next(self) -> None:
        if self._is_starting:
            return  # one that had nothing to ask has ended at once: the loop goes on with the next
        self._is_starting = True
        while self._queued and len(self._open) < MAX_OPEN:
            probe = self._queued.popleft()
            if not probe.is_done:
                self._open.add(probe)
                self._go_on(probe, None)
        self._is_starting = False

    def _go_on(self, probe: Probe, answers: list[bool] | None) -> None:
        """Send the answers in, and the next questions out."""
        try:
            addresses = next(probe.asking) if answers is None else probe.asking.send(answers)
        except StopIteration:
            self._end(probe, "found" if probe.questions.num_found else "absent")
            return

        def ended(transfer: Transfer) -> None:
            probe.ended(transfer)
            if not probe.is_done:
                results = transfer.results
                self._go_on(probe, [r is not None and r.outcome is Outcome.OK for r in results])

        probe.transfer = self._tiers.probe(addresses, ended)

    def _end(self, probe: Probe, outcome: str) -> None:
        probe.is_done = True
        probe.asking.close()
        self._open.discard(probe)
        if probe.questions.num_asked:
            self.probes.add(outcome)
        self._start_next()

    def give_up(self, probe: Probe, outcome: str = "cancelled") -> None:
        """Nobody waits for the answers any more. Idempotent."""
        if probe.is_done:
            return
        if probe.transfer is not None:
            self._tiers.engine.cancel(probe.transfer)
        self._end(probe, outcome)

    def give_up_late(self) -> None:
        """Give up those whose time is over."""
        now_s = self._clock.monotonic()
        for probe in [p for p in (*self._open, *self._queued) if p.is_late(now_s)]:
            has_begun = probe.transfer is not None and probe.transfer.started_s > 0
            if has_begun and not probe.is_done and self._tiers.remote is not None:
                self._tiers.remote.gave_no_answer(PATIENCE_S)
            self.give_up(probe, "unanswered")

    def abandon_all(self) -> None:
        """Nothing that is being asked is wanted any more."""
        unasked = list(self._queued)
        self._queued.clear()
        for probe in (*unasked, *self._open):
            self.give_up(probe)
