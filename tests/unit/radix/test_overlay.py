"""What slower tiers hold, laid over a match: planned as if the tree had known it."""

from __future__ import annotations

import numpy as np

from statewise.radix import Budget, CostModel, Level, Load, Namespace, RadixTree, Tier, TokenKey
from statewise.radix.overlay import Stored, overlay
from statewise.radix.planner import plan
from statewise.radix.residency import NOWHERE, Residency
from statewise.radix.results import Written
from support.sim_schema import make_schema

PAGE = 4
TOKENS = list(range(1, 1 + 10 * PAGE))
COST = CostModel.uniform(2, 100.0)


def tree_with(shape: str, num_pages: int, window: int = 6) -> RadixTree:
    """A tree that has the first pages of `TOKENS` in every paged group."""
    schema = make_schema(shape, PAGE, window)
    tree = RadixTree(schema)
    key = TokenKey(TOKENS)
    lease = tree.lease(tree.match(Namespace(), key), 0)
    tables = [np.arange(10 * (g + 1), 10 * (g + 1) + 10, dtype=np.int32) for g in range(9)]
    written = Written(tree.stamps, 1)
    tree.publish(lease, key, num_pages, tables, written, num_pages * PAGE)
    tree.keep(lease, num_pages * PAGE)
    tree.release(lease)
    return tree


def pages(first: int, stop: int, tier: Tier = Tier.DISK) -> dict[int, tuple[Tier, int]]:
    return {page: (tier, 100 + page) for page in range(first, stop)}


def test_pages_beyond_the_tree_and_in_gaps_are_loaded() -> None:
    tree = tree_with("FF", 5)
    match = tree.match(Namespace(), TokenKey(TOKENS))
    tree.drop(match, 0, [2])
    match = tree.match(Namespace(), TokenKey(TOKENS))
    over = overlay(match, Stored(8, {0: {2: (Tier.HOST, 7), **pages(5, 8)}}))
    assert over.logical_pages == 8
    tiers = Residency(over).tier[0].tolist()
    assert tiers == [0, 0, Tier.HOST, 0, 0, Tier.DISK, Tier.DISK, Tier.DISK]
    chosen = plan(over, (), tree.schema, COST, Budget(len(TOKENS), front=False))
    assert (chosen.position, chosen.level) == (8 * PAGE, Level.LOAD)
    assert set(chosen.loads) == {Load(0, 2, 3, Tier.HOST), Load(0, 5, 8, Tier.DISK)}
    assert match.logical_pages == 5, "the match itself is what it was"


def test_a_match_that_ends_inside_a_node_is_cut_there() -> None:
    tree = tree_with("F", 6)
    key = TokenKey([*TOKENS[: 3 * PAGE], *([96] * (5 * PAGE))])
    match = tree.match(Namespace(), key)
    over = overlay(match, Stored(6, {0: pages(3, 6)}))
    assert Residency(over).tier[0].tolist() == [0, 0, 0, *[Tier.DISK] * 3]
    assert over.blocks(0).tolist() == [10, 11, 12, -1, -1, -1]


def test_an_index_is_usable_over_the_copy_it_comes_with() -> None:
    tree = tree_with("C", 0)
    schema = tree.schema
    entries, index = schema.index_of("entries"), schema.index_of("index")
    match = tree.match(Namespace(), TokenKey(TOKENS))
    both = overlay(match, Stored(4, {entries: pages(0, 4), index: pages(0, 4)}))
    assert Residency(both).tier[index].tolist() == [Tier.DISK] * 4
    alone = overlay(match, Stored(4, {entries: pages(0, 4), index: pages(0, 2)}))
    assert Residency(alone).tier[index].tolist() == [Tier.DISK] * 2 + [NOWHERE] * 2


def test_a_snapshot_in_a_slower_tier_is_loaded_with_its_history() -> None:
    tree = tree_with("FR", 4)
    full, state = tree.schema.index_of("full"), tree.schema.index_of("state")
    match = tree.match(Namespace(), TokenKey(TOKENS))
    stored = Stored(6, {full: pages(4, 6)}, {(state, 6): (Tier.DISK, 3)})
    chosen = plan(overlay(match, stored), (), tree.schema, COST, Budget(len(TOKENS), front=False))
    assert chosen.position == 6 * PAGE
    assert set(chosen.loads) == {Load(state, 6, 7, Tier.DISK), Load(full, 4, 6, Tier.DISK)}
    no_tier = plan(overlay(match, stored), (), tree.schema, COST, Budget(len(TOKENS), load=False))
    assert not no_tier.loads


def test_a_dear_load_is_not_planned() -> None:
    tree = tree_with("F", 2)
    match = tree.match(Namespace(), TokenKey(TOKENS))
    over = overlay(match, Stored(8, {0: pages(2, 8)}))
    quick = CostModel.uniform(1, 1e12)
    assert not plan(over, (), tree.schema, quick, Budget(len(TOKENS))).loads


def test_a_copy_replaces_what_is_damaged_on_the_device() -> None:
    tree = tree_with("F", 6)
    tree.mark_invalid(tree.match(Namespace(), TokenKey(TOKENS)), 0, {3: 1, 5: 1})
    match = tree.match(Namespace(), TokenKey(TOKENS))
    over = overlay(match, Stored(6, {0: {3: (Tier.HOST, 9)}}))
    assert Residency(over).tier[0].tolist() == [0, 0, 0, Tier.HOST, 0, NOWHERE]
    assert over.blocks(0).tolist() == [10, 11, 12, -1, 14, 15]
    assert match.blocks(0).tolist() == [10, 11, 12, 13, 14, 15], "the tree's own is untouched"


def test_copies_are_laid_over_the_nodes_they_belong_to() -> None:
    """A fork in the path: page numbers count from the root, segments from their nodes."""
    tree = tree_with("F", 8)
    fork = TokenKey([*TOKENS[: 5 * PAGE], *([96] * (3 * PAGE))])
    lease = tree.lease(tree.match(Namespace(), fork), 5 * PAGE)
    table = np.full(8, -1, dtype=np.int32)
    table[5:8] = [80, 81, 82]
    tree.publish(lease, fork, 8, [table], Written(tree.stamps, 2), 8 * PAGE)
    tree.release(lease)
    match = tree.match(Namespace(), fork)
    assert len(match.nodes) == 2
    over = overlay(match, Stored(9, {0: {4: (Tier.DISK, 4), 6: (Tier.HOST, 6), **pages(8, 9)}}))
    expected = [0, 0, 0, 0, Tier.DISK, 0, Tier.HOST, 0, Tier.DISK]
    assert Residency(over).tier[0].tolist() == expected


def test_an_index_on_the_device_is_void_over_entries_that_would_be_loaded() -> None:
    """F24: entries that come back are another writing than those it was built over."""
    tree = tree_with("C", 6)
    entries, index = tree.schema.index_of("entries"), tree.schema.index_of("index")
    tree.drop(tree.match(Namespace(), TokenKey(TOKENS)), entries, [2])
    match = tree.match(Namespace(), TokenKey(TOKENS))
    over = overlay(match, Stored(6, {entries: {2: (Tier.HOST, 1)}}))
    assert Residency(over).tier[index].tolist() == [0, 0, NOWHERE, 0, 0, 0]
    both = {entries: {2: (Tier.HOST, 1)}, index: {2: (Tier.HOST, 2)}}
    assert Residency(overlay(match, Stored(6, both))).tier[index].tolist()[2] == Tier.HOST
