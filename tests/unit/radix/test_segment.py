"""Segments are values."""

from __future__ import annotations

import numpy as np
import pytest

from statewise.radix import Tier
from statewise.radix.segment import (
    BLOCK,
    MIXED,
    NUM_SLOW_ROWS,
    SLOW_BLOCK,
    SLOW_TIER,
    PageAside,
    Segment,
    new_columns,
    of_table,
)


def segment(blocks: list[int], stamp: int = 0) -> Segment:
    return of_table(new_columns(np.array(blocks, np.int32), None, stamp, 1))


def test_summary_counts_device_pages() -> None:
    made = segment([3, -1, 5])
    assert (made.num_pages, made.num_present, made.stamp) == (3, 2, 0)
    assert not made.is_whole(0)
    assert made.resident(0).tolist() == [True, False, True]
    assert not made.resident(1).any()


def test_parts_and_joins_keep_the_rows() -> None:
    made = segment([1, 2, 3, 4])
    again = made.part(0, 1).joined(made.part(1, 4))
    assert np.array_equal(again.table, made.table)
    assert again.is_whole(0)
    mixed = segment([1], stamp=0).joined(segment([2], stamp=1))
    assert mixed.stamp == MIXED
    assert not mixed.is_whole(0)
    assert mixed.part(1, 2).resident(1).tolist() == [True]


def test_operations_leave_the_original_alone() -> None:
    made = segment([1, 2, 3])
    before = made.table.copy()
    pages = np.array([1])
    less = made.without(pages)
    more = less.with_pages(pages, new_columns(np.array([9], np.int32), None, 0, 2))
    assert np.array_equal(made.table, before)
    assert less.blocks.tolist() == [1, -1, 3]
    assert more.blocks.tolist() == [1, 9, 3]


@pytest.mark.parametrize("blocks", [[1, 2, 3], [-1, 2, 3], [1, -1, 3, 4], [-1, 2, -1, 4]])
@pytest.mark.parametrize("stamps", ["alike", "mixed"])
def test_a_run_that_leaves_the_device_is_counted(blocks: list[int], stamps: str) -> None:
    made = segment(blocks)
    if stamps == "mixed":
        made = made.joined(segment([9], stamp=1))
    present = np.flatnonzero(made.blocks >= 0).tolist()
    for start in present:
        for stop in range(start + 1, len(made.blocks) + 1):
            if (made.blocks[start:stop] < 0).any():
                break
            less, counted = made.without_run(start, stop), made.without(np.arange(start, stop))
            assert np.array_equal(less.table, counted.table)
            assert (less.num_present, less.first) == (counted.num_present, counted.first)
            assert not less.num_present or less.stamp == counted.stamp


def test_aside_follows_its_pages() -> None:
    slow = np.full((NUM_SLOW_ROWS, 3), -1, np.int32)
    slow[SLOW_BLOCK, 2], slow[SLOW_TIER, 2] = 7, Tier.HOST
    sums = np.arange(6, dtype=np.uint64).reshape(3, 2)
    made = segment([1, 2, -1]).with_aside(PageAside(slow, {1: 0b10}, sums))
    assert made.resident(0).tolist() == [True, False, False]
    assert made.loadable(0).tolist() == [True, False, True]
    again = made.part(0, 2).joined(made.part(2, 3))
    assert again.loadable(0).tolist() == [True, False, True]
    assert again.aside.invalid == {1: 0b10}
    assert np.array_equal(again.aside.checksums, sums)  # type: ignore[arg-type]
    joined = segment([5]).joined(made)
    assert joined.aside.invalid == {2: 0b10}
    assert joined.aside.checksums is not None
    assert joined.aside.checksums[:2].tolist() == [[0, 0], [0, 1]]
    repaired = made.with_pages(np.array([1]), new_columns(np.array([8], np.int32), None, 0, 2))
    assert repaired.resident(0).tolist() == [True, True, False]


@pytest.mark.parametrize("generations", [None, np.arange(10, dtype=np.int32) * 3])
def test_columns_read_generations_by_block(generations: np.ndarray | None) -> None:
    columns = new_columns(np.array([2, 4], np.int32), generations, 5, 6)
    assert columns[BLOCK].tolist() == [2, 4]
    assert columns[1].tolist() == ([0, 0] if generations is None else [6, 12])
    assert columns[2:4].tolist() == [[5, 5], [6, 6]]
