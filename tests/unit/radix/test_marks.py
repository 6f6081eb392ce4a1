"""Layers marked invalid, and checksums that travel with pages."""

from __future__ import annotations

import numpy as np

from statewise.radix import (
    CacheSchema,
    GroupKind,
    Match,
    Namespace,
    RadixTree,
    StateGroupSpec,
    TokenKey,
    Written,
    rows,
)
from statewise.radix.lease import Lease

PAGE = 4
NS = Namespace()
SCHEMA = CacheSchema(
    PAGE,
    3,
    (
        StateGroupSpec("full", GroupKind.FULL, (0, 2), "l", "v", entry_bytes=8),
        StateGroupSpec("window", GroupKind.WINDOW, (1,), "l", "v", entry_bytes=8, window=6),
    ),
    "fingerprint",
)
SUMS = tuple(
    np.arange(1, 64 * n + 1, dtype=np.uint64).reshape(64, n) for n in (2, 1)
)  # [block, layer]
TOKENS = np.arange(100, 140, dtype=np.int32)


def written(seq: int = 1, *, sums: bool = True) -> Written:
    return Written((0, 0), seq, None, SUMS if sums else None)


def publish(tree: RadixTree, pages: int, first_block: int, **how: object) -> Lease:
    lease = tree.lease(tree.match(NS, TokenKey(TOKENS[:0])), 0)
    table = np.arange(first_block, first_block + pages, dtype=np.int32)
    key = TokenKey(TOKENS[: pages * PAGE])
    made = written(**how)  # type: ignore[arg-type]
    tree.publish(lease, key, pages, [table, table], made, pages * PAGE)
    return lease


def match(tree: RadixTree, pages: int) -> Match:
    return tree.match(NS, TokenKey(TOKENS[: pages * PAGE]))


def test_sums_are_recorded_with_their_pages() -> None:
    tree = RadixTree(SCHEMA)
    publish(tree, 6, 10)
    found = rows.checksums(match(tree, 5), 0)
    assert found is not None
    assert (found == SUMS[0][10:15]).all()
    other = rows.checksums(match(tree, 5), 1)
    assert other is not None
    assert other.tolist() == SUMS[1][10:15].tolist()


def test_without_sums_nothing_is_recorded() -> None:
    tree = RadixTree(SCHEMA)
    publish(tree, 6, 10, sums=False)
    assert rows.checksums(match(tree, 6), 0) is None


def test_sums_follow_a_split_and_a_refill() -> None:
    tree = RadixTree(SCHEMA)
    tree.release(publish(tree, 6, 10))
    tree.release(tree.lease(match(tree, 3), 3 * PAGE, repairing=(1,)))  # splits the node
    tree.drop(match(tree, 6), 0, [1])
    publish(tree, 6, 30, seq=2)
    found = rows.checksums(match(tree, 6), 0)
    assert found is not None
    assert found.tolist() == SUMS[0][[10, 31, 12, 13, 14, 15]].tolist()
    tree.audit()


def test_a_marked_page_is_not_usable_and_keeps_its_block() -> None:
    tree = RadixTree(SCHEMA)
    tree.release(publish(tree, 6, 10))
    before = match(tree, 6)
    evictable = tree.evictable(0)
    tree.mark_invalid(before, 0, {2: 0b10})
    tree.mark_invalid(before, 0, {2: 0b01, 4: 0b01})
    after = match(tree, 6)
    assert after.resident(0).tolist() == [True, True, False, True, False, True]
    assert after.invalid_layers(0) == {2: 0b11, 4: 0b01}
    assert after.blocks(0).tolist() == before.blocks(0).tolist()
    assert after.history_pages == 2
    assert tree.evictable(0) == evictable
    assert after.version > before.version
    tree.audit()


def test_a_mark_does_not_hit_what_replaced_the_page() -> None:
    """A late verdict about a block that is gone must not condemn its successor."""
    tree = RadixTree(SCHEMA)
    tree.release(publish(tree, 6, 10))
    old = match(tree, 6)
    tree.drop(old, 0, [2])
    tree.release(publish(tree, 6, 30, seq=2))
    tree.mark_invalid(old, 0, {2: 1, 3: 1})
    assert match(tree, 6).invalid_layers(0) == {3: 1}


def test_a_rebuilt_page_is_valid_again() -> None:
    tree = RadixTree(SCHEMA)
    tree.release(publish(tree, 6, 10))
    tree.mark_invalid(match(tree, 6), 0, {2: 0b10})
    lease = tree.lease(match(tree, 6), 6 * PAGE, repairing=(0,))
    table = np.full(6, -1, dtype=np.int32)
    table[2] = 50
    none = np.full(6, -1, dtype=np.int32)
    done = tree.restore(lease, 2, 3, [table, none], written(3))
    assert done.freed.blocks[0].tolist() == [12]
    tree.release(lease)
    found = match(tree, 6)
    assert found.is_direct
    assert found.invalid_layers(0) == {}
    sums = rows.checksums(found, 0)
    assert sums is not None
    assert sums[2].tolist() == SUMS[0][50].tolist()
    tree.audit()


def test_what_a_match_relies_on_is_not_to_spare() -> None:
    tree = RadixTree(SCHEMA)
    tree.release(publish(tree, 6, 10))
    other = TOKENS + 1
    lease = tree.lease(tree.match(NS, TokenKey(other[:0])), 0)
    table = np.arange(40, 43, dtype=np.int32)
    tree.publish(lease, TokenKey(other[:12]), 3, [table, table], written(), 12)
    tree.release(lease)
    assert tree.evictable(0) == 9
    assert tree.evictable_beside(match(tree, 4))[0] == 5
    assert tree.evictable_beside(match(tree, 6))[0] == 3
    held = tree.lease(match(tree, 6), 6 * PAGE)
    assert tree.evictable_beside(match(tree, 6))[0] == tree.evictable(0) == 3
    tree.release(held)
