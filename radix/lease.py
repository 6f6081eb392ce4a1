"""A lease: the receipt for what one request relies on.

    pages    0 ............ lo ....... hi = num_published_pages | not in the tree yet
    history  protected by the anchor node, which ends at hi
    window              [lo, hi) locked page by page; sinks [0, sink_end) as well

Made by `RadixTree.lease`, moved by `publish` and `advance`, given back once by `release`.
Only the tree changes it.

This module does not protect anything itself.
"""

from __future__ import annotations

from statewise.radix.key import Namespace
from statewise.radix.match import Match
from statewise.radix.node import Checkpoint, Node

Pinned = tuple[int, int, int]  # sink_end, lo, hi: absolute pages [0, sink_end) and [lo, hi)
Range = tuple[int, int]


class Lease:
    """What one request protects; see the module's picture."""

    __slots__ = (
        "checkpoint",
        "match",
        "namespace",
        "node",
        "num_published_pages",
        "pinned",
        "position",
        "released",
    )

    def __init__(self, namespace: Namespace, match: Match, node: Node, position: int) -> None:
        self.namespace = namespace
        self.match = match  # what it was made from: blocks and generations at that time
        self.node = node  # anchor
        self.num_published_pages = node.end
        self.position = position  # tokens computed
        self.pinned: list[Pinned] = []  # per window group
        self.checkpoint: Checkpoint | None = None  # the state it starts from, until it moves on
        self.released = False

    def __repr__(self) -> str:
        state = "released" if self.released else f"{self.num_published_pages} pages"
        return f"Lease(position={self.position}, {state})"


def ranges_of(pinned: Pinned) -> tuple[Range, ...]:
    """Split into the ranges of pages, sinks first if there are any."""
    sink_end, lo, hi = pinned
    return ((0, sink_end), (lo, hi)) if sink_end else ((lo, hi),)


def minus(pinned: Pinned, other: Pinned) -> list[Range]:
    """Ranges of pages in `pinned` that are not in `other`."""
    if not pinned[0] and not other[0]:
        _, lo, hi = pinned
        _, start, stop = other
        if start < stop:
            both = ((lo, min(hi, start)), (max(lo, stop), hi))
            return [piece for piece in both if piece[0] < piece[1]]
        return [(lo, hi)] if lo < hi else []
    left = [r for r in ranges_of(pinned) if r[0] < r[1]]
    for start, stop in ranges_of(other):
        if start >= stop:
            continue
        pieces = []
        for a, b in left:
            if a < min(b, start):
                pieces.append((a, min(b, start)))
            if max(a, stop) < b:
                pieces.append((max(a, stop), b))
        left = pieces
    return left
