"""Trailing state: window pages, checkpoints, and what of it may be evicted next.

    window pages of one node    . . T T L L L K K T      L locked: a lease may still read it
                                                          K kept: part of a checkpoint
                                                          T transient: neither; evicted first
    then checkpoints, in the policy's order, each as a whole: its snapshots, its partly filled
    pages, and those of its window pages that nothing else needs.

Counts per page change only on the pages touched; totals follow by differences, and `audit`
recounts them from nothing.

This module does not shape the tree and does not touch history.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from statewise.radix.need import sink_pages, trailing_pages
from statewise.radix.node import (
    ABSENT,
    Checkpoint,
    Node,
    Ranges,
    StateBlock,
    WindowPins,
    num_pages_of,
)
from statewise.radix.order import ScoreOrder
from statewise.radix.policy import EvictionPolicy
from statewise.radix.results import FreedBuilder
from statewise.radix.schema import CacheSchema
from statewise.radix.segment import BLOCK


class Trailing:
    """Windows and checkpoints of one tree."""

    def __init__(self, schema: CacheSchema, policy: EvictionPolicy) -> None:
        groups = schema.groups
        self.schema = schema
        self.policy = policy
        self.evictable = [0] * len(groups)  # device blocks that eviction could free, per group
        self.windows = tuple(g for g, s in enumerate(groups) if s.kind.is_window)
        self.transient: tuple[OrderedDict[WindowPins, None], ...] = tuple(
            OrderedDict() for _ in self.windows
        )
        self.checkpoints: tuple[ScoreOrder[Checkpoint], ...] = tuple(ScoreOrder() for _ in groups)
        self.tick = 0
        self.on_emptied: Callable[[Node], None] = lambda node: None

    def next_tick(self) -> int:
        """Advance logical time."""
        self.tick += 1
        return self.tick

    # ---------------------------------------------------------------- window pages

    def _shift(self, index: int, pins: WindowPins, delta: int, *, oldest: bool = False) -> None:
        """Change a segment's transient pages; gained ones make it the newest (or the oldest)."""
        pins.num_transient += delta
        order = self.transient[index]
        if not pins.num_transient:
            order.pop(pins, None)
        elif delta > 0:
            order[pins] = None
            order.move_to_end(pins, last=not oldest)

    def pages_added(self, node: Node) -> None:
        """Count pages that `node` has grown by: present ones are transient."""
        for index, pins in enumerate(node.pins):
            present = pins.grow()
            if present:
                self.evictable[pins.group] += present
                self._shift(index, pins, present)

    def pages_removed(self, node: Node, k: int) -> None:
        """Discount the pages of `node` from its k-th on; call before they go."""
        for index, pins in enumerate(node.pins):
            self._count(index, pins, k, -1)

    def pages_changed(self, pins: WindowPins, *, before: bool) -> None:
        """Call before and after one segment is replaced."""
        if not before:
            pins.follow()
        self._count(self.windows.index(pins.group), pins, 0, -1 if before else +1)

    def _count(self, index: int, pins: WindowPins, k: int, sign: int) -> None:
        evictable, transient = pins.tally(k)
        self.evictable[pins.group] += sign * evictable
        if transient:
            self._shift(index, pins, sign * transient)

    def after_split(self, upper: Node, lower: Node) -> None:
        """Give the new upper part its share of transient pages, as the oldest ones.

        Nothing in it was asked for: whoever splits locks what it needs right after.
        """
        for index, (above, below) in enumerate(zip(upper.pins, lower.pins, strict=True)):
            transient = above.tally(0)[1]
            if transient:
                self._shift(index, above, transient, oldest=True)
                self._shift(index, below, -transient)

    def lock(self, node: Node, index: int, start: int, stop: int, delta: int = 1) -> None:
        """`delta` leases more need absolute pages [start, stop) at or above `node`.

        Pages that none needs any more become the newest.
        """
        while stop > start:
            while node.start >= stop:
                assert node.parent is not None, "pages lie on the path"
                node = node.parent
            pins, at = node.pins[index], node.start
            evictable, transient = pins.add(max(start - at, 0), stop - at, delta, delta)
            self.evictable[pins.group] += evictable
            if transient:
                self._shift(index, pins, transient)
            stop = at

    def _keep(self, node: Node, index: int, start: int, stop: int, delta: int) -> None:
        """Count a checkpoint more or fewer on absolute pages [start, stop)."""
        while stop > start:
            while node.start >= stop:
                assert node.parent is not None, "pages lie on the path"
                node = node.parent
            pins, at = node.pins[index], node.start
            transient = pins.add(max(start - at, 0), stop - at, 0, delta)[1]
            if transient:
                self._shift(index, pins, transient, oldest=True)
            stop = at

    def has_pages(self, node: Node, index: int, ranges: Ranges, stamp: int) -> bool:
        """Whether all absolute pages of `ranges` at or above `node` are resident."""
        group = self.windows[index]
        for start, stop in ranges:
            while stop > start:
                while node.start >= stop:
                    assert node.parent is not None, "pages lie on the path"
                    node = node.parent
                if not node.segments[group].holds(
                    max(start - node.start, 0), stop - node.start, stamp
                ):
                    return False
                stop = node.start
        return True

    # ---------------------------------------------------------------- checkpoints

    def window_ranges(self, index: int, position: int, page: int) -> Ranges:
        """Ranges of whole pages that a resume at `position` needs, the later range first."""
        spec = self.schema.groups[self.windows[index]]
        size = self.schema.page_size
        lo = min(trailing_pages(spec, position, size)[0], page)
        if not spec.sinks:
            return ((lo, page),)
        sinks = min(sink_pages(spec, position, size), lo)
        return ((lo, page), (0, sinks)) if sinks else ((lo, page),)

    def kept_at(self, position: int, page: int) -> tuple[Ranges, ...]:
        """`window_ranges` of every window group."""
        return tuple([self.window_ranges(i, position, page) for i in range(len(self.windows))])

    def add_checkpoint(
        self,
        node: Node,
        page: int,
        tail: bytes,
        position: int,
        reason: str,
        kept: tuple[Ranges, ...] | None = None,
    ) -> Checkpoint:
        """Find or make the checkpoint at `position`; its window pages are kept from now on.

        `kept`: `kept_at` the position, where the caller knows it.
        """
        place = (page, tail)
        found = node.checkpoints.get(place)
        if found is not None:
            self.touch(found)
            return found
        made = Checkpoint(node, page, tail, position, reason)
        made.saved = page - self._previous(node, page)
        node.checkpoints[place] = made
        made.tick = self.next_tick()
        made.kept = self.kept_at(position, page) if kept is None else kept
        made.num_kept = num_pages_of(made.kept)
        for index, ranges in enumerate(made.kept):
            for start, stop in ranges:
                self._keep(node, index, start, stop, +1)
        self._rank(made)
        return made

    @staticmethod
    def _previous(node: Node, page: int) -> int:
        """Page of the deepest checkpoint above boundary `page`, 0 without one."""
        at: Node | None = node
        while at is not None:
            if at.checkpoints:
                above = [place[0] for place in at.checkpoints if place[0] < page]
                if above:
                    return max(above)
            at = at.parent
        return 0

    def num_blocks(self, checkpoint: Checkpoint, group: int) -> int:
        """Blocks of `group` that the checkpoint holds: its own, and window pages it keeps."""
        count = checkpoint.block_of(group) is not None
        if group in self.windows:
            return count + checkpoint.num_kept[self.windows.index(group)]
        return int(count)

    def _rank(self, checkpoint: Checkpoint) -> None:
        """Put an unlocked checkpoint in its place in the order of every group it holds state of."""
        if not checkpoint.blocks:  # window pages alone
            for group, num_pages in zip(self.windows, checkpoint.num_kept, strict=True):
                if num_pages:
                    score = self.policy.checkpoint_score(checkpoint, num_pages)
                    self.checkpoints[group].put(checkpoint, score)
            return
        for group in {*self.windows, *(held.group for held in checkpoint.blocks)}:
            num_blocks = self.num_blocks(checkpoint, group)
            if num_blocks:
                score = self.policy.checkpoint_score(checkpoint, num_blocks)
                self.checkpoints[group].put(checkpoint, score)

    def add_block(self, checkpoint: Checkpoint, held: StateBlock) -> bool:
        """Give the checkpoint a block; False if it has one for this group already."""
        if checkpoint.block_of(held.group) is not None:
            return False
        checkpoint.blocks = (*checkpoint.blocks, held)
        if not checkpoint.locks:
            self.evictable[held.group] += 1
            self._rank(checkpoint)
        return True

    def take_block(self, checkpoint: Checkpoint, group: int) -> int | None:
        """Take a block out of a checkpoint; the caller frees or condemns it."""
        held = checkpoint.block_of(group)
        if held is None:
            return None
        checkpoint.blocks = tuple(b for b in checkpoint.blocks if b.group != group)
        if not checkpoint.locks:
            self.evictable[group] -= 1
        if not self.num_blocks(checkpoint, group):
            self.checkpoints[group].discard(checkpoint)
        return held.block

    def touch(self, checkpoint: Checkpoint) -> None:
        """Make it the most recently used."""
        checkpoint.tick = self.next_tick()
        if not checkpoint.locks:
            self._rank(checkpoint)

    def lock_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Take it out of the eviction order: a lease starts from it."""
        checkpoint.locks += 1
        checkpoint.uses += 1
        if checkpoint.locks > 1:
            return
        for order in self.checkpoints:
            order.discard(checkpoint)
        for held in checkpoint.blocks:
            self.evictable[held.group] -= 1

    def unlock_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Back into the eviction order, used just now."""
        checkpoint.locks -= 1
        if checkpoint.locks or checkpoint.node is None:
            return
        checkpoint.tick = self.next_tick()
        for held in checkpoint.blocks:
            self.evictable[held.group] += 1
        self._rank(checkpoint)

    def remove_checkpoint(self, checkpoint: Checkpoint, freed: FreedBuilder) -> None:
        """Forget an unlocked checkpoint: its blocks are freed, its pages kept no longer."""
        node = checkpoint.node
        assert node is not None, "removed once"
        assert not checkpoint.locks, "a leased checkpoint stays"
        del node.checkpoints[checkpoint.page, checkpoint.tail]
        checkpoint.node = None
        for order in self.checkpoints:
            order.discard(checkpoint)
        for held in checkpoint.blocks:
            self.evictable[held.group] -= 1
            freed.add_one(held.group, held.block)
        for index, ranges in enumerate(checkpoint.kept):
            for start, stop in ranges:
                self._keep(node, index, start, stop, -1)

    # ---------------------------------------------------------------- evicting

    def _take_pages(self, index: int, pins: WindowPins, limit: int, freed: FreedBuilder) -> None:
        """Free transient pages of one segment; the history of the same tokens stays."""
        node, group = pins.node, pins.group
        start, stop = pins.first_transient(limit)
        segment = node.segments[group]
        freed.add(group, segment.table[BLOCK, start:stop])
        segments = list(node.segments)
        segments[group] = segment.without_run(start, stop)
        node.segments = tuple(segments)
        pins.add(start, stop, ABSENT, ABSENT)
        self.evictable[group] -= stop - start
        self._shift(index, pins, start - stop)

    def evict_window(self, group: int, num_blocks: int, freed: FreedBuilder) -> None:
        """Free window pages: transient ones, then those of the checkpoints that go first."""
        index = self.windows.index(group)
        order, retained = self.transient[index], self.checkpoints[group]
        while (wanted := num_blocks - freed.counts[group]) > 0:
            if order:
                pins = next(iter(order))
                self._take_pages(index, pins, wanted, freed)
                if not pins.num_transient:
                    self.on_emptied(pins.node)
            elif retained:
                self._remove_first(group, freed)
            else:
                return

    def evict_snapshots(self, group: int, num_blocks: int, freed: FreedBuilder) -> None:
        """Free snapshots of the checkpoints that go first."""
        order = self.checkpoints[group]
        while freed.counts[group] < num_blocks and order:
            self._remove_first(group, freed)

    def _remove_first(self, group: int, freed: FreedBuilder) -> None:
        checkpoint = self.checkpoints[group].first()
        assert checkpoint is not None, "asked of an order that holds something"
        node = checkpoint.node
        assert node is not None, "the order holds live checkpoints"
        self.remove_checkpoint(checkpoint, freed)
        self.on_emptied(node)

    def least_score(self, group: int) -> float | None:
        """Score of the checkpoint that would go next, None without one."""
        order = self.checkpoints[group]
        first = order.first()
        return None if first is None else order.score_of(first)
