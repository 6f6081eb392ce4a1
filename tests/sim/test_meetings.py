"""Slower tiers about as quick as computing: the same laws, and requests that meet their loads."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache

import pytest

from support.sim_knobs import meeting_knobs
from support.simulation import Result, Simulation

FAST, BLOCKS, SEEDS_PER_BLOCK = 24, 4, 50


@cache
def first_run(seed: int) -> Result:
    return run_seed(seed)


def run_seed(seed: int) -> Result:
    """One world, which keeps every law."""
    return Simulation(seed, meeting_knobs(random.Random(seed))).run()


@pytest.mark.slow
def test_a_few_worlds_keep_every_law_and_meet() -> None:
    results = [first_run(seed) for seed in range(FAST)]
    outcomes: Counter[str] = Counter()
    for result in results:
        outcomes.update(result.meetings)
    assert outcomes["met"] > 3, outcomes
    assert sum(result.met_tokens for result in results) > 0


@pytest.mark.slow
def test_a_seed_writes_the_same_journal_twice() -> None:
    for seed in range(0, FAST, 8):
        assert first_run(seed) == run_seed(seed), seed


@pytest.mark.slow
@pytest.mark.parametrize("block", range(BLOCKS))
def test_worlds_keep_every_law(block: int) -> None:
    first = 1000 + block * SEEDS_PER_BLOCK
    for seed in range(first, first + SEEDS_PER_BLOCK):
        run_seed(seed)
