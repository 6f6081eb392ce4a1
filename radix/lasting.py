"""What of a match is worth a copy in a slower tier: what somebody could resume from later.

    history    every page
    window     pages that a checkpoint keeps, or that a resume at a given position needs; those that
               merely have not been evicted yet are not
    snapshots  those at page boundaries

Ask right after the match: pins are the tree's own, and follow its changes.

This module does not know tiers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from statewise.radix.match import Match
from statewise.radix.need import needed_ranges
from statewise.radix.node import StateBlock

Bool = NDArray[np.bool_]


def lasting_pages(match: Match, group: int, resume_at: int = 0) -> Bool:
    """[logical_pages] pages of a paged group on the device, valid, and worth keeping.

    `resume_at`: a position, in tokens, that somebody is likely to resume at; 0 for none.
    """
    good = match.resident(group).copy()
    spec, size = match.schema.groups[group], match.schema.page_size
    if spec.kind.is_window:
        kept = np.zeros_like(good)
        for node, start, num in zip(match.nodes, match.starts, match.node_sizes(), strict=True):
            pins = next(p for p in node.pins if p.group == group)
            kept[start : start + num] = pins.is_kept()[:num]
        for lo, hi in needed_ranges(spec, resume_at // size * size, size):
            kept[lo:hi] = True
        good &= kept
    return good


def lasting_snapshots(match: Match) -> list[tuple[int, StateBlock]]:
    """(position, block) of the snapshot groups' state at page boundaries along the match."""
    return [
        (snapshot.position, held)
        for snapshot in match.snapshots
        if not snapshot.is_terminal
        for held in snapshot.blocks
        if match.schema.groups[held.group].kind.is_snapshot
        and held.stamp == match.stamps[held.group]
    ]
