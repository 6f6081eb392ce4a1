from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statewise.runtime.errors import OutOfBlocksError
from statewise.runtime.memory.block_pool import BlockPool


def test_allocates_all_or_nothing() -> None:
    pool = BlockPool("full", 4)
    taken = pool.allocate(3)
    with pytest.raises(OutOfBlocksError, match="'full': 2 blocks needed, 1 free"):
        pool.allocate(2)
    assert pool.num_free == 1
    assert len(set(taken.tolist())) == 3


def test_a_freed_block_loses_its_generation() -> None:
    pool = BlockPool("full", 4)
    blocks = pool.allocate(2)
    before = pool.generations[blocks].copy()
    pool.free(blocks)
    assert (pool.generations[blocks] != before).all()


def test_double_free_is_a_programmer_error() -> None:
    pool = BlockPool("full", 4)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="not owned"):
        pool.free(blocks)


def test_f9_blocks_freed_during_a_step_wait_for_its_end() -> None:
    """F9: what a running step may still read is not handed out again."""
    pool = BlockPool("full", 2)
    blocks = pool.allocate(2)
    pool.open_epoch(1)
    pool.free(blocks)
    assert (pool.num_free, pool.num_limbo) == (0, 2)
    pool.open_epoch(2)
    pool.close_epoch(1)
    assert pool.num_free == 2
    pool.close_epoch(2)


def test_f9_a_block_freed_while_a_copy_reads_it_waits_for_the_copy() -> None:
    pool = BlockPool("full", 3)
    blocks = pool.allocate(3)
    pool.pin(blocks[:2])
    pool.pin(blocks[1:2])
    before = pool.generations[blocks].copy()
    pool.free(blocks)
    assert (pool.generations[blocks] != before).all(), "it lost its owner all the same"
    assert (pool.num_free, pool.num_limbo, pool.num_parked) == (1, 2, 2)
    assert sorted(pool.limbo_blocks().tolist()) == blocks[:2].tolist()
    pool.unpin(blocks[:2])
    assert (pool.num_free, pool.num_parked) == (2, 1)
    pool.unpin(blocks[1:2])
    assert (pool.num_free, pool.num_limbo) == (3, 0)


def test_f9_after_the_copy_a_block_waits_for_the_step_that_may_read_it() -> None:
    pool = BlockPool("full", 1)
    block = pool.allocate(1)
    pool.pin(block)
    pool.open_epoch(1)
    pool.free(block)
    pool.unpin(block)
    assert (pool.num_free, pool.num_limbo, pool.num_parked) == (0, 1, 0)
    pool.close_epoch(1)
    assert pool.num_free == 1


def test_an_owned_block_stays_owned_after_a_copy() -> None:
    pool = BlockPool("full", 2)
    block = pool.allocate(1)
    pool.pin(block)
    pool.unpin(block)
    assert (pool.num_owned, pool.num_limbo) == (1, 0)
    with pytest.raises(AssertionError, match="unpinned twice"):
        pool.unpin(block)
    with pytest.raises(AssertionError, match="not owned"):
        pool.pin(pool.free_blocks().copy())


def test_f9_limbo_waits_for_every_epoch_open_at_the_free() -> None:
    pool = BlockPool("full", 1)
    block = pool.allocate(1)
    pool.open_epoch(1)
    pool.open_epoch(2)
    pool.free(block)
    pool.close_epoch(2)
    assert pool.num_free == 0
    pool.close_epoch(1)
    assert pool.num_free == 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "give", "open", "close"]), st.integers(0, 5))))
def test_every_block_is_in_exactly_one_place(steps: list[tuple[str, int]]) -> None:
    pool = BlockPool("g", 12)
    held: list[int] = []
    open_epochs: list[int] = []
    epoch = 0
    for action, count in steps:
        if action == "take" and count <= pool.num_free:
            held += pool.allocate(count).tolist()
        elif action == "give":
            give, held = held[:count], held[count:]
            pool.free(np.array(give, dtype=np.int32))
        elif action == "open":
            epoch += 1
            open_epochs.append(epoch)
            pool.open_epoch(epoch)
        elif action == "close" and open_epochs:
            pool.close_epoch(open_epochs.pop(count % len(open_epochs)))
        places = [*held, *pool.free_blocks().tolist(), *pool.limbo_blocks().tolist()]
        assert sorted(places) == list(range(12))
        if not open_epochs:
            assert pool.num_limbo == 0
