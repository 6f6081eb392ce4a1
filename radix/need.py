"""What each kind of group needs in order to resume at a position.

One definition, used by the match (vectorised over all page boundaries), by leases (what to
protect), by checkpoints (what to keep) and by tests (literally, one position at a time).

    tokens   0 ....... p-W+1 ....... p-1 | p           WINDOW needs pages covering [p-W+1, p)
    tokens   0 ... C*(p//C) ........ p-1 | p           CHUNKED needs pages covering [C*(p//C), p)

This module does not look at what is resident.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from statewise.radix.schema import GroupKind, StateGroupSpec

Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]
PageRange = tuple[int, int]  # half open


def first_token(spec: StateGroupSpec, position: int) -> int:
    """First token whose state a window or chunked group needs at `position` (sinks aside).

    Equal to `position` where nothing is needed.
    """
    if spec.kind is GroupKind.CHUNKED:
        return position - position % spec.window
    return max(0, position - spec.window + 1)


def trailing_pages(spec: StateGroupSpec, position: int, page_size: int) -> PageRange:
    """Pages that a window or chunked group needs at `position`, a partial last page included."""
    if spec.kind is GroupKind.CHUNKED:
        first = position - position % spec.window
    else:
        first = max(0, position - spec.window + 1)
    end = -(-position // page_size)
    return (first // page_size, end) if first < position else (end, end)


def sink_pages(spec: StateGroupSpec, position: int, page_size: int) -> int:
    """Count the first pages needed for tokens that never leave the window."""
    return -(-min(spec.sinks, position) // page_size)


def needs_snapshot(spec: StateGroupSpec, position: int) -> bool:
    """Whether a tail or recurrent group needs a snapshot at `position`."""
    if position == 0:
        return False
    if spec.kind is GroupKind.TAIL:
        return position % spec.ratio != 0 or spec.overlap > 0
    return spec.kind is GroupKind.RECURRENT


def trailing_starts(spec: StateGroupSpec, num_pages: int, page_size: int) -> Int64:
    """[num_pages + 1] first page needed at each page boundary; the boundary itself for none."""
    boundaries = np.arange(num_pages + 1, dtype=np.int64)
    positions = boundaries * page_size
    if spec.kind is GroupKind.CHUNKED:
        first = positions - positions % spec.window
    else:
        first = np.minimum(positions, np.maximum(0, positions - spec.window + 1))
    starts: Int64 = np.where(first < positions, first // page_size, boundaries)
    return starts


def snapshot_boundaries(spec: StateGroupSpec, num_pages: int, page_size: int) -> Bool:
    """[num_pages + 1] page boundaries at which `needs_snapshot` holds."""
    positions = np.arange(num_pages + 1, dtype=np.int64) * page_size
    if spec.kind is GroupKind.TAIL and not spec.overlap:
        open_window: Bool = positions % spec.ratio != 0
        return open_window
    started: Bool = positions > 0
    return started


def protected_pages(
    spec: StateGroupSpec, position: int, num_pages: int, page_size: int
) -> tuple[int, int, int]:
    """(sink_end, lo, hi): a request at `position` with `num_pages` whole pages in the tree.

    Pages [0, sink_end) and [lo, hi) are what it may still read, and what a checkpoint at the
    page boundary below `position` would need. Where the tree ends before that boundary there is
    no such checkpoint: a request that goes on without publishing lets its old window go.
    """
    at = position
    if position // page_size == num_pages:
        at = num_pages * page_size  # needs every page that `position` needs
    lo = min(trailing_pages(spec, at, page_size)[0], num_pages)
    sinks = min(sink_pages(spec, position, page_size), lo) if spec.sinks else 0
    return sinks, lo, num_pages


def needed_ranges(spec: StateGroupSpec, position: int, page_size: int) -> list[PageRange]:
    """Ranges of whole pages that a paged group must have at `position`."""
    page = position // page_size
    if spec.kind.is_history:
        return [(0, page)] if page else []
    lo = min(trailing_pages(spec, position, page_size)[0], page)
    if not spec.sinks:
        return [(lo, page)] if lo < page else []
    sinks = min(sink_pages(spec, position, page_size), lo)
    return [(a, b) for a, b in ((0, sinks), (lo, page)) if a < b]
