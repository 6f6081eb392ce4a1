"""What a kind needs at a position, against the definition token by token."""

from __future__ import annotations

import pytest

from statewise.radix import GroupKind
from statewise.radix.need import (
    needs_snapshot,
    sink_pages,
    snapshot_boundaries,
    trailing_pages,
    trailing_starts,
)
from support.radix_oracle import group, needed_tokens, wants_snapshot

WINDOWS = [group("w", GroupKind.WINDOW, window=w, sinks=s) for w in (1, 2, 5, 16) for s in (0, 3)]
CHUNKS = [group("c", GroupKind.CHUNKED, window=w) for w in (1, 3, 4, 8)]
TAILS = [
    group("t", GroupKind.TAIL, ratio=4),
    group("t", GroupKind.TAIL, ratio=4, overlap=4),
    group("t", GroupKind.TAIL, ratio=6),
    group("r", GroupKind.RECURRENT),
]


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("spec", WINDOWS + CHUNKS, ids=repr)
def test_pages_cover_exactly_the_needed_tokens(spec, page_size: int) -> None:  # type: ignore[no-untyped-def]
    for position in range(40):
        pages = {t // page_size for t in needed_tokens(spec, position)}
        lo, hi = trailing_pages(spec, position, page_size)
        sinks = sink_pages(spec, position, page_size)
        assert set(range(lo, hi)) | set(range(sinks)) == pages
    starts = trailing_starts(spec, 12, page_size)
    for boundary in range(13):
        assert starts[boundary] == trailing_pages(spec, boundary * page_size, page_size)[0]


@pytest.mark.parametrize("spec", TAILS, ids=repr)
def test_snapshots_are_needed_as_declared(spec) -> None:  # type: ignore[no-untyped-def]
    for position in range(30):
        assert needs_snapshot(spec, position) == wants_snapshot(spec, position)
    for page_size in (2, 4):
        expected = [wants_snapshot(spec, b * page_size) for b in range(9)]
        assert snapshot_boundaries(spec, 8, page_size).tolist() == expected
