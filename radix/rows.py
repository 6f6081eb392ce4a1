"""A match seen as arrays over its pages, joined from its nodes' segments.

    node       A        B     C            one segment per group and node
    table   [....][..........][...]        joined, cut at the logical end

`Match` answers questions about resuming; this module hands out the raw columns that validation
and planning compute with. It copies, so that its results may be kept.

This module does not judge what it reads.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from statewise.radix.match import Match
from statewise.radix.need import needs_snapshot
from statewise.radix.segment import NUM_ROWS, SLOW_BLOCK, SLOW_TIER, Int32

Int8 = NDArray[np.int8]
UInt64 = NDArray[np.uint64]
NO_TIER = -1


def table(match: Match, group: int) -> Int32:
    """[NUM_ROWS, logical_pages] all columns of one group."""
    parts = [segments[group].table for segments in match.segments]
    if not parts:
        return np.empty((NUM_ROWS, 0), dtype=np.int32)
    joined = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
    return joined[:, : match.logical_pages]


def is_whole(match: Match, group: int, lo: int, hi: int) -> bool:
    """Whether every page of [lo, hi) is known to be on the device, valid and current.

    Decided on the summaries of whole segments where possible; dependencies are part of it for
    history.
    """
    spec = match.schema.groups[group]
    if spec.kind.is_history and hi <= match.history_whole_pages:
        return True
    if hi > match.logical_pages or spec.depends_on is not None:
        return False
    stamp = match.stamps[group]
    end = match.logical_pages
    for start, segments in zip(reversed(match.starts), reversed(match.segments), strict=True):
        segment = segments[group]
        if start < hi and not segment.holds(max(lo - start, 0), min(end, hi) - start, stamp):
            return False
        if start <= lo:
            break
        end = start
    return True


def checksums(match: Match, group: int) -> UInt64 | None:
    """[logical_pages, layers of the group] checksums, 0 where none; None if no page has one."""
    if all(segments[group].aside.checksums is None for segments in match.segments):
        return None
    out = np.zeros((match.logical_pages, len(match.schema.groups[group].layers)), dtype=np.uint64)
    for start, segments in zip(match.starts, match.segments, strict=True):
        recorded = segments[group].aside.checksums
        if recorded is not None:
            size = min(len(recorded), match.logical_pages - start)
            out[start : start + size] = recorded[:size]
    return out


def slow_tiers(match: Match, group: int) -> Int8:
    """[logical_pages] slower tier that has a copy, -1 for none."""
    out = np.full(match.logical_pages, NO_TIER, dtype=np.int8)
    for start, segments in zip(match.starts, match.segments, strict=True):
        slow = segments[group].aside.slow
        if slow is not None:
            size = min(slow.shape[1], match.logical_pages - start)
            have = slow[SLOW_BLOCK, :size] >= 0
            out[start : start + size] = np.where(have, slow[SLOW_TIER, :size], NO_TIER)
    return out


def has_exact(match: Match, group: int, position: int) -> bool:
    """Whether the block that only `position` can use is there, where the group needs one."""
    spec = match.schema.groups[group]
    rest = position % match.schema.page_size
    if spec.kind.is_snapshot:
        wanted = needs_snapshot(spec, position)
    else:
        wanted = rest >= (spec.ratio if spec.kind.is_history else 1)
    if not wanted:
        return True
    snapshot = match.snapshot_at(position)
    return snapshot is not None and snapshot.block_of(group) is not None
