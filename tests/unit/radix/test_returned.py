"""What came back from a slower tier counts as loaded only if length, bytes and address hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from statewise.radix import (
    CacheSchema,
    Condition,
    GroupEnv,
    GroupKind,
    StampTable,
    StateGroupSpec,
    ValidationEnv,
)
from statewise.radix.returned import Returned, validate_returned

SCHEMA = CacheSchema(
    2, 2, (StateGroupSpec("full", GroupKind.FULL, (0, 1), "layout", "v1", entry_bytes=8),), "m"
)
SIZE = 8 * 2 * 2
SUMS = np.arange(1, 7, dtype=np.uint64).reshape(3, 2)


def env(**changes: object) -> ValidationEnv:
    table = StampTable()
    group = replace(GroupEnv(), **changes)  # type: ignore[arg-type]
    return ValidationEnv(SCHEMA, table.of_schema(SCHEMA), table, (group,))


def back(**changes: object) -> Returned:
    blocks = np.array([1, 2, 3], dtype=np.int32)
    made = Returned(0, (4, 5, 6), blocks, [SIZE] * 3, SUMS, SUMS.copy())
    return replace(made, **changes)  # type: ignore[arg-type]


def test_pages_that_came_back_whole_pass() -> None:
    assert validate_returned(env(), back()) == ()


def test_f22_a_short_copy_is_not_loaded() -> None:
    (verdict,) = validate_returned(env(), back(lengths=[SIZE, SIZE - 1, SIZE]))
    assert (verdict.condition, verdict.pages) == (Condition.LENGTH, (5,))


def test_f21_changed_bytes_name_page_and_layer() -> None:
    found = SUMS.copy()
    found[2, 1] ^= np.uint64(4)
    (verdict,) = validate_returned(env(), back(found=found))
    assert (verdict.condition, verdict.pages, verdict.layers) == (Condition.CHECKSUM, (6,), 2)


def test_a_block_that_kernels_may_not_touch_is_found_after_a_load() -> None:
    crooked = env(base_addresses=(0,), block_stride=32, alignment=64)
    verdicts = validate_returned(crooked, back())
    assert [(v.condition, v.pages) for v in verdicts] == [
        (Condition.ALIGNMENT, (4,)),
        (Condition.ALIGNMENT, (6,)),
    ]


def test_a_page_fails_once_by_its_first_condition() -> None:
    crooked = env(base_addresses=(1,), block_stride=32, alignment=64)
    found = SUMS + np.uint64(1)
    verdicts = validate_returned(crooked, back(lengths=[0, SIZE, SIZE], found=found))
    assert [v.condition for v in verdicts] == [
        Condition.LENGTH,
        Condition.CHECKSUM,
        Condition.CHECKSUM,
    ]
