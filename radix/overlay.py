"""A match with what slower tiers hold laid over it: what a plan that may load can see.

    tree        0 1 2 3 4 5 | logical end of the tree
    device      x x . x x x
    tiers           d . . . . d d d d |        found by key, whatever the tree remembers
    overlay     x x d x x x d d d d             logical end: as far as history is without a gap

Pages in slower tiers are found by the tokens they stand for (runtime/tiers), not through the tree:
what was evicted long ago, or stored by an earlier process, is found the same way. The overlay is
for planning only. Its nodes are the tree's, so it must not be leased: a load first puts pages into
the tree, and whoever wants them matches again.

This module does not search, and does not choose.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from statewise.radix.match import Match
from statewise.radix.schema import CacheSchema
from statewise.radix.segment import (
    BLOCK,
    DEPENDENCY,
    NUM_ROWS,
    NUM_SLOW_ROWS,
    SEQ,
    SLOW_BLOCK,
    SLOW_TIER,
    STAMP,
    Int32,
    PageAside,
    Segment,
    Tier,
    empty_segment,
    of_table,
)

Int64 = NDArray[np.int64]
STORED_SEQ = -2  # write number of pages in slower tiers; the tree's are not negative


@dataclass(frozen=True)
class Stored:
    """Copies in slower tiers. `pages[group]`: page -> (tier, handle); `num_pages`: depth."""

    num_pages: int
    pages: Mapping[int, Mapping[int, tuple[Tier, int]]]
    snapshots: Mapping[tuple[int, int], tuple[Tier, int]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.snapshots) or any(self.pages.values())


def sources_first(schema: CacheSchema) -> list[int]:
    """Groups, each after the one it depends on."""
    return sorted(range(schema.num_groups), key=lambda g: schema.groups[g].depends_on is not None)


def overlay(match: Match, stored: Stored) -> Match:
    """`match` with the copies laid over it; pages they name count as off the device."""
    out = Match(match.schema, match.stamps, match.version, match.namespace, match.key)
    depth = max(match.logical_pages, stored.num_pages)
    starts, segments = list(match.starts), []
    for size, parts in zip(match.node_sizes(), match.segments, strict=True):
        segments.append([part.part(0, min(size, part.num_pages)) for part in parts])
    if depth > match.logical_pages:
        starts.append(match.logical_pages)
        size = depth - match.logical_pages
        kinds = [spec.kind for spec in match.schema.groups]
        segments.append([empty_segment() if k.is_snapshot else _nothing(size) for k in kinds])
    for i, start in enumerate(starts):
        for group in sources_first(match.schema):
            _lay_over(match, stored, segments[i], start, group)
    out.logical_pages = depth
    out.history_whole_pages = min(match.history_whole_pages, _first_of(stored, depth))
    out.nodes = list(match.nodes)
    out.starts = starts
    out.segments = [tuple(parts) for parts in segments]
    out.snapshots = match.snapshots
    out.slow_snapshots = {place: tier for place, (tier, _) in stored.snapshots.items()}
    return out


def _first_of(stored: Stored, depth: int) -> int:
    """First page of which any group has a copy that counts."""
    return min((min(pages) for pages in stored.pages.values() if pages), default=depth)


def _nothing(num_pages: int) -> Segment:
    table = np.full((NUM_ROWS, num_pages), -1, dtype=np.int32)
    return of_table(table)


def _lay_over(
    match: Match, stored: Stored, segments: list[Segment], start: int, group: int
) -> None:
    """Put a group's copies into its segment of one node."""
    segment = segments[group]
    inside = {
        page - start: at
        for page, at in stored.pages.get(group, {}).items()
        if start <= page < start + segment.num_pages
    }
    depends_on = match.schema.groups[group].depends_on
    if not inside:
        return
    pages = np.array(list(inside), dtype=np.intp)
    table: Int32 = segment.table.copy()
    table[BLOCK, pages] = -1
    table[STAMP, pages] = match.stamps[group]
    table[SEQ, pages] = STORED_SEQ
    if depends_on is not None:
        source = segments[match.schema.index_of(depends_on)].table[SEQ]
        table[DEPENDENCY, pages] = source[pages]
    slow = np.full((NUM_SLOW_ROWS, segment.num_pages), -1, dtype=np.int32)
    slow[SLOW_TIER, pages] = [tier for tier, _ in inside.values()]
    slow[SLOW_BLOCK, pages] = [handle for _, handle in inside.values()]
    marked = segment.aside.invalid or {}
    invalid = {page: mask for page, mask in marked.items() if page not in inside}
    segments[group] = of_table(table, PageAside(slow, invalid or None, segment.aside.checksums))
