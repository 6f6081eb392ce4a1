"""Cache reports: every matched token is counted once, whatever happened to it."""

from __future__ import annotations

import numpy as np
import pytest

from statewise.radix import (
    CacheSchema,
    GroupKind,
    Namespace,
    RadixTree,
    StampTable,
    StateGroupSpec,
    Tier,
    TokenKey,
)
from statewise.radix.plan import NO_PAGES, Level, RecoveryPlan, Replay, Reuse
from statewise.runtime.cache.report import build_report

PAGE = 4


def empty_tree() -> RadixTree:
    full = StateGroupSpec("full", GroupKind.FULL, (0,), "test", "v1", entry_bytes=1)
    schema = CacheSchema(PAGE, 1, (full,), "test")
    return RadixTree(schema, StampTable().of_schema(schema))


def replayed(*spans: tuple[int, int]) -> tuple[Replay, ...]:
    return tuple(Replay(start, end, 1, 1, (0,), (NO_PAGES,)) for start, end in spans)


@pytest.mark.parametrize(
    ("spans", "loaded_from"),
    [
        ([], {"disk": 8, "host": 8}),
        ([(8, 12)], {"disk": 8, "host": 4}),
        ([(4, 16)], {"disk": 4}),
        ([(0, 6), (2, 14)], {"host": 2}),
        ([(0, 20)], {}),
    ],
)
def test_a_loaded_page_that_a_replay_computed_again_counts_as_repaired(
    spans: list[tuple[int, int]], loaded_from: dict[str, int]
) -> None:
    tree = empty_tree()
    match = tree.match(Namespace(), TokenKey(np.arange(20, dtype=np.int32)))
    plan = RecoveryPlan(20, Level.REPAIR, (Reuse(0, 20), *replayed(*spans)), None, 0)
    loaded = {0: Tier.DISK, 1: Tier.DISK, 2: Tier.HOST, 3: Tier.HOST}
    report = build_report(match, plan, (), 30, loaded)
    assert report.loaded_from == loaded_from
    assert report.loaded == sum(loaded_from.values())
    assert report.reused + report.loaded + report.repaired + report.recomputed == report.matched
    covered = {t for start, end in spans for t in range(start, end)}
    assert report.repaired == len(covered)
    assert report.reused == len(set(range(16, 20)) - covered)
