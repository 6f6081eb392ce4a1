"""Bandwidth from loads, alone and beside each other."""

from __future__ import annotations

import numpy as np
import pytest

from statewise.radix import CostModel, CostObserver, Tier
from statewise.runtime.cache.load_costs import LONGEST_S, LoadCosts
from statewise.runtime.tiers.transfer import Priority, Transfer

RATE = 1e7  # bytes per second of the medium, in all


def costs_of() -> LoadCosts:
    costs = LoadCosts()
    costs.observer = CostObserver(CostModel.uniform(1, 1.0), weight=0.5)
    return costs


def load(began_s: float, finished_s: float, tier: Tier = Tier.DISK) -> Transfer:
    transfer = Transfer("load", tier, Priority.LOAD, ())
    transfer.started_s, transfer.finished_s = began_s, finished_s
    return transfer


def rate(costs: LoadCosts, tier: Tier = Tier.DISK) -> float:
    assert costs.observer is not None
    return costs.observer.model.tiers[tier].bytes_per_s


@pytest.mark.parametrize("at_once", [1, 2, 7])
def test_loads_that_share_a_medium_teach_its_bandwidth(at_once: int) -> None:
    """However many are under way, each new one begun when one ends; all take turns."""
    costs, rng = costs_of(), np.random.default_rng(at_once)
    for _ in range(30):
        sizes = rng.integers(1_000_000, 5_000_000, 20)
        ends = np.cumsum(sizes) / RATE
        loads = [load(ends[i - at_once] if i >= at_once else 0.0, ends[i]) for i in range(20)]
        for i in range(20 + at_once):
            if i >= at_once:
                costs.ended(loads[i - at_once], is_whole=True)
            if i < 20:
                costs.begun(loads[i], int(sizes[i]))
    assert rate(costs) == pytest.approx(RATE, rel=0.05)


def test_time_in_which_nothing_was_loaded_does_not_count() -> None:
    """Two that are delivered together need not have run together."""
    costs = costs_of()
    for i in range(30):
        pair = load(100.0 * i, 100.0 * i + 1), load(100.0 * i + 50, 100.0 * i + 51)
        for one in pair:
            costs.begun(one, int(RATE))
        for one in pair:
            costs.ended(one, is_whole=True)
    assert rate(costs) == pytest.approx(RATE, rel=0.05)


def test_a_medium_that_never_rests_is_observed_all_the_same() -> None:
    costs = costs_of()
    costs.begun(load(0.0, 0.0), 0)  # one that hangs
    for i in range(300):
        one = load(float(i), i + 1.0)
        costs.begun(one, int(RATE))
        costs.ended(one, is_whole=True)
    assert rate(costs) == pytest.approx(RATE, rel=1.2 / LONGEST_S)


def test_a_load_that_fails_teaches_nothing_of_what_ran_beside_it() -> None:
    costs = costs_of()
    before = rate(costs)
    good, bad = load(0.0, 1.0), load(0.0, 1.0)
    for one in (good, bad):
        costs.begun(one, 1000)
    costs.ended(good, is_whole=True)
    costs.ended(bad, is_whole=False)
    assert rate(costs) == before


def test_what_is_under_way_is_the_queue_of_its_tier() -> None:
    costs = costs_of()
    assert costs.observer is not None
    one, other = load(0.0, 1.0), load(0.0, 1.0)
    costs.begun(one, 3_000)
    costs.begun(other, 4_000)
    tiers = costs.observer.model.tiers
    assert tiers[Tier.DISK].queue_s == pytest.approx(7_000 / tiers[Tier.DISK].bytes_per_s)
    assert tiers[Tier.HOST].queue_s == 0.0
    costs.ended(one, is_whole=False)
    costs.ended(other, is_whole=False)
    assert costs.observer.model.tiers[Tier.DISK].queue_s == 0.0
