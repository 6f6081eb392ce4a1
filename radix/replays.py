"""From demand to replay steps: where to cut, how deep each step runs.

    pages        0 1 2 3 4 5 6 7 8 9 | p
    demand       . . 1 1 1 3 3 5 5 5        layers that must run on each page
    unusable     . . # # # # # # # #        window pages with nothing on them
    steps            [1 1 1|3 3|5 5 5)      exactly the demand, three steps
      or             [5 5 5 5 5 5 5 5)      one step: more layers, less overhead

Every step costs its overhead, so neighbouring runs are joined where that is cheaper; running a
page deeper than demanded does no harm. A step is cut where the set of groups it writes changes (a
page with usable state is never written), and where a snapshot must be restored.

This module does not choose the resume position.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from statewise.radix.cost import CostModel
from statewise.radix.demand import Demand
from statewise.radix.need import first_token
from statewise.radix.plan import NO_PAGES, PageRange, Replay
from statewise.radix.schema import CacheSchema, GroupKind

MAX_JOIN = 4096  # joins priced per plan


@dataclass(frozen=True, slots=True)
class Ground:
    """The pages a replay runs over. `unusable[page]`: bit per group with nothing usable there.

    `handed_back[g]` are the pages of the group that are made exact for the tree; `scratch` the
    snapshot groups that advance with every step deep enough.
    """

    schema: CacheSchema
    unusable: Sequence[int]  # [num_pages] bit mask of groups
    handed_back: Mapping[int, Sequence[int]]  # pages, ascending
    scratch: tuple[int, ...]
    step_pages: int = 1  # starts and ends of steps are multiples of this


class Stretch(NamedTuple):
    """A step to be: pages [start, end), layers to run, groups without usable pages there."""

    start: int
    end: int
    depth: int
    unusable: int


class _Best(NamedTuple):
    """Cheapest steps up to a page: the last of them, and what came before."""

    seconds: float = 0.0
    last: Stretch | None = None
    before: _Best | None = None


def cut(
    demand: Demand, ground: Ground, cost: CostModel
) -> tuple[float, tuple[Stretch, ...]] | None:
    """Cheapest steps that cover a demand: (seconds, stretches in order).

    None where the granularity allows no cut that the ground requires.
    """
    size = ground.schema.page_size
    depths = demand.depths(len(ground.unusable), size)
    restarts = {token // size for token in demand.restarts}
    runs = _runs(_coarse(depths, ground.step_pages), ground, restarts)
    if runs is None:
        return None
    best: list[_Best | None] = [_Best()]
    reach = max(4, MAX_JOIN // max(len(runs), 1))
    join = _Join(ground.schema, runs, restarts)
    for stop in range(1, len(runs) + 1):
        if not runs[stop - 1].depth:
            best.append(best[stop - 1])
            continue
        found: _Best | None = None
        for first, joined in join.ending_at(stop, reach):
            before = best[first]
            if before is None or not runs[first].depth:
                continue
            seconds = cost.prefill_s(joined.start * size, joined.end * size, joined.depth)
            if found is not None and seconds >= found.seconds:
                break  # longer and deeper ones only cost more
            if found is None or before.seconds + seconds < found.seconds:
                found = _Best(before.seconds + seconds, joined, before)
        best.append(found)
    return _chain(best[-1])


def _chain(best: _Best | None) -> tuple[float, tuple[Stretch, ...]] | None:
    """Seconds and stretches in order."""
    if best is None:
        return None
    seconds, stretches = best.seconds, []
    while best is not None and best.last is not None:
        stretches.append(best.last)
        best = best.before
    return seconds, tuple(reversed(stretches))


def _coarse(depths: list[int], step: int) -> list[int]:
    """Depth of each page, the deepest of its aligned block."""
    if step == 1:
        return depths
    out = list(depths)
    for at in range(0, len(out), step):
        out[at : at + step] = [max(out[at : at + step])] * len(out[at : at + step])
    return out


def _runs(depths: list[int], ground: Ground, restarts: set[int]) -> list[Stretch] | None:
    """Runs of pages alike in depth and in what is unusable.

    None where a needed cut is not at a multiple of the granularity.
    """
    if not depths:
        return []
    alike = np.array((depths, ground.unusable), dtype=np.int64)
    changes = np.flatnonzero((alike[:, 1:] != alike[:, :-1]).any(axis=0)) + 1
    starts = sorted({0, *changes.tolist(), *(page for page in restarts if page < len(depths))})
    if any(depths[page] and page % ground.step_pages for page in starts):
        return None
    ends = [*starts[1:], len(depths)]
    return [
        Stretch(start, end, depths[start], ground.unusable[start])
        for start, end in zip(starts, ends, strict=True)
    ]


class _Join:
    """Stretches over consecutive runs."""

    def __init__(self, schema: CacheSchema, runs: list[Stretch], restarts: set[int]) -> None:
        self._schema, self._runs, self._restarts = schema, runs, restarts
        self._written: dict[tuple[int, int], int] = {}
        self._good: dict[tuple[int, int], int] = {}
        self._pairs: dict[tuple[int, int, int, int], bool] = {}

    def ending_at(self, stop: int, reach: int) -> Iterable[tuple[int, Stretch]]:
        """(first run, stretch) of those that end with run `stop` - 1, shortest first.

        Up to the first that is no one stretch: not the same groups are written, something restarts
        inside, or good layers of a broken page would be written over. Longer ones fail as well.
        """
        run = self._runs[stop - 1]
        if self._joins(self._runs[stop - 2] if stop > 1 else None, run):
            return self._joined(stop, reach)
        written = self._writes(run.unusable, run.depth)
        return ((stop - 1, Stretch(run.start, run.end, run.depth, written)),)

    def _joins(self, before: Stretch | None, run: Stretch) -> bool:
        """Whether two neighbours could be one stretch; most scattered damage ends here."""
        if before is None or run.start in self._restarts:
            return False
        pair = (before.unusable, before.depth, run.unusable, run.depth)
        known = self._pairs.get(pair)
        if known is None:
            depth = max(before.depth, run.depth)
            good = min(self._first_good(r.unusable, r.depth) for r in (before, run))
            writes = self._writes(before.unusable, depth) == self._writes(run.unusable, depth)
            known = self._pairs[pair] = writes and good >= depth
        return known

    def _joined(self, stop: int, reach: int) -> Iterator[tuple[int, Stretch]]:
        runs, end, depth = self._runs, self._runs[stop - 1].end, 0
        masks: set[int] = set()  # of unusable groups
        spoiled = self._schema.num_layers  # first good layer of a broken page past its demand
        for first in range(stop - 1, max(-1, stop - 1 - reach), -1):
            run = runs[first]
            if masks and runs[first + 1].start in self._restarts:
                return
            depth = max(depth, run.depth)
            masks.add(run.unusable)
            spoiled = min(spoiled, self._first_good(run.unusable, run.depth))
            written = self._writes(run.unusable, depth)
            if spoiled < depth:
                return
            if len(masks) > 1 and any(self._writes(m, depth) != written for m in masks):
                return
            yield first, Stretch(run.start, end, depth, written)

    def _first_good(self, unusable: int, depth: int) -> int:
        """First layer from `depth` on whose history would be written although nothing asks."""
        known = self._good.get((unusable, depth))
        if known is None:
            layers = [
                layer
                for g, spec in enumerate(self._schema.groups)
                if unusable >> g & 1 and spec.kind.is_history
                for layer in spec.layers
                if layer >= depth
            ]
            known = self._good[unusable, depth] = min(layers, default=self._schema.num_layers)
        return known

    def _writes(self, unusable: int, depth: int) -> int:
        """Groups that a step of this depth writes where they are unusable."""
        known = self._written.get((unusable, depth))
        if known is None:
            known = self._written[unusable, depth] = sum(
                1 << g
                for g, spec in enumerate(self._schema.groups)
                if unusable >> g & 1 and min(spec.layers) < depth
            )
        return known


# ------------------------------------------------------------------------- steps


def steps_of(
    stretches: Sequence[Stretch], demand: Demand, ground: Ground
) -> tuple[Replay, ...] | None:
    """Replay steps of chosen stretches; None where one would read below what it may."""
    out = []
    readable = _Readable(ground)
    back = _handed_back(stretches, ground)
    for stretch, pages in zip(stretches, back, strict=True):
        floor = readable.floors(stretch)
        if floor is None:
            return None
        out.append(_step(stretch, ground, floor, demand.restarts, pages))
    return tuple(out)


def _handed_back(stretches: Sequence[Stretch], ground: Ground) -> list[tuple[PageRange, ...]]:
    """Per stretch and group the pages handed back; inside a stretch they are consecutive."""
    starts = np.array([stretch.start for stretch in stretches], dtype=np.int64)
    ends = np.array([stretch.end for stretch in stretches], dtype=np.int64)
    columns: list[list[PageRange]] = [[NO_PAGES] * len(stretches)] * ground.schema.num_groups
    for g, pages in ground.handed_back.items():
        known = np.array(pages, dtype=np.int64)
        firsts, stops = np.searchsorted(known, starts), np.searchsorted(known, ends)
        columns[g] = [
            (pages[first], pages[stop - 1] + 1) if first < stop else NO_PAGES
            for first, stop in zip(firsts.tolist(), stops.tolist(), strict=True)
        ]
    return list(zip(*columns, strict=True))


class _Readable:
    """What each group may be read from, while steps are taken in order."""

    def __init__(self, ground: Ground) -> None:
        self._schema = ground.schema
        mask = np.array(ground.unusable, dtype=np.int64)
        pages = np.arange(len(mask), dtype=np.int64)
        self._groups = [g for g, s in enumerate(ground.schema.groups) if s.kind.is_window]
        self._last = {  # last page below each boundary with nothing usable on it; -1: none
            g: np.maximum.accumulate([-1, *np.where(mask >> g & 1, pages, -1)]).tolist()
            for g in self._groups
        }
        self._lost = dict.fromkeys(self._groups, -1)  # last of them that no step has written
        self._end = 0  # of the step before

    def floors(self, stretch: Stretch) -> tuple[int, ...] | None:
        """First token each group may be read from; None where sinks would be cut off.

        Above the last page with nothing on it that the layers' windows reach.
        """
        schema, size = self._schema, self._schema.page_size
        floors = [0] * schema.num_groups
        for g in self._groups:
            spec, last = schema.groups[g], self._last[g]
            if last[stretch.start] >= self._end:
                self._lost[g] = last[stretch.start]
            first = first_token(spec, stretch.start * size) // size
            if self._lost[g] >= first and min(spec.layers) < stretch.depth:
                floors[g] = (self._lost[g] + 1) * size
                if spec.sinks:
                    return None
            if not stretch.unusable >> g & 1 and last[stretch.end] >= stretch.start:
                self._lost[g] = last[stretch.end]
        self._end = stretch.end
        return tuple(floors)


def _step(
    stretch: Stretch,
    ground: Ground,
    floors: tuple[int, ...],
    restarts: frozenset[int],
    back: tuple[PageRange, ...],
) -> Replay:
    schema, size = ground.schema, ground.schema.page_size
    mask = stretch.unusable
    for g in ground.scratch:
        if min(schema.groups[g].layers) < stretch.depth:
            mask |= 1 << g
    restore: tuple[int, ...] = ()
    if stretch.start * size in restarts:
        restore = tuple(g for g in ground.scratch if schema.groups[g].kind is GroupKind.RECURRENT)
    return Replay(
        stretch.start * size,
        stretch.end * size,
        mask,
        stretch.depth,
        floors,
        back,
        restore,
    )
