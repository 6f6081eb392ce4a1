"""Which blocks have a copy: marks are void when a block is freed, or its copy is dropped."""

from __future__ import annotations

import numpy as np
import pytest

from statewise.runtime.cache.mirror import Mirror
from statewise.runtime.memory.block_pool import BlockPool

A, B, C = b"a", b"b", b"c"


@pytest.fixture
def pools() -> tuple[BlockPool, BlockPool]:
    return BlockPool("full", 8), BlockPool("window", 8)


def array(*blocks: int) -> np.ndarray:
    return np.array(blocks, dtype=np.int32)


def test_a_mark_is_its_groups_own(pools: tuple[BlockPool, BlockPool]) -> None:
    mirror = Mirror(pools)
    mirror.mark(0, [1, 3], [A, B])
    assert mirror.has(0, array(0, 1, 2, 3)).tolist() == [False, True, False, True]
    assert not mirror.has(1, array(0, 1, 2, 3)).any()
    mirror.mark(1, [1], [C])
    assert mirror.has(1, array(1, 3)).tolist() == [True, False]


def test_a_block_that_was_freed_has_no_copy_of_what_comes_next(
    pools: tuple[BlockPool, BlockPool],
) -> None:
    mirror, pool = Mirror(pools), pools[0]
    (block,) = pool.allocate(1).tolist()
    mirror.mark(0, [block], [A])
    pool.free(array(block))
    assert not mirror.has(0, array(block))[0]
    assert pool.allocate(1).tolist() == [block]
    assert not mirror.has(0, array(block))[0], "the next owner's content was never copied"
    mirror.mark(0, [block], [B])
    assert mirror.has(0, array(block))[0]


def test_a_dropped_copy_takes_the_mark_away(pools: tuple[BlockPool, BlockPool]) -> None:
    mirror = Mirror(pools)
    mirror.mark(0, [1, 2], [A, B])
    mirror.forget(A)
    mirror.forget(C)  # nobody's
    assert mirror.has(0, array(1, 2)).tolist() == [False, True]
    mirror.mark(0, [1], [A])
    assert mirror.has(0, array(1))[0], "it may be copied again"


def test_the_old_copy_of_a_block_is_not_the_new_ones(pools: tuple[BlockPool, BlockPool]) -> None:
    """A block was freed and holds something else: dropping the old name says nothing of it."""
    mirror, pool = Mirror(pools), pools[0]
    (block,) = pool.allocate(1).tolist()
    mirror.mark(0, [block], [A])
    pool.free(array(block))
    pool.allocate(1)
    mirror.mark(0, [block], [B])
    mirror.forget(A)
    assert mirror.has(0, array(block))[0]
    mirror.forget(B)
    assert not mirror.has(0, array(block))[0]


def test_a_copy_stands_for_the_block_it_was_made_of_last(
    pools: tuple[BlockPool, BlockPool],
) -> None:
    """The same page was evicted and loaded into another block."""
    mirror, pool = Mirror(pools), pools[0]
    first, second = pool.allocate(2).tolist()
    mirror.mark(0, [first], [A])
    pool.free(array(first))
    mirror.mark(0, [second], [A])
    assert mirror.has(0, array(first, second)).tolist() == [False, True]
    pool.allocate(1)
    mirror.mark(0, [first], [B])  # the freed block's next content
    mirror.forget(A)
    assert mirror.has(0, array(first, second)).tolist() == [True, False]


def test_all_marks_can_be_cleared(pools: tuple[BlockPool, BlockPool]) -> None:
    mirror = Mirror(pools)
    mirror.mark(0, [1], [A])
    mirror.mark(1, [2], [B])
    mirror.clear()
    assert not mirror.has(0, array(1))[0]
    assert not mirror.has(1, array(2))[0]
    mirror.forget(A)
    mirror.mark(0, [1], [A])
    assert mirror.has(0, array(1))[0]


def test_the_address_of_a_copys_origin_is_kept_until_the_block_is_anothers(
    pools: tuple[BlockPool, BlockPool],
) -> None:
    mirror, pool = Mirror(pools), pools[1]
    (block,) = pool.allocate(1).tolist()
    mirror.mark(1, [block], [A])
    assert mirror.origin(A) == (1, block)
    pool.free(array(block))
    assert mirror.origin(A) == (1, block), "only the copy is left, and where it came from"
    gone = {"block": block, "name": A.hex(), "on_device": False}
    assert mirror.dump() == {"full": [], "window": [gone]}
    pool.allocate(1)
    mirror.mark(1, [block], [B])
    assert (mirror.origin(A), mirror.origin(B)) == (None, (1, block))
    assert mirror.dump()["window"] == [{"block": block, "name": B.hex(), "on_device": True}]
    mirror.forget(B)
    assert mirror.dump() == {"full": [], "window": []}
