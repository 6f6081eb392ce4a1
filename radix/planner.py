"""The recovery planner: from what matched to the cheapest way of using it.

    for each reach       how slow a tier each group may be read from
      for each position  where a request could resume
        direct           nothing to do
        loads            pages from slower tiers, trailing state included
        passes           replays that make missing trailing state and broken history exact again
        front            computing from the front while the later pages stream in
    the candidate with the least estimated time to the end of the prompt wins

Pure: same arguments, same plan. Candidates are priced by the same `CostModel` that anybody can
price a plan with; `docs/recovery.md` derives the rules. Only positions at which something changes
are tried (ends of resident runs, starts of broken ones, snapshots, chunk boundaries): between two
of them the later one is never dearer.

This module does not execute, does not lease, and knows no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from math import lcm

import numpy as np
from numpy.typing import NDArray

from statewise.radix.cost import CostModel
from statewise.radix.match import Match
from statewise.radix.passes import Damage, Pass, PassFinder, Reach, replays_of
from statewise.radix.plan import Level, Load, Recompute, RecoveryPlan, Replay, Reuse, Step
from statewise.radix.residency import NOWHERE, SLOW, Residency
from statewise.radix.schema import CacheSchema, GroupKind
from statewise.radix.segment import Tier
from statewise.radix.validation import Verdict

Bool = NDArray[np.bool_]
Int64 = NDArray[np.int64]
MAX_DAMAGES = 16  # broken runs a plan repairs; a more broken prefix is resumed before them
MAX_REACHES = 64


@dataclass(frozen=True, slots=True)
class Budget:
    """What a plan may use.

    `prompt_len` tokens are to be computed or reused in all. Resume positions and starts are
    multiples of `granularity` tokens. `blocks[g]`: device blocks that could be had (None: any
    number). Loads estimated above `max_sync_s` are marked asynchronous.
    """

    prompt_len: int
    granularity: int = 1
    blocks: tuple[int, ...] | None = None
    repair: bool = True
    rebuild: bool = True
    load: bool = True
    terminal: bool = False  # may resume at a position inside a page
    max_sync_s: float = 0.01


@dataclass(frozen=True)
class Candidate:
    """A way to resume at page `page`, priced."""

    page: int
    total_s: float
    recovery_s: float
    reach: Reach
    passes: tuple[Pass, ...] = ()
    front: tuple[int, int] | None = None  # pages computed while the rest streams in
    load_s: float = 0.0


def plan(
    match: Match,
    verdicts: Iterable[Verdict],
    schema: CacheSchema,
    cost: CostModel,
    budget: Budget,
) -> RecoveryPlan:
    """Choose the cheapest plan for a prompt that matched `match`, whose validation gave `verdicts`.

    What the verdicts name is not used; whoever executes the plan drops it first. Never raises for
    the state of the cache: the last resort is to recompute from the deepest usable position.
    """
    have = Residency(match, verdicts)
    planner = _Planner(have, schema, cost, budget)
    return planner.best()


class _Planner:
    """One planning; holds what the candidates share."""

    def __init__(
        self, have: Residency, schema: CacheSchema, cost: CostModel, budget: Budget
    ) -> None:
        self.have, self.schema, self.cost, self.budget = have, schema, cost, budget
        self.size = schema.page_size
        self.step = lcm(budget.granularity, self.size) // self.size  # pages

    def best(self) -> RecoveryPlan:
        """The plan of the cheapest candidate that the budget allows."""
        terminal = self._terminal()
        found = sorted(self._candidates(), key=lambda c: (c.total_s, len(c.passes), -c.page))
        for candidate in found:
            made = self._plan_of(candidate)
            if self._affordable(made):
                return made if terminal is None or made.total_s < terminal.total_s else terminal
        raise AssertionError("position 0 always works")

    def _affordable(self, made: RecoveryPlan) -> bool:
        free = self.budget.blocks
        if free is None or not (made.loads or made.replays):
            return True
        return all(need <= have for need, have in zip(made.blocks, free, strict=True))

    def _prefill(self, page: int) -> float:
        """Seconds from a page to the end of the prompt, all layers."""
        return self.cost.prefill_s(page * self.size, self.budget.prompt_len)

    def _terminal(self) -> RecoveryPlan | None:
        """The plan that resumes inside a page, where that is possible."""
        position = self.have.match.reuse_position() if self.budget.terminal else 0
        if position % self.size == 0 or self.have.faults:
            return None
        seconds = self.cost.prefill_s(position, self.budget.prompt_len)
        return RecoveryPlan(
            position, Level.DIRECT, (Reuse(0, position),), None, position, total_s=seconds
        )

    # ---------------------------------------------------------------- candidates

    def _candidates(self) -> Iterator[Candidate]:
        for reach in self._reaches():
            finder = PassFinder(self.have, self.cost, reach, self.step)
            usable = self._usable(reach, finder)
            for page in self._positions(reach, usable):
                yield from self._at(page, reach, finder)
            yield from self._fronts(reach, usable)

    def _reaches(self) -> list[Reach]:
        """Every choice of the slowest tier per group that could make a difference."""
        slow = self.have.slow_tiers if self.budget.load else {}
        known = {t for t in SLOW if t in self.cost.tiers}
        choices = [
            [Tier.DEVICE, *(t for t in slow.get(g, []) if t in known)]
            for g in range(self.schema.num_groups)
        ]
        found = list(product(*choices))
        if len(found) <= MAX_REACHES:
            return found
        return [tuple(min(limit, c[-1]) for c in choices) for limit in Tier]

    def _usable(self, reach: Reach, finder: PassFinder) -> Bool:
        """[num_pages + 1] boundaries where every group can resume within the reach."""
        every = np.ones(self.have.num_pages + 1, dtype=np.bool_)
        for group in range(self.schema.num_groups):
            ready = finder.ready.get(group)
            every &= self.have.resumable(group, reach[group]) if ready is None else ready
        return every

    def _allowed(self, pages: Iterable[int]) -> list[int]:
        """Round pages down to the granularity; deepest first, each once."""
        return sorted({p // self.step * self.step for p in pages}, reverse=True)

    def _positions(self, reach: Reach, usable: Bool) -> list[int]:
        """Pages at which resuming is worth trying."""
        pages = {self.have.num_pages}
        aligned = np.flatnonzero(usable[:: self.step]) * self.step
        pages.add(int(aligned[-1]))
        for start, _ in _runs(self._broken_pages(reach)):
            pages.add(start)
        for group in self.have.trailing:
            if self.schema.groups[group].kind.is_snapshot:
                pages.update(np.flatnonzero(self.have.exact[group])[-MAX_DAMAGES:].tolist())
            else:
                runs = _runs(self.have.good(group, reach[group]))
                pages.update(end for _, end in runs[-MAX_DAMAGES:])
        for page in list(pages):
            pages.update(self._chunk_floors(page))
        return self._allowed(pages)

    def _chunk_floors(self, page: int) -> Iterator[int]:
        """Last boundary at or below a page where a chunked group needs nothing."""
        for spec in self.schema.groups:
            if spec.kind is GroupKind.CHUNKED:
                token = page * self.size // spec.window * spec.window
                while token % self.size:
                    token -= spec.window
                yield max(token, 0) // self.size

    def _broken_pages(self, reach: Reach) -> Bool:
        """[num_pages] pages where some history group has nothing usable within the reach."""
        broken = np.zeros(self.have.num_pages, dtype=np.bool_)
        for group in self.have.history:
            broken |= ~self.have.good(group, reach[group])
        return broken

    def _at(self, page: int, reach: Reach, finder: PassFinder) -> Iterator[Candidate]:
        """Resume at `page`: what is missing there is repaired, what is slow is loaded."""
        damages = self._damages(page, reach, finder)
        if damages is None:
            return
        passes: tuple[Pass, ...] | None = ()
        if damages:
            passes = finder.best_passes(damages, page)
        if passes is None:
            return
        load_s = self._load_s(page, 0, reach, finder)
        recovery = load_s + sum(p.seconds for p in passes)
        total = recovery + self._prefill(page)
        yield Candidate(page, total, recovery, reach, passes, load_s=load_s)

    def _damages(self, page: int, reach: Reach, finder: PassFinder) -> tuple[Damage, ...] | None:
        """What must be made exact before resuming at `page`; None if it is not allowed to be."""
        history = self._history_damages(page, reach)
        missing = [g for g in self.have.trailing if not finder.ready[g][page]]
        if history and (not self.budget.rebuild or len(history) > MAX_DAMAGES):
            return None
        if missing and not self.budget.repair:
            return None
        if not missing:
            return tuple(history)
        depth = tuple((g, max(self.schema.groups[g].layers) + 1) for g in missing)
        return (*history, Damage(page - 1, page, depth, is_trailing=True))

    def _history_damages(self, page: int, reach: Reach) -> list[Damage]:
        """Broken runs below `page`, cut where what is broken changes."""
        out = []
        for start, end in _runs(self._broken_pages(reach)[:page]):
            depths = {g: self._depths(g, reach[g], start, end) for g in self.have.history}
            stacked = np.stack(list(depths.values()))
            edges = np.flatnonzero((stacked[:, 1:] != stacked[:, :-1]).any(axis=0)) + 1
            bounds = [0, *edges.tolist(), end - start]
            for lo, hi in pairwise(bounds):
                here = tuple((g, int(d[lo])) for g, d in depths.items() if d[lo])
                out.append(Damage(start + lo, start + hi, here))
        return out

    def _depths(self, group: int, reach: Tier, start: int, end: int) -> NDArray[np.int16]:
        """[end - start] 1 + deepest broken layer; 0 where the page is usable."""
        tier = self.have.tier[group][start:end]
        whole = max(self.schema.groups[group].layers) + 1
        depth = np.where(tier == NOWHERE, self.have.broken[group][start:end], whole)
        return np.where(tier <= reach, 0, depth).astype(np.int16)

    # ---------------------------------------------------------------- loads

    def _load_s(self, page: int, front: int, reach: Reach, finder: PassFinder) -> float:
        """Seconds to load what resuming at `page` needs, history from page `front` on."""
        sizes: dict[Tier, float] = {}
        for group, lo, hi in self._load_ranges(page, front, finder):
            for tier in SLOW:
                if tier > reach[group]:
                    break
                sums = self.have.page_sums(group, tier)
                pages = int(sums[hi] - sums[lo])
                if pages:
                    bytes_of = pages * self.schema.groups[group].block_bytes(self.size)
                    sizes[tier] = sizes.get(tier, 0.0) + bytes_of
        return self.cost.load_s(sizes)

    def _load_ranges(
        self, page: int, front: int, finder: PassFinder
    ) -> Iterator[tuple[int, int, int]]:
        """(group, first page, end page) that resuming at `page` reads."""
        for group in self.have.history:
            yield group, front, page
        for group in self.have.trailing:
            if self.schema.groups[group].kind.is_window and finder.ready[group][page]:
                lo = self.have.first_needed(group, page)
                sinks = min(self.have.sinks(group, page), lo)
                if sinks:
                    yield group, 0, sinks
                yield group, lo, page

    def _fronts(self, reach: Reach, usable: Bool) -> Iterator[Candidate]:
        """Compute [direct, x) while pages from x on stream in; x where both end together."""
        if max(reach) is Tier.DEVICE:
            return
        direct = self._deepest_direct()
        finder = PassFinder(self.have, self.cost, reach, self.step)
        broken = self._broken_pages(reach)
        for page in self._positions(reach, usable):
            if page <= direct or not all(finder.ready[g][page] for g in self.have.trailing):
                continue
            bad = np.flatnonzero(broken[:page])
            first = max(direct + 1, int(bad[-1]) + 1 if len(bad) else 0)
            first = -(-first // self.step) * self.step
            fronts = range(first, page, self.step)
            if len(fronts):
                yield self._best_front(page, direct, fronts, reach, finder)

    def _best_front(
        self, page: int, direct: int, fronts: range, reach: Reach, finder: PassFinder
    ) -> Candidate:
        def priced(front: int) -> tuple[float, float]:
            computed = self.cost.prefill_s(direct * self.size, front * self.size)
            load = self._load_s(page, front, reach, finder)
            return max(computed, load), load

        # Computing rises with the front and loading falls: search where they cross.
        lo, hi = 0, len(fronts) - 1
        while lo < hi:
            middle = (lo + hi) // 2
            front = fronts[middle]
            if self.cost.prefill_s(direct * self.size, front * self.size) >= priced(front)[1]:
                hi = middle
            else:
                lo = middle + 1
        near = [fronts[i] for i in (lo - 1, lo) if i >= 0]
        seconds, load, front = min((*priced(f), f) for f in near)
        total = seconds + self._prefill(page)
        return Candidate(page, total, seconds, reach, (), (direct, front), load)

    def _deepest_direct(self) -> int:
        """Deepest allowed page at which every group can resume now."""
        every = np.ones(self.have.num_pages + 1, dtype=np.bool_)
        for group in range(self.schema.num_groups):
            every &= self.have.resumable(group, Tier.DEVICE)
        return int(np.flatnonzero(every[:: self.step])[-1]) * self.step

    # ---------------------------------------------------------------- the plan

    def _plan_of(self, chosen: Candidate) -> RecoveryPlan:
        finder = PassFinder(self.have, self.cost, chosen.reach, self.step)
        missing = frozenset(g for g in self.have.trailing if not finder.ready[g][chosen.page])
        loads = self._loads(chosen, finder)
        replays = [r for p in chosen.passes for r in replays_of(p, self.have, missing)]
        damaged = {g for p in chosen.passes for d in p.damages for g, _ in d.depth}
        starts = [p.start for p in chosen.passes]
        return RecoveryPlan(
            position=chosen.page * self.size,
            level=self._level(chosen, loads),
            steps=self._steps(chosen, loads, replays),
            limiting_group=self._limiting(),
            read_from=min([*starts, chosen.page]) * self.size,
            repairing=tuple(sorted(damaged)),
            concurrent=chosen.front is not None,
            asynchronous=chosen.load_s > self.budget.max_sync_s,
            recovery_s=chosen.recovery_s,
            total_s=chosen.total_s,
            blocks=self._blocks(chosen, loads),
        )

    def _steps(
        self, chosen: Candidate, loads: list[Load], replays: list[Replay]
    ) -> tuple[Step, ...]:
        steps: list[Step] = []
        position = chosen.page * self.size
        if chosen.front is not None:
            direct, front = (p * self.size for p in chosen.front)
            steps += [Reuse(0, direct)] if direct else []
            steps += [*loads, Recompute(direct, front), Reuse(front, position)]
        else:
            steps += [Reuse(0, position)] if position else []
            steps += [*loads, *replays]
        if position < self.have.num_pages * self.size:
            steps.append(Recompute(position, self.have.num_pages * self.size))
        return tuple(steps)

    def _loads(self, chosen: Candidate, finder: PassFinder) -> list[Load]:
        """Load steps: runs of pages with one tier, each page once."""
        front = chosen.front[1] if chosen.front else 0
        ranges = list(self._load_ranges(chosen.page, front, finder))
        ranges += [r for p in chosen.passes for r in p.loads]
        wanted: dict[int, Bool] = {}
        for group, lo, hi in ranges:
            pages = wanted.setdefault(group, np.zeros(self.have.num_pages, dtype=np.bool_))
            pages[lo:hi] = True
        out = []
        for group in sorted(wanted):
            for tier in SLOW:
                if tier <= chosen.reach[group]:
                    here = wanted[group] & (self.have.tier[group] == tier)
                    out += [Load(group, lo, hi, tier) for lo, hi in _runs(here)]
        return out

    def _level(self, chosen: Candidate, loads: list[Load]) -> Level:
        damages = [d for p in chosen.passes for d in p.damages]
        if any(not d.is_trailing for d in damages):
            return Level.REBUILD
        if damages:
            return Level.REPAIR
        if loads:
            return Level.LOAD
        return Level.RECOMPUTE if chosen.page < self.have.num_pages else Level.DIRECT

    def _limiting(self) -> int | None:
        """Group that keeps the end of the logical hit from being resumed at as it stands."""
        end = self.have.num_pages
        worst: tuple[int, int] | None = None
        for group in range(self.schema.num_groups):
            able = self.have.resumable(group, Tier.DEVICE)
            if able[end]:
                continue
            depth = int(np.flatnonzero(able)[-1])
            if worst is None or depth < worst[0]:
                worst = (depth, group)
        return None if worst is None else worst[1]

    def _blocks(self, chosen: Candidate, loads: list[Load]) -> tuple[int, ...]:
        """Device blocks that the steps need beyond those of ordinary prefill."""
        need = [0] * self.schema.num_groups
        for load in loads:
            need[load.group] += load.num_pages
        for found in chosen.passes:
            for group in found.written:
                if self.schema.groups[group].kind.is_window:
                    need[group] += found.end - found.start
            for damage in found.damages:
                for group, _ in damage.depth:
                    if not damage.is_trailing:
                        need[group] += damage.end - damage.start
        return tuple(need)


def _runs(flags: Bool) -> list[tuple[int, int]]:
    """Half-open runs of true entries."""
    padded = np.concatenate(([False], flags, [False]))
    edges = np.flatnonzero(padded[1:] != padded[:-1])
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
