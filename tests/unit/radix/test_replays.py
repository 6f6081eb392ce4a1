"""Cutting a demand into steps: joined where that is cheaper, cut where joining would spoil."""

from __future__ import annotations

import pytest

from statewise.radix import (
    Budget,
    CacheSchema,
    CostModel,
    GroupKind,
    Level,
    StateGroupSpec,
    plan,
)
from statewise.radix.demand import Demand
from statewise.radix.replays import Ground, cut, steps_of
from support.recovery_oracle import Pages, World, build_match, run_plan

P = 2


def group(name: str, kind: GroupKind, *layers: int, **more: object) -> StateGroupSpec:
    size = "snapshot_bytes" if kind.is_snapshot else "entry_bytes"
    return StateGroupSpec(name, kind, layers, "layout", "v1", **{size: 8, **more})  # type: ignore[arg-type]


SCHEMA = CacheSchema(
    P,
    4,
    (
        group("full", GroupKind.FULL, 1, 3),
        group("window", GroupKind.WINDOW, 0, 2, window=2),
        group("state", GroupKind.RECURRENT, 2),
    ),
    "m",
)
FULL, WINDOW, STATE = 1, 2, 4  # bits
FREE = CostModel.uniform(4, 1000.0, step_s=0.0)
DEAR_STEPS = CostModel.uniform(4, 1000.0, step_s=10.0)


def demand(*depths: int, restarts: frozenset[int] = frozenset()) -> Demand:
    """Whole pages that must run to these depths."""
    inputs = tuple(
        tuple((p * P, p * P + P) for p, d in enumerate(depths) if d > layer) for layer in range(4)
    )
    return Demand(inputs, restarts)


def shape(
    wanted: Demand, unusable: list[int], cost: CostModel, step_pages: int = 1
) -> list[tuple[int, int, int]] | None:
    found = cut(wanted, Ground(SCHEMA, unusable, {}, (), step_pages), cost)
    return None if found is None else [(s.start, s.end, s.depth) for s in found[1]]


def test_steps_follow_the_demand_where_steps_cost_nothing() -> None:
    assert shape(demand(0, 1, 1, 3, 4), [WINDOW] * 5, FREE) == [(1, 3, 1), (3, 4, 3), (4, 5, 4)]


def test_steps_are_joined_where_steps_are_dear_gaps_included() -> None:
    assert shape(demand(0, 1, 0, 3, 4), [WINDOW] * 5, DEAR_STEPS) == [(1, 5, 4)]


def test_nothing_is_computed_before_or_after_the_demand() -> None:
    assert shape(demand(0, 0, 1, 0, 0), [WINDOW] * 5, DEAR_STEPS) == [(2, 3, 1)]


def test_a_step_is_cut_where_it_would_write_a_usable_page() -> None:
    unusable = [WINDOW, WINDOW, 0, WINDOW]
    assert shape(demand(1, 1, 1, 1), unusable, DEAR_STEPS) == [(0, 2, 1), (2, 3, 1), (3, 4, 1)]


def test_a_page_is_not_run_into_layers_that_are_good_and_not_demanded() -> None:
    unusable = [FULL | WINDOW, FULL | WINDOW]
    assert shape(demand(2, 4), unusable, DEAR_STEPS) == [(0, 1, 2), (1, 2, 4)]
    assert shape(demand(2, 4), [WINDOW, WINDOW], DEAR_STEPS) == [(0, 2, 4)]


def test_f3_a_step_is_cut_where_a_snapshot_is_restored() -> None:
    wanted = demand(1, 3, 3, restarts=frozenset({P}))
    assert shape(wanted, [WINDOW] * 3, DEAR_STEPS) == [(0, 1, 1), (1, 3, 3)]
    ground = Ground(SCHEMA, [WINDOW] * 3, {}, (2,))
    found = cut(wanted, ground, DEAR_STEPS)
    assert found is not None
    steps = steps_of(found[1], wanted, ground)
    assert steps is not None
    assert [s.restore for s in steps] == [(), (2,)]
    assert [s.write_groups for s in steps] == [WINDOW, WINDOW | STATE]


def test_steps_keep_to_the_granularity_or_there_are_none() -> None:
    assert shape(demand(0, 0, 0, 2), [WINDOW] * 4, FREE, 2) == [(2, 4, 2)]
    assert shape(demand(0, 0, 0, 2), [0, 0, 0, WINDOW], FREE, 2) is None


def test_the_floor_is_above_the_last_page_with_nothing_on_it() -> None:
    wanted = demand(0, 0, 1, 1)
    ground = Ground(SCHEMA, [0, WINDOW, WINDOW, WINDOW], {}, ())
    found = cut(wanted, ground, FREE)
    assert found is not None
    steps = steps_of(found[1], wanted, ground)
    assert steps is not None
    assert [s.context_floor[1] for s in steps] == [2 * P]


@pytest.mark.parametrize("step_s", [0.0, 0.05])
def test_f24_good_deeper_layers_of_a_rebuilt_page_stay_exact_under_an_overlap(
    step_s: float,
) -> None:
    """Page 1 is broken in one layer; the overlap of page 2 makes it run deeper."""
    schema = CacheSchema(
        P,
        3,
        (
            group("entries", GroupKind.COMPRESSED, 1, 2, ratio=2),
            group("index", GroupKind.INDEX, 1, 2, ratio=2, depends_on="entries"),
            group("window", GroupKind.WINDOW, 0, 1, window=2),
            group("tail", GroupKind.TAIL, 1, 2, ratio=2, overlap=2),
        ),
        "m",
    )
    whole = Pages((0,) * 8)
    index = Pages((0, 0, -1, *(0,) * 5), ((1, 1),))
    world = World(schema, 8, {0: whole, 1: index, 2: whole}, {3: frozenset({8})})
    cost = CostModel.uniform(3, 10.0, step_s=step_s)
    made = plan(build_match(world), (), schema, cost, Budget(17))
    assert made.level is Level.REBUILD
    assert run_plan(world, made).can_resume()
