"""The exactness law over the digest model: any schedule gives a cold run's output."""

from __future__ import annotations

import pytest

from support.engine import random_scenario


def test_a_few_random_scenarios_equal_cold_runs() -> None:
    for seed in range(20):
        random_scenario(seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(8))
def test_random_scenarios_equal_cold_runs(block: int) -> None:
    for seed in range(100 + block * 30, 130 + block * 30):
        random_scenario(seed)
