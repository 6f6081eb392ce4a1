"""A match: which pages of a key the tree holds, and where each group could resume.

    pages       0    1    2    3    4 | 5        logical hit: 5 pages
    FULL        x    x    x    x    x |          resumable at 0..5
    WINDOW(3P)  .    .    x    x    x |          resumable at 0, 5
    snapshot at                3    5 |          resumable at 0, 3, 5
                                                 intersection: 5

Frozen: it holds references to segments, which are values, so later changes of the tree do not show
here. `RadixTree.lease` finds out whether what it relies on is still there.

The common case (history whole, window whole at the end) is decided without looking at pages; only
where something is missing are vectors over all page boundaries computed.

This module does not choose a plan and does not protect anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from statewise.radix.key import Namespace, TokenKey
from statewise.radix.need import (
    needed_ranges,
    needs_snapshot,
    sink_pages,
    snapshot_boundaries,
    trailing_pages,
    trailing_starts,
)
from statewise.radix.node import Checkpoint, Node, StateBlock
from statewise.radix.schema import CacheSchema, GroupKind
from statewise.radix.segment import (
    BLOCK,
    DEPENDENCY,
    GENERATION,
    SEQ,
    SLOW_TIER,
    Segment,
    Tier,
)

Int32 = NDArray[np.int32]
Int8 = NDArray[np.int8]
Bool = NDArray[np.bool_]


class Snapshot:
    """State that one position alone owns, as found by a match; immutable."""

    __slots__ = ("blocks", "checkpoint", "page", "position")

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint  # identity only: it may change after the match
        self.position = checkpoint.position
        self.page = checkpoint.page
        self.blocks = checkpoint.blocks

    @property
    def is_terminal(self) -> bool:
        """Whether the position lies inside a page."""
        return bool(self.checkpoint.tail)

    def block_of(self, group: int) -> StateBlock | None:
        """Find the block of `group`, if any."""
        for held in self.blocks:
            if held.group == group:
                return held
        return None


class Match:
    """What `RadixTree.match` found; see the module's picture.

    Positions are in tokens, boundaries in pages. "Now" means on the device, valid and written
    under the stamps that were current at the match; "after load" includes slower tiers.
    """

    __slots__ = (
        "_best",
        "_cache",
        "_laid_out",
        "_pairs",
        "history_whole_pages",
        "key",
        "logical_pages",
        "namespace",
        "nodes",
        "schema",
        "segments",
        "slow_snapshots",
        "snapshots",
        "stamps",
        "starts",
        "version",
        "whole_tokens",
    )

    def __init__(
        self,
        schema: CacheSchema,
        stamps: tuple[int, ...],
        version: int,
        namespace: Namespace,
        key: TokenKey,
    ) -> None:
        self.schema = schema
        self.stamps = stamps
        self.version = version
        self.namespace = namespace
        self.key = key
        self.logical_pages = 0
        self.history_whole_pages = 0  # leading pages known to be whole in all history groups
        self.nodes: list[Node] = []  # root's child first; the last may be matched in part
        self.starts: list[int] = []  # first page of each node, at the time of the match
        self.segments: list[tuple[Segment, ...]] = []  # of the nodes, at the time of the match
        self.snapshots: tuple[Snapshot, ...] = ()  # ascending position
        self.slow_snapshots: Mapping[tuple[int, int], Tier] = {}  # (group, boundary) -> tier
        self._cache: dict[tuple[str, int, bool], Bool] = {}
        self._best: tuple[int, int] | None = None
        self._pairs: dict[int, tuple[int, int, Int32]] = {}  # group -> (lo, hi, joined)
        self._laid_out: tuple[int, list[tuple[int, Int32]]] = (-1, [])  # position, (group, pairs)
        self.whole_tokens = -1  # the logical end, where all groups are known to be whole there

    @property
    def logical_tokens(self) -> int:
        """Tokens of the logical hit."""
        return self.logical_pages * self.schema.page_size

    # ---------------------------------------------------------------- per page

    def _rows(self, group: int, row: int) -> Int32:
        """[logical_pages] one row of the group's table."""
        pieces = [segments[group].table[row] for segments in self.segments]
        if not pieces:
            return np.empty(0, dtype=np.int32)
        joined = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        return joined[: self.logical_pages]

    def blocks(self, group: int) -> Int32:
        """[logical_pages] device blocks, -1 where absent. Not to be written to."""
        return self._rows(group, BLOCK)

    def generations(self, group: int) -> Int32:
        """[logical_pages] generations of these blocks when they were written."""
        return self._rows(group, GENERATION)

    def pairs(self, group: int, lo: int, hi: int) -> Int32:
        """[2, hi - lo] blocks and generations of pages [lo, hi), which the match must have.

        Joined once: validation compares and page tables are filled from the same array. Not to be
        written to.
        """
        known = self._pairs.get(group)
        if known is None or lo < known[0] or hi > known[1]:
            known = self._pairs[group] = (lo, hi, self._join(group, lo, hi))
        first, end, joined = known
        return joined if lo == first and hi == end else joined[:, lo - first : hi - first]

    def lay_out(self, position: int) -> list[tuple[int, Int32]]:
        """(group, pairs) of all pages that a resume at `position` (tokens) reads, joined once."""
        if self._laid_out[0] != position:
            size = self.schema.page_size
            found = [
                (group, self.pairs(group, lo, hi))
                for group, spec in enumerate(self.schema.groups)
                if not spec.kind.is_snapshot
                for lo, hi in needed_ranges(spec, position, size)
            ]
            self._laid_out = (position, found)
        return self._laid_out[1]

    def _join(self, group: int, lo: int, hi: int) -> Int32:
        parts = []
        for start, segments in zip(reversed(self.starts), reversed(self.segments), strict=True):
            if start < hi:
                table = segments[group].table
                parts.append(table[: GENERATION + 1, max(lo - start, 0) : hi - start])
            if start <= lo:
                break
        if len(parts) == 1:
            return parts[0]
        parts.reverse()
        return np.concatenate(parts, axis=1) if parts else np.empty((2, 0), dtype=np.int32)

    def seqs(self, group: int) -> Int32:
        """[logical_pages] write sequence numbers."""
        return self._rows(group, SEQ)

    def _spans(self) -> Iterator[tuple[int, int, tuple[Segment, ...]]]:
        """(first page, pages used, segments) of each node."""
        sizes = self.node_sizes()
        yield from zip(self.starts, sizes, self.segments, strict=True)

    def node_sizes(self) -> list[int]:
        """Pages used of each node; none for a match that holds nothing whole."""
        ends = [*self.starts, self.logical_pages][1:]
        return [end - start for start, end in zip(self.starts, ends, strict=True)]

    def tiers(self, group: int) -> Int8:
        """[logical_pages] fastest tier that holds the page, -1 for none."""
        tiers = np.full(self.logical_pages, -1, dtype=np.int8)
        for start, size, segments in self._spans():
            segment = segments[group]
            out = tiers[start : start + size]
            if segment.aside.slow is not None:
                out[:] = segment.aside.slow[SLOW_TIER, :size]
            out[segment.table[BLOCK, :size] >= 0] = Tier.DEVICE
        return tiers

    def invalid_layers(self, group: int) -> dict[int, int]:
        """Page -> bit mask of the group's layers that failed validation."""
        found: dict[int, int] = {}
        for start, size, segments in self._spans():
            for page, mask in (segments[group].aside.invalid or {}).items():
                if page < size:
                    found[start + page] = mask
        return found

    def resident(self, group: int, after_load: bool = False) -> Bool:
        """[logical_pages] pages of the group that are usable now (or after a load)."""
        place = ("resident", group, after_load)
        known = self._cache.get(place)
        if known is not None:
            return known
        stamp = self.stamps[group]
        pieces = [
            s[group].loadable(stamp) if after_load else s[group].resident(stamp)
            for s in self.segments
        ]
        good = np.concatenate(pieces) if pieces else np.empty(0, dtype=np.bool_)
        good = good[: self.logical_pages]
        depends_on = self.schema.groups[group].depends_on
        if depends_on is not None:
            source = self.seqs(self.schema.index_of(depends_on))
            good = good & (self._rows(group, DEPENDENCY) == source)
        self._cache[place] = good
        return good

    # ---------------------------------------------------------------- per boundary

    def resumable(self, group: int, after_load: bool = False) -> Bool:
        """[logical_pages + 1] page boundaries at which this group alone could resume."""
        place = ("resumable", group, after_load)
        known = self._cache.get(place)
        if known is None:
            known = self._cache[place] = self._resumable(group, after_load)
        return known

    def _resumable(self, group: int, after_load: bool) -> Bool:
        spec = self.schema.groups[group]
        if spec.kind.is_snapshot:
            return self._snapshot_boundaries(group)
        good = self.resident(group, after_load)
        if spec.kind.is_history:
            running = np.logical_and.accumulate(good)
            return np.concatenate((np.ones(1, dtype=np.bool_), running))
        size = self.schema.page_size
        total = np.zeros(self.logical_pages + 1, dtype=np.int64)
        np.cumsum(good, out=total[1:])
        starts = trailing_starts(spec, self.logical_pages, size)
        boundaries = np.arange(self.logical_pages + 1, dtype=np.int64)
        enough: Bool = total - total[starts] == boundaries - starts
        if spec.sinks:
            sinks = np.minimum(-(-spec.sinks // size), boundaries)
            enough &= total[sinks] == sinks
        return enough

    def _snapshot_boundaries(self, group: int) -> Bool:
        spec = self.schema.groups[group]
        size = self.schema.page_size
        out = ~snapshot_boundaries(spec, self.logical_pages, size)
        for snapshot in self.snapshots:
            held = snapshot.block_of(group)
            if held and not snapshot.is_terminal and held.stamp == self.stamps[group]:
                out[snapshot.page] = True
        return out

    def resumable_at(self, group: int, position: int, after_load: bool = False) -> bool:
        """Whether this group alone could resume at exactly `position` tokens."""
        page, rest = divmod(position, self.schema.page_size)
        if page > self.logical_pages:
            return False
        if not rest:
            return bool(self.resumable(group, after_load)[page])
        snapshot = self.terminal_at(position)
        return snapshot is not None and self._terminal_ok(group, snapshot, after_load)

    def terminal_at(self, position: int) -> Snapshot | None:
        """Find the snapshot at an unaligned `position`, if the match found one."""
        for snapshot in self.snapshots:
            if snapshot.position == position and snapshot.is_terminal:
                return snapshot
        return None

    def snapshot_at(self, position: int) -> Snapshot | None:
        """Find the snapshot at `position`, aligned or terminal."""
        for snapshot in self.snapshots:
            if snapshot.position == position:
                return snapshot
        return None

    def _terminal_ok(self, group: int, snapshot: Snapshot, after_load: bool) -> bool:
        """Literal check of one group at an unaligned position."""
        spec = self.schema.groups[group]
        position = snapshot.position
        rest = position % self.schema.page_size
        held = snapshot.block_of(group)
        has_block = held is not None and held.stamp == self.stamps[group]
        if spec.kind.is_snapshot:
            return has_block or not needs_snapshot(spec, position)
        if spec.kind.is_history:
            whole = bool(self.resumable(group, after_load)[snapshot.page])
            return whole and (has_block or rest < spec.ratio)
        good = self.resident(group, after_load)
        lo, end = trailing_pages(spec, position, self.schema.page_size)
        sinks = min(sink_pages(spec, position, self.schema.page_size), snapshot.page)
        return bool(
            (has_block or lo == end)
            and good[min(lo, snapshot.page) : snapshot.page].all()
            and good[:sinks].all()
        )

    # ---------------------------------------------------------------- all groups

    def intersection(self) -> tuple[int, int]:
        """Deepest page boundary at which every group could resume: (now, after a load)."""
        if self._best is None:
            now = self._deepest(after_load=False)
            later = now
            if now < self.logical_pages and self._has_slow():
                later = self._deepest(after_load=True)
            self._best = (now, later)
        return self._best

    def _has_slow(self) -> bool:
        return any(s.aside.slow is not None for segments in self.segments for s in segments)

    def _deepest(self, after_load: bool) -> int:
        if self.history_whole_pages == self.logical_pages and self._trailing_whole():
            self.whole_tokens = self.logical_tokens
            return self.logical_pages
        both = np.ones(self.logical_pages + 1, dtype=np.bool_)
        for group in range(self.schema.num_groups):
            both &= self.resumable(group, after_load)
        return int(np.flatnonzero(both)[-1])

    def _trailing_whole(self) -> bool:
        """Every trailing group can resume at the logical end, decided on whole segments."""
        position = self.logical_tokens
        for group, spec in enumerate(self.schema.groups):
            if spec.kind.is_snapshot:
                if needs_snapshot(spec, position) and not self.resumable(group)[-1]:
                    return False
            elif spec.kind.is_window and not self._window_whole(group, position):
                return False
        return True

    def _window_whole(self, group: int, position: int) -> bool:
        spec = self.schema.groups[group]
        stamp = self.stamps[group]
        first = trailing_pages(spec, position, self.schema.page_size)[0]
        if spec.sinks:
            first = 0
        end = self.logical_pages
        for start, segments in zip(reversed(self.starts), reversed(self.segments), strict=True):
            if first >= end:
                break
            segment = segments[group]
            if not segment.holds(max(first - start, 0), end - start, stamp):
                return False
            end = start
        return True

    def reuse_position(self, after_load: bool = False) -> int:
        """Deepest position in tokens at which every group could resume, terminals included."""
        best = self.intersection()[after_load] * self.schema.page_size
        for snapshot in reversed(self.snapshots):
            if snapshot.position <= best:
                break
            if snapshot.is_terminal and all(
                self._terminal_ok(g, snapshot, after_load) for g in range(self.schema.num_groups)
            ):
                return snapshot.position
        return best

    @property
    def history_pages(self) -> int:
        """Pages up to which every history group could resume now."""
        if self.history_whole_pages == self.logical_pages:
            return self.logical_pages
        depth = self.logical_pages
        for group, spec in enumerate(self.schema.groups):
            if spec.kind.is_history:
                depth = min(depth, int(np.flatnonzero(self.resumable(group))[-1]))
        return depth

    @property
    def branch_position(self) -> int | None:
        """Where history would allow to resume but trailing state is missing; None if nowhere.

        A checkpoint made there while the tokens are computed again serves the next request that
        branches off at the same place.
        """
        history = self.history_pages * self.schema.page_size
        return history if history > self.reuse_position() else None

    def limiting_group(self, page: int) -> int | None:
        """Name the group that cannot resume at boundary `page`, the worst if several; or None.

        The worst is the one whose own deepest boundary at or below `page` is the smallest.
        """
        worst: tuple[int, int] | None = None
        for group in range(self.schema.num_groups):
            able = self.resumable(group)[: page + 1]
            if able[page]:
                continue
            reach = int(np.flatnonzero(able)[-1]) if able.any() else -1
            if worst is None or reach < worst[0]:
                worst = (reach, group)
        return None if worst is None else worst[1]

    def deepest(self, group: int) -> int:
        """Deepest page boundary at which this group alone could resume now."""
        if self.schema.groups[group].kind is GroupKind.FULL and self.is_direct:
            return self.logical_pages
        return int(np.flatnonzero(self.resumable(group))[-1])

    @property
    def is_direct(self) -> bool:
        """Whether the whole logical hit is usable as it stands."""
        return self.intersection()[0] == self.logical_pages

    def __repr__(self) -> str:
        now, later = self.intersection()
        return f"Match(logical={self.logical_pages}, now={now}, after_load={later} pages)"
