"""Just before the forward pass every block of every running request is what it was when leased."""

from __future__ import annotations

import numpy as np
import pytest

from statewise.runtime.messages import CacheOptions
from support.engine import VOCAB, Driver, make_schema

PROMPT = [3 + i * 7 % (VOCAB - 3) for i in range(60)]


@pytest.mark.parametrize("shape", ["FF", "FWF", "FRR", "WCH"])
def test_a_block_given_away_stops_the_step_before_it_runs(shape: str) -> None:
    schema = make_schema(shape, 8, 12)
    for group in range(schema.num_groups):
        d = Driver(schema, (64,) * schema.num_groups, chunked_prefill_size=64)
        d.serve("first", PROMPT, 2)
        d.add("runs", PROMPT, 20)
        d.step()
        (sequence,) = d.cache._live
        table = sequence.view(group)
        block = int(table[table >= 0][-1])
        pool = d.cache.pools[group]
        pool.free(np.array([block], dtype=np.int32))  # what must never happen
        num_steps = len(d.batches)
        with pytest.raises(AssertionError, match=f"{schema.groups[group].name}: a lease is stale"):
            d.core.step()
        assert len(d.batches) == num_steps, "the worker did not run"


def test_a_block_given_away_between_lookup_and_begin_stops_the_step() -> None:
    """Page tables hold the generations that the lookup compared, not the pool's of later."""
    schema = make_schema("FWF", 8, 12)
    for group in range(schema.num_groups):
        d = Driver(schema, (64,) * schema.num_groups, chunked_prefill_size=64)
        d.serve("first", PROMPT, 2)
        tokens = np.array(PROMPT, dtype=np.int32)
        found = d.cache.lookup(CacheOptions(), tokens, len(tokens) - 1)
        assert found.match is not None
        assert found.match.is_direct
        block = int(found.match.blocks(group)[-1])
        d.cache.pools[group].free(np.array([block], dtype=np.int32))  # what must never happen
        d.cache.begin(found, len(tokens))
        with pytest.raises(AssertionError, match=f"{schema.groups[group].name}: a lease is stale"):
            d.cache.verify_leases()


def test_limbo_keeps_blocks_from_being_reused_while_a_step_reads_them() -> None:
    """What is freed while a step runs is free only after it."""
    d = Driver(make_schema("FF", 8, 12), (64,))
    d.serve("first", PROMPT, 2)
    pool = d.cache.pools[0]
    d.cache.open_epoch(99)
    before = pool.num_free
    d.core.flush()
    assert pool.num_free == before
    assert pool.num_limbo > 0
    d.cache.close_epoch(99)
    assert pool.num_limbo == 0
    assert pool.num_free == pool.num_blocks
