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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

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
    handed_back: dict[int, frozenset[int]]
    scratch: tuple[int, ...]
    step_pages: int = 1  # starts and ends of steps are multiples of this


@dataclass(frozen=True, slots=True)
class _Run:
    """Pages [start, end) alike in depth and in what is unusable."""

    start: int
    end: int
    depth: int
    unusable: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """A step to be: pages [start, end), layers to run, groups without usable pages there."""

    start: int
    end: int
    depth: int
    unusable: int


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
    best: list[tuple[float, tuple[Stretch, ...]] | None] = [(0.0, ())]
    reach = max(4, MAX_JOIN // max(len(runs), 1))
    for stop in range(1, len(runs) + 1):
        if not runs[stop - 1].depth:
            best.append(best[stop - 1])
            continue
        found: tuple[float, tuple[Stretch, ...]] | None = None
        join = _Join(ground.schema, restarts)
        for first in range(stop - 1, max(-1, stop - 1 - reach), -1):
            joined = join.with_run(runs[first])
            if joined is None:
                break
            before = best[first]
            if before is None or not runs[first].depth:
                continue
            seconds = cost.prefill_s(joined.start * size, joined.end * size, joined.depth)
            if found is not None and seconds >= found[0]:
                break  # longer and deeper ones only cost more
            if found is None or before[0] + seconds < found[0]:
                found = (before[0] + seconds, (*before[1], joined))
        best.append(found)
    return best[-1]


def _coarse(depths: list[int], step: int) -> list[int]:
    """Depth of each page, the deepest of its aligned block."""
    if step == 1:
        return depths
    out = list(depths)
    for at in range(0, len(out), step):
        out[at : at + step] = [max(out[at : at + step])] * len(out[at : at + step])
    return out


def _runs(depths: list[int], ground: Ground, restarts: set[int]) -> list[_Run] | None:
    """Split pages into runs; None where a needed cut is not at a multiple of the granularity."""
    if not depths:
        return []
    alike = np.array((depths, ground.unusable), dtype=np.int64)
    changes = np.flatnonzero((alike[:, 1:] != alike[:, :-1]).any(axis=0)) + 1
    starts = sorted({0, *changes.tolist(), *(page for page in restarts if page < len(depths))})
    if any(depths[page] and page % ground.step_pages for page in starts):
        return None
    ends = [*starts[1:], len(depths)]
    return [
        _Run(start, end, depths[start], ground.unusable[start])
        for start, end in zip(starts, ends, strict=True)
    ]


class _Join:
    """One stretch over consecutive runs, taken in from the last to the first."""

    def __init__(self, schema: CacheSchema, restarts: set[int]) -> None:
        self._schema, self._restarts = schema, restarts
        self._first: _Run | None = None
        self._end = self._depth = 0
        self._masks: set[int] = set()  # of unusable groups
        self._spoiled = schema.num_layers  # first good layer of a broken page past its demand

    def with_run(self, run: _Run) -> Stretch | None:
        """Take in the run before those taken so far.

        None where that is no one stretch: not the same groups are written, something restarts
        inside, or good layers of a broken page would be written over. Longer ones fail as well.
        """
        if self._first is None:
            self._end = run.end
        elif self._first.start in self._restarts:
            return None
        self._first = run
        self._depth = depth = max(self._depth, run.depth)
        self._masks.add(run.unusable)
        self._spoiled = min(self._spoiled, _first_good(self._schema, run.unusable, run.depth))
        if self._spoiled < depth:
            return None
        written = {_written(self._schema, mask, depth) for mask in self._masks}
        if len(written) > 1:
            return None
        return Stretch(run.start, self._end, depth, written.pop())


@lru_cache(maxsize=4096)
def _first_good(schema: CacheSchema, unusable: int, depth: int) -> int:
    """First layer from `depth` on whose history would be written although nothing demands it."""
    return min(
        (
            layer
            for g, spec in enumerate(schema.groups)
            if unusable >> g & 1 and spec.kind.is_history
            for layer in spec.layers
            if layer >= depth
        ),
        default=schema.num_layers,
    )


@lru_cache(maxsize=4096)
def _written(schema: CacheSchema, unusable: int, depth: int) -> int:
    """Groups that a step of this depth writes where they are unusable."""
    return sum(
        1 << g
        for g, spec in enumerate(schema.groups)
        if unusable >> g & 1 and min(spec.layers) < depth
    )


# ------------------------------------------------------------------------- steps


def steps_of(
    stretches: Sequence[Stretch], demand: Demand, ground: Ground
) -> tuple[Replay, ...] | None:
    """Replay steps of chosen stretches; None where one would read below what it may."""
    out = []
    made: set[tuple[int, int]] = set()  # (group, page) written so far
    restarts = demand.restarts
    for stretch in stretches:
        floor = _floors(stretch, ground, made)
        if floor is None:
            return None
        out.append(_step(stretch, ground, floor, restarts))
        for g in range(ground.schema.num_groups):
            if stretch.unusable >> g & 1:
                made.update((g, page) for page in range(stretch.start, stretch.end))
    return tuple(out)


def _floors(stretch: Stretch, ground: Ground, made: set[tuple[int, int]]) -> tuple[int, ...] | None:
    """First token each group may read: above the last page with nothing on it."""
    schema, size = ground.schema, ground.schema.page_size
    floors = [0] * schema.num_groups
    for g, spec in enumerate(schema.groups):
        if not spec.kind.is_window or min(spec.layers) >= stretch.depth:
            continue
        first = first_token(spec, stretch.start * size) // size
        for page in range(stretch.start - 1, first - 1, -1):
            if ground.unusable[page] >> g & 1 and (g, page) not in made:
                floors[g] = (page + 1) * size
                break
        if floors[g] and spec.sinks:
            return None
    return tuple(floors)


def _step(
    stretch: Stretch, ground: Ground, floors: tuple[int, ...], restarts: frozenset[int]
) -> Replay:
    schema, size = ground.schema, ground.schema.page_size
    mask = stretch.unusable
    for g in ground.scratch:
        if min(schema.groups[g].layers) < stretch.depth:
            mask |= 1 << g
    back = [NO_PAGES] * schema.num_groups
    for g, pages in ground.handed_back.items():
        back[g] = _span(pages, stretch)
    restore: tuple[int, ...] = ()
    if stretch.start * size in restarts:
        restore = tuple(g for g in ground.scratch if schema.groups[g].kind is GroupKind.RECURRENT)
    return Replay(
        stretch.start * size,
        stretch.end * size,
        mask,
        stretch.depth,
        floors,
        tuple(back),
        restore,
    )


def _span(pages: frozenset[int], stretch: Stretch) -> PageRange:
    """Pages of the set inside the stretch; they are consecutive there."""
    inside = [page for page in pages if stretch.start <= page < stretch.end]
    if not inside:
        return NO_PAGES
    return min(inside), max(inside) + 1
