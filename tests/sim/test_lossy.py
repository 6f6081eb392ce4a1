"""Worlds whose slower tiers keep lossy copies: who insists on exact state has none of it."""

from __future__ import annotations

import random
from functools import cache
from itertools import count, islice

import pytest

from support.sim_knobs import Knobs, draw_knobs, meeting_knobs
from support.simulation import Result, Simulation, run_seed

FAST, SLOW = 2, 120
AFTER_SEED_7 = 0.6989944337295713  # what the seed gave when there were no lossy worlds


def lossy_seeds(number: int, *, first: int = 0) -> list[int]:
    """The first seeds whose worlds have such tiers."""

    def has_lossy(seed: int) -> bool:
        tiers = draw_knobs(random.Random(seed)).tiers
        return tiers is not None and tiers.lossy

    return list(islice(filter(has_lossy, count(first)), number))


@cache
def first_run(seed: int) -> Result:
    return run_seed(seed)


def test_a_few_worlds_keep_every_law_and_use_lossy_copies() -> None:
    results = [first_run(seed) for seed in lossy_seeds(FAST)]
    assert sum(result.lossy_tokens for result in results) > 0
    assert sum(result.loaded_tokens for result in results) > 0


def test_other_worlds_are_what_they_were() -> None:
    """The choice draws nothing: a seed without such tiers has the world it always had."""
    rng = random.Random(7)
    knobs: Knobs = draw_knobs(rng)
    assert knobs.tiers is None or not knobs.tiers.lossy
    assert rng.random() == AFTER_SEED_7


@pytest.mark.slow
def test_many_worlds_keep_every_law() -> None:
    for seed in lossy_seeds(SLOW, first=1000):
        run_seed(seed)


@pytest.mark.slow
def test_meetings_with_lossy_copies() -> None:
    lossy = 0
    for seed in range(160):
        knobs = meeting_knobs(random.Random(seed))
        if knobs.tiers is not None and knobs.tiers.lossy:
            lossy += Simulation(seed, knobs).run().lossy_tokens
    assert lossy > 0
