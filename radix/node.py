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

from bisect import bisect_right
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from statewise.radix.segment import BLOCK, Segment

ABSENT = 1 << 40  # counted on pages that are not on the device
Ranges = tuple[tuple[int, int], ...]  # half-open, absolute pages


class WindowPins:
    """Who needs the pages of one window segment: counts per run of pages, changed in place.

        pages    0 ........ 29 | 30 31 32 | 33        ends     30       33   34
        leases     not on      |  1  1  1 |  0        locks    ABSENT   1    0
        and checkpoints device |  2  2  2 |  0        needs    ABSENT   2    0

    A page that no lease locks can be evicted; one that no checkpoint keeps either is *transient*
    and goes first. A page that is not on the device counts ABSENT more in both rows, so that what
    can go is what counts 0. Runs next to each other differ: leases and checkpoints come as ranges,
    so a window of 128 pages costs what one of 2 does.
    """

    __slots__ = ("ends", "group", "locks", "needs", "node", "num_transient")

    def __init__(self, node: Node, group: int) -> None:
        self.node = node
        self.group = group
        self.ends: list[int] = []  # per run: the page after its last
        self.locks: list[int] = []  # leases that may still read its pages
        self.needs: list[int] = []  # these, and checkpoints that include them
        self.num_transient = 0

    def add(self, start: int, stop: int, locks: int, needs: int) -> tuple[int, int]:
        """Count so many more on the node's pages [start, stop), of which there is one or more.

        Returns how many (evictable, transient) pages that makes more, or fewer.
        """
        first, end = self._cut(start), self._cut(stop)
        all_locks, all_needs = self.locks, self.needs
        evictable = transient = 0
        at = start
        for run in range(first, end):
            size = self.ends[run] - at
            at += size
            if locks:
                old = all_locks[run]
                all_locks[run] = new = old + locks
                if not old:
                    evictable -= size
                elif not new:
                    evictable += size
            old = all_needs[run]
            all_needs[run] = new = old + needs
            if not old:
                transient -= size
            elif not new:
                transient += size
        if end < len(all_locks):
            self._unite(end)
        if first:
            self._unite(first)
        return evictable, transient

    def _cut(self, page: int) -> int:
        """Find the run that begins at `page`, made by a cut if need be."""
        if not page:
            return 0
        ends = self.ends
        run = bisect_right(ends, page)
        if run and page == ends[run - 1]:
            return run
        ends.insert(run, page)
        self.locks.insert(run, self.locks[run])
        self.needs.insert(run, self.needs[run])
        return run + 1

    def _unite(self, run: int) -> None:
        """Make one run of `run` and the one before it where they count the same."""
        locks, needs = self.locks, self.needs
        if needs[run] == needs[run - 1] and locks[run] == locks[run - 1]:
            del self.ends[run - 1], locks[run], needs[run]

    def _append(self, end: int, count: int) -> None:
        if self.ends and self.locks[-1] == count and self.needs[-1] == count:
            self.ends[-1] = end
        else:
            self.ends.append(end)
            self.locks.append(count)
            self.needs.append(count)

    def grow(self) -> int:
        """Follow an extension of the run by pages that nobody needs; how many are present."""
        segment = self.node.segments[self.group]
        start, size = self.ends[-1] if self.ends else 0, segment.num_pages
        present, first = segment.present_in(start, size)
        if present == size - start - first:
            if first:
                self._append(start + first, ABSENT)
            if present:
                self._append(size, 0)
        else:
            for page, block in enumerate(segment.table[BLOCK, start:].tolist(), start):
                self._append(page + 1, 0 if block >= 0 else ABSENT)
        return present

    def tally(self, start: int) -> tuple[int, int]:
        """(evictable, transient) pages of the node from its page `start` on."""
        evictable = transient = at = 0
        for end, locks, needs in zip(self.ends, self.locks, self.needs, strict=True):
            if end > start and not locks:
                size = end - max(at, start)
                evictable += size
                transient += 0 if needs else size
            at = end
        return evictable, transient

    def first_transient(self, limit: int) -> tuple[int, int]:
        """First pages [start, stop) of the node that can be evicted first, at most `limit`."""
        run = self.needs.index(0)
        start = self.ends[run - 1] if run else 0
        return start, min(self.ends[run], start + limit)

    def split(self, upper: Node, k: int) -> WindowPins:
        """Give the first `k` pages to the node above."""
        above = WindowPins(upper, self.group)
        run = self._cut(k)
        above.ends, above.locks, above.needs = self.ends[:run], self.locks[:run], self.needs[:run]
        self.ends = [end - k for end in self.ends[run:]]
        del self.locks[:run], self.needs[:run]
        return above

    def trim(self, k: int) -> None:
        """Forget the pages from the k-th on."""
        run = self._cut(k)
        del self.ends[run:], self.locks[run:], self.needs[run:]

    def per_page(self) -> tuple[list[int], list[int]]:
        """(locks, needs) [num_pages]."""
        locks: list[int] = []
        needs: list[int] = []
        for run, end in enumerate(self.ends):
            size = end - len(locks)
            locks += [self.locks[run]] * size
            needs += [self.needs[run]] * size
        return locks, needs

    def follow(self) -> None:
        """Note which pages are on the device after the segment was replaced."""
        before = np.array(self.per_page()[0], dtype=np.int64) < ABSENT
        present = self.node.segments[self.group].table[BLOCK] >= 0
        gone = before.astype(np.int8) - present.astype(np.int8)  # -1 where a page came
        begins = np.flatnonzero(np.diff(gone, prepend=0, append=0)).tolist()
        for start, stop in pairwise(begins):
            change = int(gone[start]) * ABSENT
            if change:
                self.add(start, stop, change, change)

    def is_kept(self) -> list[bool]:
        """[num_pages] whether a checkpoint includes the page."""
        locks, needs = self.per_page()
        return [need > lock for need, lock in zip(needs, locks, strict=True)]


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
        "kept",
        "locks",
        "node",
        "num_kept",
        "page",
        "position",
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
        self.kept: tuple[Ranges, ...] = ()  # per window group the pages it keeps
        self.num_kept: list[int] = []  # how many
        self.saved = 0  # pages since the checkpoint before it on the path
        self.uses = 0  # leases that started from it

    def block_of(self, group: int) -> StateBlock | None:
        """Find the block of `group` at this position."""
        for held in self.blocks:
            if held.group == group:
                return held
        return None


def num_pages_of(kept: tuple[Ranges, ...]) -> list[int]:
    """Per window group how many pages its ranges have."""
    return [sum([stop - start for start, stop in ranges]) for ranges in kept]


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
        upper.pins = tuple([pins.split(upper, k) for pins in self.pins])
        for place in [place for place in self.checkpoints if place[0] <= page]:
            moved = upper.checkpoints[place] = self.checkpoints.pop(place)
            moved.node = upper
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
            pins.trim(k)
