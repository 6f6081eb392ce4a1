"""Nodes of the tree and what hangs on them.

A node owns a run of whole pages [start, end), counted from the beginning of the sequence; the
run's length is bounded, so that splitting or extending a node costs the same however long the
prefix is.

    split at page s:      parent                 parent
                            |                      |
                        [start, end)           [start, s)   new object
                                                   |
                                                [s, end)    the old object

The old object becomes the lower part: whoever is anchored at it still stands at the end of the
same tokens, and finds any page above by walking up until `start` is small enough.

This module does not keep totals, recency or namespaces: `RadixTree` and its parts do.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from statewise.radix.segment import BLOCK, Segment

Int32 = NDArray[np.int32]
Intp = NDArray[np.intp]
FEW = 16  # pages that are counted one by one
Ranges = tuple[tuple[int, int], ...]  # half-open, absolute pages


class WindowPins:
    """Who needs the pages of one window segment: counts per page, changed in place.

    A page that no lease locks can be evicted; one that no checkpoint keeps either is *transient*
    and goes first.
    """

    __slots__ = ("group", "kept", "locks", "node", "num_transient")

    def __init__(self, node: Node, group: int, locks: Int32, kept: Int32) -> None:
        self.node = node
        self.group = group
        self.locks = locks  # [num_pages] leases that may still read the page
        self.kept = kept  # [num_pages] checkpoints that include the page
        self.num_transient = 0

    def present(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Pages [start, stop) of the node that are on the device."""
        return self.node.segments[self.group].table[BLOCK, start:stop] >= 0

    def tally(self, start: int, stop: int) -> tuple[int, int]:
        """(evictable, transient) pages of the node's pages [start, stop)."""
        locks = self.locks[start:stop]
        kept = self.kept[start:stop]
        segment = self.node.segments[self.group]
        if len(locks) <= FEW:
            return _count(locks, kept, segment.table[BLOCK, start:stop])
        if segment.num_present == segment.table.shape[1]:  # no page to leave out
            num = len(locks)
            locked = int(np.count_nonzero(locks))
            return num - locked, num - int(np.count_nonzero(locks | kept))
        if not segment.num_present:
            return 0, 0
        free = self.present(start, stop) & (locks == 0)
        transient = free & (kept == 0)
        return int(np.count_nonzero(free)), int(np.count_nonzero(transient))

    def transient_pages(self) -> Intp:
        """Pages of the node that can be evicted first, in order."""
        free = self.present(0, len(self.locks)) & (self.locks == 0) & (self.kept == 0)
        return np.flatnonzero(free)


def _count(locks: Int32, kept: Int32, blocks: Int32) -> tuple[int, int]:
    """What `tally` says, without array operations: for few pages they would be most of its cost."""
    evictable = transient = 0
    for block, lock, keep in zip(blocks.tolist(), locks.tolist(), kept.tolist(), strict=True):
        if block >= 0 and not lock:
            evictable += 1
            transient += not keep
    return evictable, transient


class StateBlock(NamedTuple):
    """One block that belongs to exactly one position: a snapshot, or a partly filled page."""

    group: int
    block: int
    generation: int
    stamp: int
    seq: int
    checksums: tuple[int, ...] = ()  # per layer of the group; empty where none are kept


class Checkpoint:
    """Trailing state of all groups at one position; lives and dies as one.

    It keeps the window pages that a resume at the position needs, and owns the blocks that belong
    to this position alone. `tail` holds the tokens past the page boundary (empty when aligned).
    """

    __slots__ = (
        "blocks",
        "locks",
        "node",
        "page",
        "position",
        "ranges",
        "reason",
        "saved",
        "tail",
        "tick",
        "uses",
    )

    def __init__(self, node: Node, page: int, tail: bytes, position: int, reason: str) -> None:
        self.node: Node | None = node  # None once removed
        self.page = page  # whole pages below the position
        self.tail = tail
        self.position = position
        self.reason = reason
        self.blocks: tuple[StateBlock, ...] = ()
        self.locks = 0
        self.tick = 0
        self.ranges: tuple[Ranges, ...] = ()  # per window group the pages it keeps
        self.saved = 0  # pages since the checkpoint before it on the path
        self.uses = 0  # leases that started from it

    def block_of(self, group: int) -> StateBlock | None:
        """Find the block of `group` at this position."""
        for held in self.blocks:
            if held.group == group:
                return held
        return None


class Condemned(NamedTuple):
    """A block that left the tree while a lease may still read it."""

    group: int
    block: int


class Node:
    """A run of whole pages: token ids, one segment per group, children by their first page."""

    __slots__ = (
        "checkpoints",
        "children",
        "clean",
        "condemned",
        "end",
        "hits",
        "key",
        "locks",
        "parent",
        "pins",
        "protect",
        "segments",
        "start",
        "tick",
    )

    def __init__(
        self, parent: Node | None, key: bytes, start: int, end: int, segments: tuple[Segment, ...]
    ) -> None:
        self.parent = parent
        self.key = key  # int32 token ids of the run
        self.start = start
        self.end = end
        self.children: dict[bytes, Node] = {}
        self.segments = segments  # replaced, never changed
        self.clean: tuple[int, ...] | None = None  # stamps of history groups if all are whole
        self.pins: tuple[WindowPins, ...] = ()  # one per window group
        self.checkpoints: dict[tuple[int, bytes], Checkpoint] = {}
        self.locks = 0  # leases anchored here
        self.protect = 0  # locks + children with protect > 0
        self.hits = 0  # times it was leased anew
        self.tick = 0  # logical time of last use
        self.condemned: list[Condemned] = []

    @property
    def num_pages(self) -> int:
        """Pages of the run."""
        return self.end - self.start

    def new_pins(self, groups: tuple[int, ...]) -> None:
        """Start with no page locked or kept."""
        size = self.end - self.start
        self.pins = tuple(
            WindowPins(self, g, np.zeros(size, np.int32), np.zeros(size, np.int32)) for g in groups
        )

    def grow_pins(self) -> None:
        """Follow an extension of the run: new pages are neither locked nor kept."""
        for pins in self.pins:
            more = np.zeros(self.end - self.start - len(pins.locks), np.int32)
            pins.locks = np.concatenate((pins.locks, more))
            pins.kept = np.concatenate((pins.kept, more))

    def split(self, page: int, page_bytes: int) -> Node:
        """Cut at absolute `page`; return the new upper part, this object keeps the lower one."""
        k = page - self.start
        assert 0 < k < self.end - self.start, "a split leaves pages on both sides"
        parent = self.parent
        assert parent is not None, "a root has no pages"
        upper_segments = tuple(s.part(0, k) for s in self.segments)
        upper = Node(parent, self.key[: k * page_bytes], self.start, page, upper_segments)
        upper.hits = self.hits
        upper.tick = self.tick
        upper.clean = self.clean
        upper.protect = 1 if self.protect else 0
        upper.pins = tuple(WindowPins(upper, p.group, p.locks[:k], p.kept[:k]) for p in self.pins)
        for place in [place for place in self.checkpoints if place[0] <= page]:
            moved = upper.checkpoints[place] = self.checkpoints.pop(place)
            moved.node = upper
        for pins in self.pins:
            pins.locks = pins.locks[k:]
            pins.kept = pins.kept[k:]
        size = self.end - self.start
        self.segments = tuple(s.part(k, size) for s in self.segments)
        self.key = self.key[k * page_bytes :]
        self.start = page
        self.parent = upper
        parent.children[upper.key[:page_bytes]] = upper
        upper.children[self.key[:page_bytes]] = self
        return upper

    def trim(self, page: int, page_bytes: int) -> None:
        """Forget the pages from absolute `page` on; the caller has taken their blocks."""
        k = page - self.start
        self.segments = tuple(s.part(0, k) for s in self.segments)
        self.key = self.key[: k * page_bytes]
        self.end = page
        for pins in self.pins:
            pins.locks = pins.locks[:k]
            pins.kept = pins.kept[:k]
