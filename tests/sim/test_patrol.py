"""The patrol finds damage that nobody has hit yet, a bounded number of blocks at a time."""

from __future__ import annotations

import random

import pytest

from statewise.radix.patrol import Patrol
from statewise.radix.validation import Condition
from support.engine import VOCAB, Driver, make_schema

PROMPT = [3 + i * 7 % (VOCAB - 3) for i in range(75)]
SHAPES = ("FF", "FWF", "C", "WCH", "FRR", "FWfw")


def driver(shape: str, **args: object) -> Driver:
    schema = make_schema(shape, 8, 12)
    settings: dict[str, object] = {"audit_rate": 0.001, "chunked_prefill_size": 32, **args}
    return Driver(schema, (96,) * schema.num_groups, **settings)


def walk(d: Driver) -> int:
    """One whole round; returns the blocks compared."""
    rounds, compared = d.cache.patrol.num_rounds, 0
    while d.cache.patrol.num_rounds == rounds:
        compared += d.cache.patrol.step(7)
    return compared


def owned_by_tree(d: Driver) -> list[tuple[int, int]]:
    return [(g, int(b)) for g in range(d.schema.num_groups) for b in sorted(d.cache.tree.blocks(g))]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_round_compares_every_cached_block_once(shape: str) -> None:
    d = driver(shape)
    d.serve("a", PROMPT, 5)
    d.serve("b", PROMPT[:40] + [1, 2, 3] * 9, 5)
    assert walk(d) == len(owned_by_tree(d))
    assert walk(d) == len(owned_by_tree(d)), "and again in the next round"


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_any_flipped_bit_is_found_and_out_of_reach(shape: str) -> None:
    rng = random.Random(shape)
    for _ in range(12):
        d = driver(shape)
        d.serve("a", PROMPT, 5)
        group, block = rng.choice(owned_by_tree(d))
        layers, _, slots = d.worker.blocks(group).shape
        d.worker.flip(group, rng.randrange(layers), block, rng.randrange(slots), rng.randrange(64))
        walk(d)
        found = d.cache.counters.validation_failures
        assert found.of(condition="checksum", source="patrol") == 1, (group, block)
        walk(d)
        assert found.of(condition="checksum", source="patrol") == 1, "counted once"
        d.serve("again", PROMPT, 5)
        assert d.cache.counters.failures(Condition.CHECKSUM) == 1
    d.quiesce()


def test_a_step_is_bounded() -> None:
    d = driver("FWF")
    d.serve("a", PROMPT, 5)
    assert d.cache.patrol.step(3) == 3
    assert d.cache.patrol.step(1) == 1


def test_without_checksums_there_is_nothing_to_do() -> None:
    d = driver("FWF", audit_rate=0.0)
    d.serve("a", PROMPT, 5)
    assert d.cache.patrol.step(100) == 0
    assert not d.core.idle()


def test_idle_moments_are_used_and_can_be_spared() -> None:
    d = driver("FWF")
    assert not d.core.idle(), "nothing is cached"
    d.serve("a", PROMPT, 5)
    assert d.core.idle()
    assert not driver("FWF", patrol_blocks=0).core.idle()


def test_the_tree_may_change_between_two_steps() -> None:
    """Splits, evictions and flushes amid a round: no block is compared after it was given away."""
    rng = random.Random(1)
    d = driver("FWF")
    walk_of = Patrol(d.cache.tree)
    for i in range(40):
        stem = PROMPT[: rng.randrange(8, 75)]
        d.serve(f"r{i}", stem + [rng.randrange(1, VOCAB) for _ in range(rng.randrange(20))], 3)
        if rng.random() < 0.2:
            d.free(d.cache.tree.evict(rng.randrange(2), rng.randrange(1, 30)))
        if rng.random() < 0.05:
            d.core.flush()
        for portion in walk_of.take(rng.randrange(1, 9)):
            owned = set(d.cache.tree.blocks(portion.group).tolist())
            assert owned.issuperset(portion.blocks.tolist())
            now = d.worker.checksums(portion.group, portion.blocks)
            assert walk_of.found(portion, now) is None
        d.cache.patrol.step(5)
    assert walk_of.num_rounds > 1
    assert d.cache.counters.failures(Condition.CHECKSUM) == 0
