"""What a planner may use of a match, once verdicts and damaged layers are taken out."""

from __future__ import annotations

import pytest

from statewise.radix import CacheSchema, Condition, GroupKind, StateGroupSpec, Tier, Verdict
from statewise.radix.residency import NOWHERE, Residency
from support.recovery_oracle import Pages, World, build_match

SCHEMA = CacheSchema(
    2,
    4,
    (
        StateGroupSpec("full", GroupKind.FULL, (0, 1, 3), "l", "v", entry_bytes=8),
        StateGroupSpec(
            "index", GroupKind.INDEX, (1, 3), "l", "v", entry_bytes=8, depends_on="full"
        ),
    ),
    "m",
)


def have(full: Pages, index: Pages | None = None, *verdicts: Verdict) -> Residency:
    n = len(full.tiers)
    world = World(SCHEMA, n, {0: full, 1: index or Pages((0,) * n)})
    return Residency(build_match(world), verdicts)


def test_tiers_are_those_of_the_fastest_usable_copy() -> None:
    assert have(Pages((0, 1, 2, -1))).tier[0].tolist() == [0, 1, 2, NOWHERE]


@pytest.mark.parametrize("condition", [Condition.GENERATION, Condition.WEIGHTS])
def test_a_page_that_failed_is_nowhere_and_broken_in_all_layers(condition: Condition) -> None:
    found = have(Pages((0, 0, 0)), None, Verdict(0, condition, (1,)))
    assert found.tier[0].tolist() == [0, NOWHERE, 0]
    assert found.broken[0].tolist() == [0, 4, 0]


def test_absence_takes_nothing_away() -> None:
    found = have(Pages((0, 0)), None, Verdict(0, Condition.ABSENT, (1,)))
    assert found.tier[0].tolist() == [0, 0]


def test_broken_layers_reach_as_deep_as_the_deepest_of_them() -> None:
    found = have(
        Pages((0, 0, 0), ((1, 0b011),)), None, Verdict(0, Condition.CHECKSUM, (2,), layers=1)
    )
    assert found.broken[0].tolist() == [0, 2, 1]
    assert found.tier[0].tolist() == [0, NOWHERE, NOWHERE]


def test_a_whole_failure_outweighs_single_layers() -> None:
    found = have(Pages((0, 0), ((1, 0b001),)), None, Verdict(0, Condition.GENERATION, (1,)))
    assert found.broken[0].tolist() == [0, 4]


def test_f24_an_index_over_another_version_is_broken_in_all_layers() -> None:
    found = have(Pages((0, 0)), Pages((0, 0), ((1, 0b01),), stale_index=(1,)))
    assert found.broken[1].tolist() == [0, 4]


def test_pages_are_counted_by_tier() -> None:
    found = have(Pages((0, 1, 1, 2)))
    assert found.page_sums(0, Tier.HOST).tolist() == [0, 0, 1, 2, 2]
    assert found.slow_tiers[0] == [Tier.HOST, Tier.DISK]
    assert sorted(found.changes()) == [1, 3]
