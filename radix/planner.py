"""The recovery planner: from what matched to the cheapest way of using it.

    for each reach       how slow a tier each group may be read from
      for each position  where a request could resume: what it costs at least (`bounds`)
    the most promising first, until nothing left can be cheaper than what was found:
        load             what it needs and a slower tier has
        replay           what it needs and nothing has, as little as can be (`demand`, `replays`)
        front            or: compute from the front while the later pages stream in
    the candidate with the least estimated time to the end of the prompt wins

Pure: same arguments, same plan. Only positions at which something changes are tried: between two
of them the later one is never dearer, since one page more to repair never costs more than
computing that page. Planning long prompts is bounded by a count of work, not by time: what was not
looked at then would have been no more promising. `docs/recovery.md` derives the rules.

This module does not execute, does not lease, and knows no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from math import lcm, prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from statewise.radix.bounds import Bounds, Prices
from statewise.radix.cost import CostModel
from statewise.radix.match import Match
from statewise.radix.plan import Level, Load, Recompute, RecoveryPlan, Replay, Reuse, Step
from statewise.radix.replays import cut, steps_of
from statewise.radix.residency import Residency
from statewise.radix.schema import CacheSchema, GroupKind
from statewise.radix.segment import Tier
from statewise.radix.target import Reach, Target
from statewise.radix.validation import Verdict

Bool = NDArray[np.bool_]
Int64 = NDArray[np.int64]
Float = NDArray[np.float64]
MAX_POSITIONS = 64  # of each reach: those that cost least at least
MAX_REACHES = 64
MAX_STEPS = 384  # replays that history may take; more are not tried
SHORT = 16  # pages; nothing is left out of shorter matches
MAX_WORK = 60_000  # spent on one plan, each about a tenth of a microsecond
BOUNDS_WORK, LOAD_WORK, FRONT_WORK, REPLAY_WORK = 2, 1, 5, 2  # for each page
STEP_WORK = 150  # for each step of a replay


@dataclass(frozen=True, slots=True)
class Budget:
    """What a plan may use.

    `prompt_len` tokens are to be computed or reused in all. Resume positions and starts of steps
    are multiples of `granularity` tokens. `blocks[g]`: device blocks that could be had (None: any
    number). Loads estimated above `max_sync_s` are marked asynchronous.
    """

    prompt_len: int
    granularity: int = 1
    blocks: tuple[int, ...] | None = None
    repair: bool = True
    rebuild: bool = True
    load: bool = True
    front: bool = True  # may compute from the front while later pages are loaded
    terminal: bool = False  # may resume at a position inside a page
    max_sync_s: float = 0.01


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A way to resume, priced."""

    target: Target
    total_s: float
    recovery_s: float
    load_s: float
    replays: tuple[Replay, ...] = ()
    front: tuple[int, int] | None = None  # pages computed while the rest streams in


class _Try(NamedTuple):
    """A position that may be worth it; the less it costs at least, the sooner."""

    least_s: float
    before: int  # the page, negative: of equals the deepest first
    is_front: bool
    reach: Reach


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
    return _Planner(Residency(match, verdicts), schema, cost, budget).best()


class _Planner:
    """One planning; holds what the candidates share."""

    def __init__(
        self, have: Residency, schema: CacheSchema, cost: CostModel, budget: Budget
    ) -> None:
        self.have, self.schema, self.cost, self.budget = have, schema, cost, budget
        self.size = schema.page_size
        self.step = lcm(budget.granularity, self.size) // self.size  # pages
        self.device: Reach = (Tier.DEVICE,) * schema.num_groups
        self.direct = int(self._usable(self.device)[-1])
        self._work = 0

    def best(self) -> RecoveryPlan:
        """The plan of the cheapest candidate, or the one that resumes inside a page."""
        found = self._recompute()
        for try_ in self._tries(found):
            if try_.least_s > found.total_s or self._is_worked_out(MAX_WORK):
                break
            for candidate in self._candidates(try_, found.total_s):
                if _order(candidate) < _order(found) and self._affordable(candidate):
                    found = candidate
        terminal = self._terminal()
        if terminal is not None and terminal.total_s <= found.total_s:
            return terminal
        return self._plan_of(found)

    def _is_worked_out(self, limit: int) -> bool:
        return self._work > limit and self.have.num_pages > SHORT

    def _prefill(self, page: int) -> float:
        """Seconds from a page to the end of the prompt, all layers."""
        return self.cost.prefill_s(page * self.size, self.budget.prompt_len)

    def _usable(self, reach: Reach) -> NDArray[np.intp]:
        """Allowed pages at which every group can resume within the reach, ascending."""
        every = np.ones(self.have.num_pages + 1, dtype=np.bool_)
        for group in range(self.schema.num_groups):
            every &= self.have.resumable(group, reach[group])
        return np.flatnonzero(every[:: self.step]) * self.step

    def _recompute(self) -> _Candidate:
        """Resume where everything is there already; always possible."""
        target = Target(self.have, self.direct, self.device)
        return _Candidate(target, self._prefill(self.direct), 0.0, 0.0)

    def _terminal(self) -> RecoveryPlan | None:
        """The plan that resumes inside a page, where that is possible."""
        position = self.have.match.reuse_position() if self.budget.terminal else 0
        if position % self.size == 0 or self.have.faults:
            return None
        seconds = self.cost.prefill_s(position, self.budget.prompt_len)
        return RecoveryPlan(
            position, Level.DIRECT, (Reuse(0, position),), None, position, total_s=seconds
        )

    def _affordable(self, candidate: _Candidate) -> bool:
        free = self.budget.blocks
        if free is None or not (candidate.replays or candidate.load_s):
            return True
        need = self._blocks(candidate)
        return all(mine <= there for mine, there in zip(need, free, strict=True))

    # ---------------------------------------------------------------- candidates

    def _tries(self, best: _Candidate) -> list[_Try]:
        """Everything worth looking at, the most promising first."""
        if self.direct == self.have.num_pages:
            return []
        prices = Prices(self.have, self.cost, self.budget.prompt_len)
        changes = self._changes()
        found: list[_Try] = []
        for reach in self._reaches():
            if self._is_worked_out(MAX_WORK // 2):
                break
            self._work += BOUNDS_WORK * self.have.num_pages
            bounds = Bounds(self.have, reach, prices, self.cost)
            pages = self._positions(changes, reach, bounds)
            found += self._promising(bounds.seconds, pages, reach, best.total_s)
            if self.budget.front:
                ahead = bounds.front(self.direct)
                found += self._promising(ahead, pages, reach, best.total_s, is_front=True)
        return sorted(found, key=lambda t: (t.least_s, t.before, t.is_front))

    def _promising(
        self,
        least: Float,
        pages: Int64,
        reach: Reach,
        limit_s: float,
        *,
        is_front: bool = False,
    ) -> list[_Try]:
        """Positions that may be cheaper than the limit, those that cost least at least."""
        pages = pages[least[pages] <= limit_s]
        if len(pages) > MAX_POSITIONS:
            pages = pages[np.argsort(least[pages], kind="stable")[:MAX_POSITIONS]]
        found = zip(least[pages].tolist(), pages.tolist(), strict=True)
        return [_Try(seconds, -page, is_front, reach) for seconds, page in found]

    def _candidates(self, try_: _Try, limit_s: float) -> Iterator[_Candidate]:
        """Ways to resume there; those above the limit may be left out."""
        target = Target(self.have, -try_.before, try_.reach)
        self._work += (FRONT_WORK if try_.is_front else LOAD_WORK) * target.page
        if try_.is_front:
            yield from self._front(target)
        else:
            yield from self._repaired(target, limit_s)

    def _reaches(self) -> list[Reach]:
        """Every choice of the slowest tier per group that could make a difference.

        Those with one limit for all groups first; only those where there are very many.
        """
        slow = self.have.slow_tiers if self.budget.load else {}
        choices = [
            [Tier.DEVICE, *(t for t in slow.get(g, []) if t in self.cost.tiers)]
            for g in range(self.schema.num_groups)
        ]
        alike: list[Reach] = [
            tuple(max(t for t in c if t <= limit) for c in choices) for limit in Tier
        ]
        if prod(map(len, choices)) > MAX_REACHES:
            return list(dict.fromkeys(alike))
        return list(dict.fromkeys([*alike, *product(*choices)]))

    def _changes(self) -> Bool:
        """[num_pages + 1] boundaries at which some group's residency or depth changes."""
        found = np.zeros(self.have.num_pages + 1, dtype=np.bool_)
        found[self.have.num_pages] = True
        for tier in self.have.tier.values():
            found[1:-1] |= tier[1:] != tier[:-1]
        for depth in self.have.broken.values():
            found[1:-1] |= depth[1:] != depth[:-1]
        return found

    def _positions(self, changes: Bool, reach: Reach, bounds: Bounds) -> Int64:
        """Pages at which resuming is worth trying, deepest first."""
        found = changes.copy()
        found[self._usable(reach)[-1]] = True
        found[np.searchsorted(bounds.steps, MAX_STEPS, side="right") - 1] = True
        for group, tier in self.have.snapshot_tier.items():
            found |= tier <= reach[group]
        pages = np.flatnonzero(found)
        floors = [pages, *self._chunk_floors(pages)]
        if self.step > 1 or len(floors) > 1:
            pages = np.unique(np.concatenate(floors) // self.step * self.step)
        pages = pages[::-1]
        return pages[(pages > self.direct) & (bounds.steps[pages] <= MAX_STEPS)]

    def _chunk_floors(self, pages: Int64) -> Iterator[Int64]:
        """Last boundary at or below each page where a chunked group needs nothing."""
        for spec in self.schema.groups:
            if spec.kind is GroupKind.CHUNKED:
                unit = lcm(spec.window, self.size)
                yield pages * self.size // unit * unit // self.size

    def _repaired(self, target: Target, limit_s: float) -> Iterator[_Candidate]:
        """Resume at the target after loading and, where needed, replaying."""
        load_s = self.cost.load_s(target.load_bytes())
        prefill_s = self._prefill(target.page)
        seconds = 0.0
        replays: tuple[Replay, ...] = ()
        if target.repairing:
            if target.has_history_damage and not self.budget.rebuild:
                return
            if target.has_trailing_damage and not self.budget.repair:
                return
            demand = target.demand()
            ground = target.ground(self.step)
            found = cut(demand, ground, self.cost)
            self._work += REPLAY_WORK * target.page + STEP_WORK * len(found[1] if found else ())
            if found is None or load_s + found[0] + prefill_s > limit_s:
                return
            steps = steps_of(found[1], demand, ground)
            if steps is None:
                return
            seconds, replays = found[0], steps
        recovery = load_s + seconds
        yield _Candidate(target, recovery + prefill_s, recovery, load_s, replays)

    def _front(self, target: Target) -> Iterator[_Candidate]:
        """Compute [direct, x) while pages from x on stream in; x where both end together."""
        if target.has_trailing_damage or max(target.reach) is Tier.DEVICE:
            return
        broken = [np.flatnonzero(target.missing[g]) for g in self.have.history]
        first = max([self.direct + 1, *(int(b[-1]) + 1 for b in broken if len(b))])
        fronts = range(-(-first // self.step) * self.step, target.page, self.step)
        if not len(fronts):
            return
        # Computing rises with the front and loading falls: look where they cross.
        lo, hi = 0, len(fronts) - 1
        while lo < hi:
            middle = (lo + hi) // 2
            computed, load = self._front_costs(target, fronts[middle])
            lo, hi = (lo, middle) if computed >= load else (middle + 1, hi)
        near = [fronts[i] for i in (lo - 1, lo) if i >= 0]
        seconds, front = min((max(self._front_costs(target, f)), f) for f in near)
        load_s = self._front_costs(target, front)[1]
        total = seconds + self._prefill(target.page)
        yield _Candidate(target, total, seconds, load_s, (), (self.direct, front))

    def _front_costs(self, target: Target, front: int) -> tuple[float, float]:
        """(seconds of computing up to a page, seconds of loading the rest)."""
        computed = self.cost.prefill_s(self.direct * self.size, front * self.size)
        return computed, self.cost.load_s(target.load_bytes(front))

    # ---------------------------------------------------------------- the plan

    def _plan_of(self, chosen: _Candidate) -> RecoveryPlan:
        target = chosen.target
        loads = target.loads(chosen.front[1] if chosen.front else 0)
        position = target.page * self.size
        return RecoveryPlan(
            position=position,
            level=self._level(chosen, loads),
            steps=self._steps(chosen, loads),
            limiting_group=self._limiting(),
            read_from=min([position, *(r.start for r in chosen.replays)]),
            repairing=target.repairing,
            concurrent=chosen.front is not None,
            asynchronous=chosen.load_s > self.budget.max_sync_s,
            recovery_s=chosen.recovery_s,
            total_s=chosen.total_s,
            blocks=self._blocks(chosen),
        )

    def _steps(self, chosen: _Candidate, loads: list[Load]) -> tuple[Step, ...]:
        steps: list[Step] = []
        position = chosen.target.page * self.size
        if chosen.front is not None:
            direct, front = (p * self.size for p in chosen.front)
            steps += [Reuse(0, direct)] if direct else []
            steps += [*loads, Recompute(direct, front), Reuse(front, position)]
        else:
            steps += [Reuse(0, position)] if position else []
            steps += [*loads, *chosen.replays]
        if position < self.have.num_pages * self.size:
            steps.append(Recompute(position, self.have.num_pages * self.size))
        return tuple(steps)

    def _level(self, chosen: _Candidate, loads: list[Load]) -> Level:
        if chosen.front is None and chosen.target.has_history_damage:
            return Level.REBUILD
        if chosen.replays:
            return Level.REPAIR
        if loads:
            return Level.LOAD
        return Level.RECOMPUTE if chosen.target.page < self.have.num_pages else Level.DIRECT

    def _limiting(self) -> int | None:
        """Group that keeps the end of the logical hit from being resumed at as it stands."""
        worst: tuple[int, int] | None = None
        for group in range(self.schema.num_groups):
            able = self.have.resumable(group, Tier.DEVICE)
            depth = int(np.flatnonzero(able)[-1])
            if not able[-1] and (worst is None or depth < worst[0]):
                worst = (depth, group)
        return None if worst is None else worst[1]

    def _blocks(self, chosen: _Candidate) -> tuple[int, ...]:
        """Device blocks that the steps need beyond those of ordinary prefill."""
        need = [0] * self.schema.num_groups
        for load in chosen.target.loads(chosen.front[1] if chosen.front else 0):
            need[load.group] += load.num_pages
        for replay in chosen.replays:
            pages = (replay.end - replay.start) // self.size
            for group in self.have.paged:
                need[group] += pages * (replay.write_groups >> group & 1)
        return tuple(need)


def _order(candidate: _Candidate) -> tuple[float, int, int]:
    """Cheapest first; of equals the one with fewer steps, then the one that reuses more."""
    return candidate.total_s, len(candidate.replays), -candidate.target.page
