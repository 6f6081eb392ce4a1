"""Recount everything a tree keeps by differences, from nothing.

Slow on purpose: every page is looked at, no total is trusted. An AssertionError names what does not
add up. With all live leases given, their locks are recounted as well.

This module changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from statewise.radix.lease import Lease, ranges_of
from statewise.radix.node import ABSENT, Checkpoint, Node, WindowPins
from statewise.radix.segment import BLOCK, NUM_ROWS, of_table
from statewise.radix.topology import Topology
from statewise.radix.trailing import Trailing

Int64 = NDArray[np.int64]


def audit(topology: Topology, trailing: Trailing, leases: Iterable[Lease] | None = None) -> None:
    """Check structure, protection, totals, orders and ownership."""
    nodes = [node for _, node in topology.nodes()]
    for node in nodes:
        _check_shape(topology, node)
        _check_segments(topology, node)
        _check_protection(topology, node)
    _check_orders(topology, trailing, nodes)
    _check_kept(trailing, nodes)
    _check_totals(topology, trailing, nodes)
    _check_ownership(topology, nodes)
    if leases is not None:
        _check_leases(trailing, nodes, [lease for lease in leases if not lease.released])


def _check_shape(topology: Topology, node: Node) -> None:
    page_bytes = topology.page_bytes
    if node.parent is None:
        assert topology.roots[node.key] is node, "a root is known by its namespace"
        assert node.start == node.end == 0, "a root has no pages"
    else:
        assert node.start == node.parent.end, "a node begins where its parent ends"
        assert len(node.key) == node.num_pages * page_bytes > 0, "the key covers the run"
        assert node.parent.children[node.key[:page_bytes]] is node, "a parent knows its child"
        assert node.num_pages <= topology.max_pages, "runs are bounded"
    for first, child in node.children.items():
        assert child.key[:page_bytes] == first, "a child is found by its first page"
    for (page, tail), checkpoint in node.checkpoints.items():
        assert checkpoint.node is node, "a checkpoint knows its node"
        assert (checkpoint.page, checkpoint.tail) == (page, tail), "and its place"
        inside = node.start < page <= node.end or (node.parent is None and page == 0)
        assert inside, "a checkpoint stands on its node"
        size = topology.schema.page_size
        assert checkpoint.position == page * size + len(tail) // 4, "positions are exact"


def _check_segments(topology: Topology, node: Node) -> None:
    assert len(node.segments) == topology.schema.num_groups, "one segment per group"
    for group, segment in enumerate(node.segments):
        pages = node.num_pages if group in topology.paged else 0
        assert segment.table.shape == (NUM_ROWS, pages), "a column per page"
        counted = of_table(segment.table, segment.aside)
        assert segment.num_present == counted.num_present, "present pages"
        assert segment.first == counted.first, "the first present page"
        if segment.num_present:
            assert segment.stamp == counted.stamp, "uniform stamp"
        for page in segment.aside.invalid or {}:
            assert 0 <= page < pages, "an invalid page lies inside"
    assert len(node.pins) == (len(topology.trailing.windows) if node.parent else 0), "pins"
    for pins in node.pins:
        assert pins.node is node, "pins know their node"
        locks, kept = _counts(pins)
        assert len(locks) == len(kept) == node.num_pages, "a count per page"
        assert (locks >= 0).all(), "locks are never negative"
        assert (kept >= 0).all(), "keeps are never negative"
        if not node.protect:
            assert not locks.any(), "locked pages lie on a protected path"


def _counts(pins: WindowPins) -> tuple[Int64, Int64]:
    """(locks, keeps) [num_pages] without what marks pages that are not on the device."""
    blocks = pins.node.segments[pins.group].table[BLOCK]
    absent = np.where(blocks < 0, ABSENT, 0)
    locks, needs = (np.array(row, dtype=np.int64) for row in pins.per_page())
    return locks - absent, needs - locks


def _check_protection(topology: Topology, node: Node) -> None:
    protected = sum(1 for child in node.children.values() if child.protect)
    assert node.locks >= 0, "locks are never negative"
    assert node.protect == node.locks + protected, "protect = locks + protected children"
    if node.parent is not None:
        assert (node in topology.recency) == (not node.protect), "unprotected nodes can be evicted"
    if not node.protect:
        assert not node.condemned, "condemned blocks wait only for leases"
        holds = any(s.num_present or s.aside.slow is not None for s in node.segments)
        assert node.children or node.checkpoints or holds, "a node holds something or leads on"
        for checkpoint in node.checkpoints.values():
            assert not checkpoint.locks, "leased checkpoints stand on protected nodes"


def _check_orders(topology: Topology, trailing: Trailing, nodes: list[Node]) -> None:
    place = {node: i for i, node in enumerate(topology.recency)}
    assert set(place) <= set(nodes), "no dead node in the order"
    for node in place:
        for child in node.children.values():
            assert place[child] < place[node], "a child goes before its parent"
    ticks = [node.tick for node in topology.recency]
    assert ticks == sorted(ticks), "oldest node first"
    bare = {node for node in place if not node.children}
    assert set(topology.leaves) == bare, "what can be evicted and has no children is a leaf"
    first = topology.leaves.first()
    found = None if first is None else topology.leaves.score_of(first)
    least = min((topology.leaves.score_of(node) for node in bare), default=None)
    assert found == least, "the least score is first"
    live = {c for node in nodes for c in node.checkpoints.values()}
    for group, order in enumerate(trailing.checkpoints):
        expected = {c for c in live if not c.locks and _has_stake(trailing, group, c)}
        assert set(order) == expected, "unlocked checkpoints are in their groups' orders"
        found = trailing.least_score(group)
        least = min((order.score_of(c) for c in order), default=None)
        assert found == least, "the least score is first"
    for index, segments in enumerate(trailing.transient):
        have = {node.pins[index] for node in nodes if node.pins and _transient(node.pins[index])}
        assert set(segments) == have, "segments with transient pages are in the order"


def _has_stake(trailing: Trailing, group: int, checkpoint: Checkpoint) -> bool:
    if checkpoint.block_of(group) is not None:
        return True
    if group not in trailing.windows:
        return False
    index = trailing.windows.index(group)
    ranges = trailing.window_ranges(index, checkpoint.position, checkpoint.page)
    return any(start < stop for start, stop in ranges)


def _transient(pins: WindowPins) -> int:
    present = pins.node.segments[pins.group].table[BLOCK] >= 0
    locks, kept = _counts(pins)
    count = int(np.count_nonzero(present & (locks == 0) & (kept == 0)))
    assert count == pins.num_transient, "transient pages"
    if count:
        start, stop = pins.first_transient(len(present))
        first = int(np.flatnonzero(present & (locks == 0) & (kept == 0))[0])
        assert start == first < stop, "the first of them is found"
    runs = list(zip(pins.locks, pins.needs, strict=True))
    assert all(a != b for a, b in pairwise(runs)), "runs next to each other differ"
    assert all(a < b for a, b in pairwise([0, *pins.ends])), "no run is empty"
    return count


def _check_kept(trailing: Trailing, nodes: list[Node]) -> None:
    expected = _no_counts(nodes)
    for node in nodes:
        for checkpoint in node.checkpoints.values():
            for index in range(len(trailing.windows)):
                ranges = trailing.window_ranges(index, checkpoint.position, checkpoint.page)
                for start, stop in ranges:
                    _count_up(node, index, start, stop, expected)
    for pins, kept in expected.items():
        assert np.array_equal(_counts(pins)[1], kept), "kept pages"


def _no_counts(nodes: list[Node]) -> dict[WindowPins, Int64]:
    return {pins: np.zeros(node.num_pages, np.int64) for node in nodes for pins in node.pins}


def _count_up(
    node: Node, index: int, start: int, stop: int, counts: dict[WindowPins, Int64]
) -> None:
    at: Node | None = node
    while at is not None:
        if at.pins:
            lo, hi = max(start, at.start) - at.start, min(stop, at.end) - at.start
            if lo < hi:
                counts[at.pins[index]][lo:hi] += 1
        at = at.parent


def _check_totals(topology: Topology, trailing: Trailing, nodes: list[Node]) -> None:
    expected = [0] * topology.schema.num_groups
    for node in nodes:
        for pins in node.pins:
            present = node.segments[pins.group].table[BLOCK] >= 0
            expected[pins.group] += int(np.count_nonzero(present & (_counts(pins)[0] == 0)))
        if not node.protect:
            for group in topology.history:
                expected[group] += node.segments[group].num_present
        for checkpoint in node.checkpoints.values():
            for held in checkpoint.blocks:
                expected[held.group] += not checkpoint.locks
    assert trailing.evictable == expected, f"evictable {trailing.evictable}, counted {expected}"


def _check_ownership(topology: Topology, nodes: list[Node]) -> None:
    for group in range(topology.schema.num_groups):
        owned: Counter[int] = Counter()
        for node in nodes:
            blocks = node.segments[group].table[BLOCK]
            owned.update(blocks[blocks >= 0].tolist())
            owned.update(c.block for c in node.condemned if c.group == group)
            for checkpoint in node.checkpoints.values():
                owned.update(b.block for b in checkpoint.blocks if b.group == group)
        twice = [block for block, times in owned.items() if times > 1]
        assert not twice, f"blocks {twice} of group {group} are in two places"


def _check_leases(trailing: Trailing, nodes: list[Node], leases: list[Lease]) -> None:
    anchors = Counter(lease.node for lease in leases)
    for node in nodes:
        assert node.locks == anchors[node], "locks are the leases anchored here"
    expected = _no_counts(nodes)
    for lease in leases:
        assert lease.node.end == lease.num_published_pages, "a lease is anchored where it ends"
        for index, pinned in enumerate(lease.pinned):
            for start, stop in ranges_of(pinned):
                _count_up(lease.node, index, start, stop, expected)
    for pins, locks in expected.items():
        assert np.array_equal(_counts(pins)[0], locks), "locked pages"
    for checkpoint in {c for node in nodes for c in node.checkpoints.values()}:
        holders = sum(1 for lease in leases if lease.checkpoint is checkpoint)
        assert checkpoint.locks == holders, "leases starting from a checkpoint"
