"""Recovery plans, run symbolically, make every group exact, and nothing cheaper does.

The oracle executes steps token by token (`support.recovery_oracle`) and searches all literal
sequences of steps for a cheaper one that works.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from statewise.radix import (
    Budget,
    CacheSchema,
    CostModel,
    GroupKind,
    Recompute,
    RecoveryPlan,
    StateGroupSpec,
    Tier,
    TierCost,
    plan,
)
from statewise.radix import planner as planner_module
from statewise.radix.bounds import Bounds, Prices
from statewise.radix.planner import _Planner, _Try
from statewise.radix.residency import Residency
from support.recovery_oracle import Pages, World, build_match, cheaper_than, reaches_of, run_plan

P = 2


def group(name: str, kind: GroupKind, *layers: int, **more: object) -> StateGroupSpec:
    size = "snapshot_bytes" if kind.is_snapshot else "entry_bytes"
    return StateGroupSpec(name, kind, layers, "layout", "v1", **{size: 8, **more})  # type: ignore[arg-type]


FULL, WINDOW = GroupKind.FULL, GroupKind.WINDOW
SCHEMAS = {
    "window": CacheSchema(
        P, 4, (group("full", FULL, 1, 3), group("window", WINDOW, 0, 2, window=2)), "m"
    ),
    "window3": CacheSchema(
        P, 3, (group("full", FULL, 2), group("window", WINDOW, 0, 1, window=3)), "m"
    ),
    "two_windows": CacheSchema(
        P,
        3,
        (
            group("full", FULL, 2),
            group("short", WINDOW, 0, window=2),
            group("long", WINDOW, 1, window=4),
        ),
        "m",
    ),
    "sinks": CacheSchema(
        P, 3, (group("full", FULL, 1), group("window", WINDOW, 0, 2, window=3, sinks=1)), "m"
    ),
    "chunked": CacheSchema(
        P, 3, (group("full", FULL, 1), group("chunk", GroupKind.CHUNKED, 0, 2, window=4)), "m"
    ),
    "recurrent": CacheSchema(
        P, 3, (group("full", FULL, 1), group("state", GroupKind.RECURRENT, 0, 2)), "m"
    ),
    "shared": CacheSchema(
        P,
        4,
        (
            group("full", FULL, 2),
            group("window", WINDOW, 0, 1, window=2, shared_layers=((3, 1),)),
        ),
        "m",
    ),
    "compressed": CacheSchema(
        P,
        3,
        (
            group("entries", GroupKind.COMPRESSED, 1, 2, ratio=2),
            group("index", GroupKind.INDEX, 1, 2, ratio=2, depends_on="entries"),
            group("window", WINDOW, 0, 1, window=2),
            group("tail", GroupKind.TAIL, 1, 2, ratio=2, overlap=2),
        ),
        "m",
    ),
}


@st.composite
def worlds(draw: st.DrawFn, name: str, tiers: tuple[int, ...], max_pages: int) -> World:
    schema = SCHEMAS[name]
    n = draw(st.integers(1, max_pages))
    pages: dict[int, Pages] = {}
    snapshots: dict[int, frozenset[int]] = {}
    for g, spec in enumerate(schema.groups):
        if spec.kind.is_snapshot:
            snapshots[g] = frozenset(draw(st.sets(st.integers(1, n), max_size=3)))
            continue
        # mostly there: what is interesting lies between whole and empty
        places = draw(st.lists(st.sampled_from(tiers), min_size=n, max_size=n))
        invalid: list[tuple[int, int]] = []
        if spec.kind.is_history:
            whole = draw(st.integers(0, n))
            places = [0] * whole + places[whole:]
            for page in draw(st.sets(st.integers(0, n - 1), max_size=2)):
                if places[page] == 0:
                    invalid.append((page, draw(st.integers(1, 2 ** len(spec.layers) - 1))))
        stale: tuple[int, ...] = ()
        if spec.depends_on is not None:
            stale = tuple(draw(st.sets(st.integers(0, n - 1), max_size=1)))
        pages[g] = Pages(tuple(places), tuple(invalid), stale)
    return World(schema, n, pages, snapshots)


@st.composite
def costs(draw: st.DrawFn, num_layers: int) -> CostModel:
    rate = draw(st.sampled_from([10.0, 1000.0]))
    step_s = draw(st.sampled_from([0.0, 1e-4, 0.05]))
    tiers = {
        Tier.HOST: TierCost(
            draw(st.sampled_from([1e2, 1e4, 1e6])), draw(st.sampled_from([0.0, 0.02]))
        ),
        Tier.DISK: TierCost(draw(st.sampled_from([1e2, 1e4])), 0.05),
    }
    return CostModel.uniform(num_layers, rate, step_s=step_s, chunk=64, tiers=tiers)  # type: ignore[arg-type]


def price(world: World, made: RecoveryPlan, cost: CostModel, prompt_len: int) -> float:
    """Total of a plan, from its steps."""
    total = sum(cost.prefill_s(r.start, r.end, r.num_layers) for r in made.replays)
    sizes: dict[Tier, float] = {}
    for load in made.loads:
        size = world.schema.groups[load.group].block_bytes(P) * load.num_pages
        sizes[load.tier] = sizes.get(load.tier, 0.0) + size
    total += cost.load_s(sizes)
    if made.concurrent:
        front = next(s for s in made.steps if isinstance(s, Recompute))
        total = max(total, cost.prefill_s(front.start, front.end))
    return total + cost.prefill_s(made.position, prompt_len)


def check(world: World, cost: CostModel) -> None:
    prompt_len = world.num_pages * P + 3
    made = plan(build_match(world), (), world.schema, cost, Budget(prompt_len))
    assert run_plan(world, made).can_resume(), f"{made} leaves something inexact"
    assert made.total_s == pytest.approx(price(world, made, cost, prompt_len))
    better = cheaper_than(world, cost, prompt_len, made.total_s * (1 - 1e-9) - 1e-12)
    assert better is None, f"{made} costs {made.total_s}, but {better} is cheaper"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SCHEMAS))
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_the_plan_is_exact_and_no_literal_sequence_is_cheaper(
    name: str, data: st.DataObject
) -> None:
    world = data.draw(worlds(name, (0, 0, 0, -1), 4))
    check(world, data.draw(costs(world.schema.num_layers)))


@pytest.mark.parametrize("name", ["window", "two_windows", "compressed"])
@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_loads_and_mixed_plans_are_the_cheapest(name: str, data: st.DataObject) -> None:
    world = data.draw(worlds(name, (0, 0, 1, 1, 2, -1), 3))
    check(world, data.draw(costs(world.schema.num_layers)))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SCHEMAS))
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_no_position_costs_less_than_its_bound(name: str, data: st.DataObject) -> None:
    world = data.draw(worlds(name, (0, 0, 1, 2, -1), 6))
    cost = data.draw(costs(world.schema.num_layers))
    prompt_len = world.num_pages * P + 3
    have = Residency(build_match(world))
    planner = _Planner(have, world.schema, cost, Budget(prompt_len))
    prices = Prices(have, cost, prompt_len)
    for tiers in reaches_of(world):
        reach = tuple(Tier(tier) for tier in tiers)
        bounds = Bounds(have, reach, prices, cost)
        ahead = bounds.front(planner.direct)
        for page in range(planner.direct + 1, world.num_pages + 1):
            for is_front, least in ((False, bounds.seconds[page]), (True, ahead[page])):
                try_ = _Try(0.0, -page, is_front, reach)
                for made in planner._candidates(try_, float("inf")):
                    assert least <= made.total_s


@pytest.mark.parametrize("name", ["window", "compressed", "recurrent"])
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_plan_made_with_little_work_is_exact(name: str, data: st.DataObject) -> None:
    world = data.draw(worlds(name, (0, 0, 1, 2, -1), 8))
    cost = data.draw(costs(world.schema.num_layers))
    budget, known = Budget(world.num_pages * P + 3), build_match(world)
    best = plan(known, (), world.schema, cost, budget)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner_module, "SHORT", 0)
        patch.setattr(planner_module, "MAX_WORK", data.draw(st.sampled_from([-1, 20, 2000])))
        patch.setattr(planner_module, "MAX_STEPS", data.draw(st.integers(0, 2)))
        made = plan(known, (), world.schema, cost, budget)
    assert run_plan(world, made).can_resume()
    assert made.total_s >= best.total_s
