"""Replay passes: the cheapest forward that makes given state exact again.

A *damage* is state that must be exact when a pass has run: broken history over [start, end), or
what trailing groups need in order to resume at `end`. A *pass* covers consecutive damages with
one forward:

    tokens      r ......... start .... end       start .... end = p
                            [history broken]     [windows missing at p]
                [------------------- one pass, as deep as the deepest --------------------)
    or          [----- one pass ------)   r' [----------- another ------------)

The best start r of a pass is found over all page boundaries at once.

This module does not choose p or what to load for history (`planner` does).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from statewise.radix.cost import CostModel
from statewise.radix.exactness import NEVER, GroupStart, exact_from
from statewise.radix.need import first_token, trailing_starts
from statewise.radix.plan import NO_PAGES, PageRange, Replay
from statewise.radix.residency import SLOW, Residency
from statewise.radix.schema import CacheSchema, GroupKind
from statewise.radix.segment import Tier

Int64 = NDArray[np.int64]
Float = NDArray[np.float64]
Bool = NDArray[np.bool_]
Reach = tuple[Tier, ...]  # per group


@dataclass(frozen=True, slots=True)
class Damage:
    """State over pages [start, end) to be made exact; `depth[g]` is 1 + deepest layer of g."""

    start: int  # page; for trailing damage the last page at which a pass may start
    end: int  # page
    depth: tuple[tuple[int, int], ...]  # (group, depth), every group damaged here
    is_trailing: bool = False

    @property
    def num_layers(self) -> int:
        """Layers a pass must run."""
        return max(depth for _, depth in self.depth)


@dataclass(frozen=True, slots=True)
class Pass:
    """A chosen pass: start page, the damages it covers, and what it costs."""

    start: int
    damages: tuple[Damage, ...]
    num_layers: int
    seconds: float
    cold: frozenset[int]  # window groups that start with nothing
    written: frozenset[int]  # trailing groups written, scratch included
    loads: tuple[tuple[int, int, int], ...]  # (group, first page, end page) read from below r
    exact: Mapping[int, int] = field(default_factory=dict)  # group -> first exact token

    @property
    def end(self) -> int:
        """Page."""
        return self.damages[-1].end


def overlap_of(schema: CacheSchema, group: int) -> int:
    """Tokens before a page that writing its first entry needs (an overlapping compressor)."""
    spec = schema.groups[group]
    if spec.kind not in (GroupKind.COMPRESSED, GroupKind.INDEX):
        return 0
    return max((schema.groups[g].overlap for g in feeding_tails(schema, group)), default=0)


def feeding_tails(schema: CacheSchema, group: int) -> list[int]:
    """Tail groups whose raw projections become the entries of `group`."""
    spec = schema.groups[group]
    return [
        g
        for g, other in enumerate(schema.groups)
        if other.kind is GroupKind.TAIL
        and other.ratio == spec.ratio
        and set(other.layers) & set(spec.layers)
    ]


class PassFinder:
    """Finds passes over one residency for one choice of reaches."""

    def __init__(self, have: Residency, cost: CostModel, reach: Reach, step: int) -> None:
        self.have, self.cost, self.reach = have, cost, reach
        self.schema = have.schema
        self.step = step  # pages between allowed starts
        self.ready = {g: have.resumable(g, reach[g]) for g in have.trailing}
        self._known: dict[tuple[int, tuple[Damage, ...]], Pass | None] = {}

    def best_passes(self, damages: tuple[Damage, ...], position: int) -> tuple[Pass, ...] | None:
        """Cheapest passes that repair all damages in order; None if nothing can.

        `position` (pages) is where the request resumes: what it needs there is loaded anyway.
        """
        best: list[tuple[float, tuple[Pass, ...]] | None] = [(0.0, ())]
        for stop in range(1, len(damages) + 1):
            options = []
            for start in range(stop):
                before = best[start]
                found = self.find(damages[start:stop], position) if before is not None else None
                if before is not None and found is not None:
                    options.append((before[0] + found.seconds, (*before[1], found)))
            best.append(min(options, key=lambda o: (o[0], len(o[1]))) if options else None)
        last = best[-1]
        return None if last is None else last[1]

    def find(self, damages: tuple[Damage, ...], position: int) -> Pass | None:
        """Cheapest single pass over consecutive damages."""
        place = (position, damages)
        if place not in self._known:
            self._known[place] = self._find(damages, position)
        return self._known[place]

    def _find(self, damages: tuple[Damage, ...], position: int) -> Pass | None:
        size = self.have.page_size
        end = damages[-1].end
        depth = max(d.num_layers for d in damages)
        boundaries = np.arange(0, damages[0].start + 1, self.step, dtype=np.int64)
        starts = boundaries * size
        groups = self._group_starts(boundaries, end)
        exact = exact_from(self.schema, depth, starts, groups)
        feasible = np.ones(len(starts), dtype=np.bool_)
        for damage in damages:
            for group, deep in damage.depth:
                feasible &= self._repaired(damage, group, deep, (starts, exact, groups))
        if not feasible.any():
            return None
        seconds = self.cost.prefill_many(starts, end * size, depth)
        seconds = seconds + self._load_seconds(boundaries, (groups, depth, end, position))
        seconds = np.where(feasible, seconds, np.inf)
        best = int(len(seconds) - 1 - np.argmin(seconds[::-1]))  # the latest of equals
        return self._chosen(damages, best, float(seconds[best]), (boundaries, groups, exact))

    def _group_starts(self, boundaries: Int64, end: int) -> dict[int, GroupStart]:
        out = {}
        for group in self.have.trailing:
            ready = self.ready[group][boundaries]
            intact = np.zeros(len(boundaries), dtype=np.bool_)
            if self.schema.groups[group].kind.is_window:
                run = self.have.run_start(group, end, self.reach[group])
                intact = ready & (boundaries >= run)
            out[group] = GroupStart(ready, intact)
        return out

    def _repaired(
        self,
        damage: Damage,
        group: int,
        deep: int,
        found: tuple[Int64, list[Int64], dict[int, GroupStart]],
    ) -> Bool:
        """[n] whether a pass from each start leaves the group's damage exact."""
        starts, exact, groups = found
        spec = self.schema.groups[group]
        size = self.have.page_size
        here = exact[deep - 1]
        if not damage.is_trailing:
            start = damage.start * size
            needed = max(0, start - overlap_of(self.schema, group))
            good: Bool = here <= needed
            for tail in feeding_tails(self.schema, group):  # or carry on where it stopped
                good = good | ((starts == start) & groups[tail].ready & (here == starts))
            return good
        if spec.kind is GroupKind.RECURRENT:
            alive: Bool = exact[deep] < NEVER
            return alive
        position = damage.end * size
        if spec.kind is GroupKind.TAIL:
            needed = max(0, position - position % spec.ratio - spec.overlap)
        else:
            needed = first_token(spec, position) // size * size
        done: Bool = (here <= needed) | (groups[group].ready & (here == starts))
        if spec.sinks and not self._has_sinks(group, damage.end):
            done = done & (starts == 0)
        return done

    def _has_sinks(self, group: int, page: int) -> bool:
        sinks = self.have.sinks(group, page)
        return bool(self.have.good(group, self.reach[group])[:sinks].all())

    # ---------------------------------------------------------------- what a pass reads

    def _load_seconds(
        self, boundaries: Int64, place: tuple[dict[int, GroupStart], int, int, int]
    ) -> Float:
        """[n] seconds to load window pages that a pass reads and a resume would not."""
        groups, depth, end, position = place
        total = np.zeros(len(boundaries), dtype=np.float64)
        for tier in SLOW:
            size = np.zeros(len(boundaries), dtype=np.float64)
            for group in self._slow_windows(depth, tier):
                sums = self.have.page_sums(group, tier)
                lo, hi = self._read_ranges(group, boundaries, groups[group], end)
                hi = np.minimum(hi, self._loaded_from(group, position))
                pages = np.where(lo < hi, sums[hi] - sums[np.minimum(lo, hi)], 0)
                size += pages * self.schema.groups[group].block_bytes(self.have.page_size)
            cost = self.cost.tiers.get(tier)
            if cost is not None and size.any():
                fixed = cost.latency_s + cost.queue_s
                total += np.where(size > 0, fixed + size / cost.bytes_per_s, 0.0)
        return total

    def _slow_windows(self, depth: int, tier: Tier) -> list[int]:
        """Window groups above `depth` that may read pages from `tier`."""
        return [
            g
            for g in self.have.trailing
            if self.schema.groups[g].kind.is_window
            and min(self.schema.groups[g].layers) < depth
            and tier <= self.reach[g]
            and (self.have.tier[g] == tier).any()
        ]

    def _read_ranges(
        self, group: int, boundaries: Int64, start: GroupStart, end: int
    ) -> tuple[Int64, Int64]:
        """[n] pages [lo, hi) that a pass reads from the cache."""
        spec = self.schema.groups[group]
        first = trailing_starts(spec, self.have.num_pages, self.have.page_size)[boundaries]
        lo: Int64 = np.where(start.ready, first, boundaries)
        hi: Int64 = np.where(start.intact, end, boundaries)
        return lo, hi

    def _loaded_from(self, group: int, position: int) -> int:
        """First page that resuming at `position` loads anyway (or `position`, if it cannot)."""
        able = bool(self.ready[group][position])
        return self.have.first_needed(group, position) if able else position

    def _chosen(
        self,
        damages: tuple[Damage, ...],
        best: int,
        seconds: float,
        found: tuple[Int64, dict[int, GroupStart], list[Int64]],
    ) -> Pass:
        boundaries, groups, exact = found
        depth = len(exact) - 1
        start, end = int(boundaries[best]), damages[-1].end
        cold, written, loads, first_exact = set(), set(), [], {}
        for group in self.have.trailing:
            spec = self.schema.groups[group]
            if min(spec.layers) >= depth or spec.kind is GroupKind.TAIL:
                continue
            stands = groups[group]
            ready, intact = bool(stands.ready[best]), bool(stands.intact[best])
            if spec.kind.is_window and not ready:
                cold.add(group)
            if not intact:
                written.add(group)
            if spec.kind.is_window and ready:
                lo = self.have.first_needed(group, start)
                loads.append((group, lo, end if intact else start))
            deepest = max(la for la in spec.layers if la < depth)
            first_exact[group] = int(exact[deepest][best])
        for damage in damages:
            written.update(self._tails(damage))
        return Pass(
            start,
            damages,
            depth,
            seconds,
            frozenset(cold),
            frozenset(written),
            tuple(loads),
            first_exact,
        )

    def _tails(self, damage: Damage) -> list[int]:
        """Tail groups that a damage's repair writes."""
        tails: list[int] = []
        for group, _ in damage.depth:
            if self.schema.groups[group].kind is GroupKind.TAIL:
                tails.append(group)
            else:
                tails.extend(feeding_tails(self.schema, group))
        return tails


# ------------------------------------------------------------------------- steps


def replays_of(found: Pass, have: Residency, missing: frozenset[int]) -> list[Replay]:
    """Replay steps of one pass: cut where the set of written history groups changes."""
    schema, size = have.schema, have.page_size
    floor = tuple(found.start * size if g in found.cold else 0 for g in range(schema.num_groups))
    scratch = sum(1 << g for g in found.written)
    steps, at = [], found.start
    for start, end, groups in _cuts(found):
        mask = scratch | sum(1 << g for g in groups)
        back = [NO_PAGES] * schema.num_groups
        for group in groups:
            back[group] = (start, end)
        if end == found.end:
            for group in sorted(missing & found.written):
                back[group] = _exact_pages(found, have, group)
        steps.append(Replay(at * size, end * size, mask, found.num_layers, floor, tuple(back)))
        at = end
    return steps


def _cuts(found: Pass) -> list[tuple[int, int, tuple[int, ...]]]:
    """(start page, end page, history groups written) in order, gaps included, covering the pass."""
    cuts: list[tuple[int, int, tuple[int, ...]]] = []
    at = found.start
    for damage in found.damages:
        if damage.is_trailing:
            continue
        if damage.start > at:
            cuts.append((at, damage.start, ()))
        cuts.append((damage.start, damage.end, tuple(g for g, _ in damage.depth)))
        at = damage.end
    if at < found.end:
        cuts.append((at, found.end, ()))
    return cuts


def _exact_pages(found: Pass, have: Residency, group: int) -> PageRange:
    """Pages of a window group that a resume at the pass's end needs, as far as they were written."""
    spec = have.schema.groups[group]
    if spec.kind.is_snapshot:
        return NO_PAGES
    if spec.sinks and not found.start:
        return (0, found.end)
    exact = -(-found.exact[group] // have.page_size)
    lo = max(have.first_needed(group, found.end), min(exact, found.end), found.start)
    return (lo, found.end) if lo < found.end else NO_PAGES
