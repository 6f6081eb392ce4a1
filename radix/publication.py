"""Taking pages over: what the tree has stays, what it lacks is filled, the rest grows a leaf.

    own pages        a   b   c   d   e | f   g
    tree's path      A   B   .   D'    |              . absent    ' other stamp, or invalid
    result           A   B   c   d   e | f   g        duplicates a, b; freed D' (or when unleased)

This module does not move leases' windows and does not evict.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from statewise.radix.forms import Cause, Ledger
from statewise.radix.key import TokenKey, common_tokens
from statewise.radix.lease import Lease
from statewise.radix.match import Match
from statewise.radix.node import Node
from statewise.radix.results import Duplicates, FreedBuilder, Written
from statewise.radix.segment import (
    BLOCK,
    DEPENDENCY,
    GENERATION,
    MIXED,
    NOTHING_ASIDE,
    SEQ,
    SEQ_MASK,
    PageAside,
    Segment,
    new_columns,
    presence,
)
from statewise.radix.topology import NO_PAGES, Topology
from statewise.radix.trailing import Trailing

Int32 = NDArray[np.int32]
Intp = NDArray[np.intp]
Bool = NDArray[np.bool_]


class Publisher:
    """Writes segments into the tree."""

    def __init__(self, topology: Topology, trailing: Trailing, ledger: Ledger) -> None:
        self._top = topology
        self._ledger = ledger
        self._trailing = trailing
        sources = topology.sources
        self._order = sorted(topology.paged, key=lambda g: g in sources)  # sources first
        self._page_size = topology.schema.page_size

    def publish(
        self,
        lease: Lease,
        key: TokenKey,
        num_pages: int,
        tables: Sequence[Int32],
        written: Written,
        freed: FreedBuilder,
    ) -> tuple[Duplicates, ...]:
        """Take pages [lease.num_published_pages, num_pages); the lease ends at num_pages."""
        found: list[Duplicates] = []
        while lease.num_published_pages < num_pages:
            page = lease.num_published_pages
            child = self._next(lease, key, page, num_pages)
            if child is None:
                new = self._new_segments(page, num_pages, tables, written)
                self._anchor(lease, self._top.grow(lease.node, key, new, num_pages - page), freed)
                break
            self._anchor(lease, child, freed)
            shared = child.protect > 1
            self._merge(child, (page, child.end), tables, written, (found, freed, shared))
        return tuple(found)

    def _next(self, lease: Lease, key: TokenKey, page: int, num_pages: int) -> Node | None:
        """Find the child that continues the lease's path, cut to what the key shares with it."""
        page_bytes = self._top.page_bytes
        offset = page * page_bytes
        anchor = lease.node
        assert anchor.end == page, "a lease is anchored where it ends"
        child = anchor.children.get(key.data[offset : offset + page_bytes])
        if child is None:
            return None
        common = child.num_pages
        if not key.data.startswith(child.key, offset):
            common = common_tokens(child.key, key.data, offset) // self._page_size
        end = min(page + common, num_pages)
        return self._top.split(child, end) if end < child.end else child

    def _anchor(self, lease: Lease, node: Node, freed: FreedBuilder) -> None:
        """Move the lease's lock down to `node`."""
        if node is not lease.node:
            self._top.lock(node)
            self._top.unlock(lease.node, freed)
            lease.node = node
        lease.num_published_pages = node.end

    def _new_segments(
        self, start: int, stop: int, tables: Sequence[Int32], written: Written
    ) -> tuple[Segment, ...]:
        """Segments of pages that only the request has."""
        made = [NO_PAGES] * self._top.schema.num_groups
        seq = written.seq & SEQ_MASK
        for group in self._order:
            blocks = tables[group][start:stop]
            stamp = written.stamps[group]
            columns = new_columns(blocks, written.of_group(group), stamp, seq)
            source = self._top.sources.get(group)
            if source is not None:
                columns[DEPENDENCY] = np.where(made[source].table[BLOCK] >= 0, seq, -1)
            present, first = presence(blocks)
            self._ledger.note(group, written.cause, present)
            sums = written.sums_of(group, blocks)
            aside = NOTHING_ASIDE if sums is None else PageAside(checksums=sums)
            made[group] = Segment(columns, present, stamp if present else MIXED, aside, first)
        return tuple(made)

    def restore(
        self,
        lease: Lease,
        start: int,
        stop: int,
        tables: Sequence[Int32],
        written: Written,
        freed: FreedBuilder,
    ) -> tuple[Duplicates, ...]:
        """Fill pages [start, stop) of the lease's own path."""
        found: list[Duplicates] = []
        node: Node | None = lease.node
        shared = False  # whether another lease stands on the node or below it
        while node is not None and node.end > start:
            shared = shared or node.protect > 1
            span = (max(start, node.start), min(stop, node.end))
            if span[0] < span[1]:
                self._merge(node, span, tables, written, (found, freed, shared))
            node = node.parent
        return tuple(found)

    def _merge(
        self,
        node: Node,
        span: tuple[int, int],
        tables: Sequence[Int32],
        written: Written,
        out: tuple[list[Duplicates], FreedBuilder, bool],
    ) -> None:
        """Merge the request's pages [span) into a node that its lease protects."""
        found, freed, shared = out
        segments = list(node.segments)
        changed = False
        lo, hi = span[0] - node.start, span[1] - node.start
        for group in self._order:
            own = tables[group][span[0] : span[1]]
            segment = segments[group]
            usable = self._usable(group, segments, written.stamps[group])[lo:hi]
            mine = own >= 0
            blocks = segment.table[BLOCK, lo:hi]
            again = np.flatnonzero(mine & usable & (own != blocks))
            if len(again):
                found.append(_duplicates(group, node.start + lo, again, segment, own, lo))
            fill = np.flatnonzero(mine & ~usable)
            if len(fill):
                had = fill[blocks[fill] >= 0]
                self._ledger.note(group, Cause.REPLACE, len(had))
                self._ledger.note(group, written.cause, len(fill) - len(had))
                replaced = had[blocks[had] != own[had]]
                self._give_back(node, group, replaced + lo, freed, shared)
                columns = self._columns(group, segments, fill + lo, own[fill], written)
                sums = written.sums_of(group, own[fill])
                segments[group] = segment.with_pages(fill + lo, columns, sums)
                self._replace(node, group, segments)
                changed = True
        if changed:
            self._top.set_segments(node, tuple(segments))

    def _usable(self, group: int, segments: Sequence[Segment], stamp: int) -> Bool:
        """[num_pages] pages of the tree that win over the request's."""
        segment = segments[group]
        good = (
            np.ones(segment.num_pages, dtype=np.bool_)
            if segment.is_whole(stamp)
            else segment.resident(stamp)
        )
        source = self._top.sources.get(group)
        if source is not None:
            good = good & (segment.table[DEPENDENCY] == segments[source].table[SEQ])
        return good

    def _columns(
        self,
        group: int,
        segments: Sequence[Segment],
        pages: Intp,
        blocks: Int32,
        written: Written,
    ) -> Int32:
        stamp = written.stamps[group]
        columns = new_columns(blocks, written.of_group(group), stamp, written.seq & SEQ_MASK)
        source = self._top.sources.get(group)
        if source is not None:
            columns[DEPENDENCY] = segments[source].table[SEQ, pages]
        return columns

    def _give_back(
        self, node: Node, group: int, pages: Intp, freed: FreedBuilder, shared: bool
    ) -> None:
        """Free replaced blocks, at once or when nobody can read them any more."""
        if not len(pages):
            return
        self._top.version += 1
        blocks = node.segments[group].table[BLOCK, pages]
        if not shared:
            freed.add(group, blocks)
            return
        for block in blocks.tolist():
            self._top.condemn(node, group, block)

    def _replace(self, node: Node, group: int, segments: Sequence[Segment]) -> None:
        """Put one group's new segment in place, with window totals following.

        History totals need nothing: the node is protected.
        """
        pins = next((p for p in node.pins if p.group == group), None)
        if pins is None:
            return
        self._trailing.pages_changed(pins, before=True)
        node.segments = tuple(segments)
        self._trailing.pages_changed(pins, before=False)

    # ---------------------------------------------------------------- dropping

    def drop(
        self,
        match: Match,
        fresh: Match,
        group: int,
        pages: Iterable[int],
        freed: FreedBuilder,
    ) -> None:
        """Take `pages` of `group` out where the tree still has what the match saw."""
        wanted = _unchanged(match, fresh, group, pages)
        for node in list(fresh.nodes):
            inside = wanted[(wanted >= node.start) & (wanted < node.end)] - node.start
            if len(inside):
                self._drop_pages(node, group, inside, freed)

    def mark(self, match: Match, fresh: Match, group: int, masks: Mapping[int, int]) -> None:
        """Mark layers of pages as invalid where the tree still has what the match saw."""
        wanted = _unchanged(match, fresh, group, masks)
        for node in fresh.nodes:
            inside = wanted[(wanted >= node.start) & (wanted < node.end)].tolist()
            if inside:
                self.mark_pages(node, group, {p - node.start: masks[p] for p in inside})

    def mark_pages(self, node: Node, group: int, masks: Mapping[int, int]) -> None:
        """Mark layers of a node's own pages as invalid; the blocks stay."""
        segments = list(node.segments)
        segments[group] = segments[group].with_invalid(masks)
        self._ledger.note(group, Cause.MARK, len(masks))
        self._top.version += 1
        self._top.set_segments(node, tuple(segments))

    def _drop_pages(self, node: Node, group: int, pages: Intp, freed: FreedBuilder) -> None:
        segments = list(node.segments)
        segment = segments[group]
        self._ledger.note(group, Cause.DROP, len(pages))
        self._give_back(node, group, pages, freed, shared=node.protect > 0)
        segments[group] = segment.without(pages)
        self._replace(node, group, segments)
        if group in self._top.history and not node.protect:
            self._top.evictable[group] -= len(pages)
        self._top.set_segments(node, tuple(segments))
        self._top.prune(node)


def _unchanged(match: Match, fresh: Match, group: int, pages: Iterable[int]) -> Intp:
    """[n] those of `pages` on the device whose block is the one that `match` saw."""
    wanted = np.array(sorted({p for p in pages if p < fresh.logical_pages}), dtype=np.intp)
    held = fresh.blocks(group)[wanted]
    same = (match.blocks(group)[wanted] == held) & (
        match.generations(group)[wanted] == fresh.generations(group)[wanted]
    )
    found: Intp = wanted[same & (held >= 0)]
    return found


def _duplicates(
    group: int, first_page: int, index: Intp, segment: Segment, own: Int32, lo: int
) -> Duplicates:
    return Duplicates(
        group,
        (index + first_page).astype(np.int32),
        segment.table[BLOCK, index + lo],
        segment.table[GENERATION, index + lo],
        own[index].astype(np.int32),
    )
