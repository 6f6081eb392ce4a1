"""The exactness law over the digest model: any schedule gives a cold run's output."""

from __future__ import annotations

import pytest

from support.engine import random_scenario


@pytest.mark.parametrize("block", range(10))
def test_random_scenarios_equal_cold_runs(block: int) -> None:
    for seed in range(block * 30, block * 30 + 30):
        random_scenario(seed)
