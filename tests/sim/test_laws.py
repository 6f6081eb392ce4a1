"""The laws over simulated worlds: any schedule and any fault, and the same journal twice."""

from __future__ import annotations

from functools import cache

import pytest

from support.simulation import Result, run_seed

FAST, BLOCKS, SEEDS_PER_BLOCK = 60, 8, 50


@cache
def first_run(seed: int) -> Result:
    """One run of a world, which keeps every law."""
    return run_seed(seed)


def test_a_few_worlds_keep_every_law() -> None:
    for seed in range(FAST):
        first_run(seed)


@pytest.mark.parametrize("seed", [1256, 8799])
def test_worlds_that_once_broke_a_law(seed: int) -> None:
    """A match of nothing whole; a resume at a chunk boundary before the audited position."""
    run_seed(seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(BLOCKS))
def test_worlds_keep_every_law(block: int) -> None:
    first = 1000 + block * SEEDS_PER_BLOCK
    for seed in range(first, first + SEEDS_PER_BLOCK):
        run_seed(seed)


@pytest.mark.slow
def test_a_seed_writes_the_same_journal_twice() -> None:
    for seed in range(0, FAST, 6):
        first, second = first_run(seed), run_seed(seed)
        assert first.journal == second.journal, seed
        assert first == second


def test_seeds_reach_what_they_are_meant_to_reach() -> None:
    results = [first_run(seed) for seed in range(FAST)]
    assert sum(r.reused_tokens for r in results) > 0
    assert sum(r.preemptions for r in results) > 0
    assert sum(r.num_restarts for r in results) > 0
    assert sum(r.loaded_tokens for r in results) > 0
    levels = {level for r in results for level in r.levels}
    assert {"direct", "recompute", "load", "none"} <= levels
