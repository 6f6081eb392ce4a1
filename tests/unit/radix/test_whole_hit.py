"""A hit that is whole is compared in one go: rows joined once, no block of it left out."""

from __future__ import annotations

import numpy as np
import pytest

from statewise.radix import (
    CacheSchema,
    Condition,
    GroupEnv,
    GroupKind,
    Match,
    Namespace,
    RadixTree,
    StampTable,
    StateGroupSpec,
    TokenKey,
    ValidationEnv,
    Written,
    validate,
)
from statewise.radix.need import needed_ranges

P, PAGES = 2, 9
CUTS = (2, 3, 7, PAGES)  # pages that each publication ends at
TOKENS = list(range(P * PAGES))
GROUPS = (
    StateGroupSpec("full", GroupKind.FULL, (0,), "layout", "v1", entry_bytes=8),
    StateGroupSpec("window", GroupKind.WINDOW, (1,), "layout", "v1", entry_bytes=8, window=7),
    StateGroupSpec(
        "sinks", GroupKind.WINDOW, (2,), "layout", "v1", entry_bytes=8, window=3, sinks=3
    ),
)
SCHEMA = CacheSchema(P, 3, GROUPS, "model")
BLOCKS = 64


class World:
    """A prefix in several nodes, each group's blocks in an order of its own."""

    def __init__(self) -> None:
        rng = np.random.default_rng(3)
        table = StampTable()
        stamps = table.of_schema(SCHEMA)
        self.generations = tuple(rng.integers(0, 9, BLOCKS, dtype=np.int32) for _ in GROUPS)
        self.tables = [rng.permutation(BLOCKS)[:PAGES].astype(np.int32) for _ in GROUPS]
        self.tree = RadixTree(SCHEMA, stamps)
        written = Written(stamps, 1, self.generations)
        for end in CUTS:  # a sibling at each cut keeps the nodes apart
            key = TokenKey([*TOKENS[: end * P], *([999] * P)])
            lease = self.tree.lease(self.match(), self.match().logical_tokens)
            tables = [np.append(t[:end], np.int32(BLOCKS - 1 - end)) for t in self.tables]
            self.tree.publish(lease, key, end + 1, tables, written, (end + 1) * P)
            self.tree.release(lease)
        self.env = ValidationEnv(SCHEMA, stamps, table, tuple(map(GroupEnv, self.generations)))

    def match(self) -> Match:
        return self.tree.match(Namespace(), TokenKey(TOKENS))


def test_rows_are_joined_over_any_range_of_pages() -> None:
    world = World()
    found = world.match()
    assert len(found.nodes) == len(CUTS)
    for group, table in enumerate(world.tables):
        now = world.generations[group]
        for lo in range(PAGES):
            for hi in range(lo, PAGES + 1):
                for match in (world.match(), found):  # anew, and with something joined already
                    pairs = match.pairs(group, lo, hi)
                    assert pairs[0].tolist() == table[lo:hi].tolist()
                    assert pairs[1].tolist() == now[table[lo:hi]].tolist()


@pytest.mark.parametrize("laid_out", [True, False])
def test_every_needed_block_is_compared_and_no_other(laid_out: bool) -> None:
    world = World()
    for group, table in enumerate(world.tables):
        needed = {
            page for lo, hi in needed_ranges(GROUPS[group], P * PAGES, P) for page in range(lo, hi)
        }
        for page, block in enumerate(table.tolist()):
            match = world.match()
            if laid_out:
                match.lay_out(P * PAGES)
            assert match.is_direct
            assert validate(match, world.env, P * PAGES) == ()
            world.generations[group][block] += 1
            found = validate(match, world.env, P * PAGES)
            assert {p for v in found for p in v.pages} == ({page} & needed)
            assert all(v.condition is Condition.GENERATION for v in found)
            world.generations[group][block] -= 1


def test_a_pool_too_small_for_a_whole_hit_is_a_verdict() -> None:
    world = World()
    short = tuple(
        GroupEnv(now[: int(t.max())])
        for now, t in zip(world.generations, world.tables, strict=True)
    )
    match = world.match()
    assert match.is_direct
    env = ValidationEnv(SCHEMA, world.env.stamps, world.env.table, short)
    assert {v.condition for v in validate(match, env, P * PAGES)} == {Condition.OUT_OF_POOL}
