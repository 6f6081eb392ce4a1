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

from statewise.radix.segment import BLOCK, Segment

ABSENT = 1 << 40  # counted on pages that are not on the device
Ranges = tuple[tuple[int, int], ...]  # half-open, absolute pages


class WindowPins:
    """Who needs the pages of one window segment: counts per page, changed in place.

    A page that no lease locks can be evicted; one that no checkpoint keeps either is *transient*
    and goes first. A page that is not on the device counts ABSENT more in both rows, so that what
    can go is what counts 0. Rows are lists: windows are short, and array operations on a few pages
    would cost ten times as much.
    """

    __slots__ = ("group", "locks", "needs", "node", "num_transient")

    def __init__(self, node: Node, group: int, locks: list[int], needs: list[int]) -> None:
        self.node = node
        self.group = group
        self.locks = locks  # per page: leases that may still read it
        self.needs = needs  # per page: these, and checkpoints that include it
        self.num_transient = 0

    def tally(self, start: int, stop: int) -> tuple[int, int]:
        """(evictable, transient) pages of the node's pages [start, stop)."""
        return self.locks[start:stop].count(0), self.needs[start:stop].count(0)

    def lock(self, start: int, stop: int, delta: int) -> None:
        """Count `delta` leases more on the node's pages [start, stop)."""
        self.locks[start:stop] = [count + delta for count in self.locks[start:stop]]
        self.needs[start:stop] = [count + delta for count in self.needs[start:stop]]

    def keep(self, start: int, stop: int, delta: int) -> None:
        """Count `delta` checkpoints more on the node's pages [start, stop)."""
        self.needs[start:stop] = [count + delta for count in self.needs[start:stop]]

    def transient_pages(self, limit: int) -> list[int]:
        """The first `limit` pages of the node that can be evicted first, in order."""
        found: list[int] = []
        at = -1
        for _ in range(min(limit, self.num_transient)):
            at = self.needs.index(0, at + 1)
            found.append(at)
        return found

    def take(self, pages: list[int]) -> None:
        """Note that transient `pages` have left the device."""
        for page in pages:
            self.locks[page] = self.needs[page] = ABSENT

    def follow(self) -> None:
        """Note which pages are on the device after the segment was replaced."""
        blocks = self.node.segments[self.group].table[BLOCK].tolist()
        for page, block in enumerate(blocks):
            was_absent = self.locks[page] >= ABSENT
            if was_absent != (block < 0):
                change = ABSENT if block < 0 else -ABSENT
                self.locks[page] += change
                self.needs[page] += change

    def is_kept(self) -> list[bool]:
        """[num_pages] whether a checkpoint includes the page."""
        return [need > lock for need, lock in zip(self.needs, self.locks, strict=True)]


def nobody(segment: Segment, start: int) -> list[int]:
    """Counts of a segment's pages from `start` on that neither lease nor checkpoint needs."""
    size = segment.num_pages - start
    if segment.num_present == segment.num_pages:
        return [0] * size
    return [0 if block >= 0 else ABSENT for block in segment.table[BLOCK, start:].tolist()]


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
        self.pins = tuple(
            WindowPins(self, g, nobody(self.segments[g], 0), nobody(self.segments[g], 0))
            for g in groups
        )

    def grow_pins(self) -> None:
        """Follow an extension of the run: new pages are neither locked nor kept."""
        for pins in self.pins:
            more = nobody(self.segments[pins.group], len(pins.locks))
            pins.locks += more
            pins.needs += more

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
        upper.pins = tuple(WindowPins(upper, p.group, p.locks[:k], p.needs[:k]) for p in self.pins)
        for place in [place for place in self.checkpoints if place[0] <= page]:
            moved = upper.checkpoints[place] = self.checkpoints.pop(place)
            moved.node = upper
        for pins in self.pins:
            del pins.locks[:k], pins.needs[:k]
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
            del pins.locks[k:], pins.needs[k:]
