"""Items in ascending order of a score that is fixed between two uses: the next victim at once.

    put(item, score)    log n; again with another score: the old entry is left behind, dead
    discard(item)       its entry is left behind, dead
    first()             dead entries on top are dropped, amortised log n

When dead entries outnumber living ones a new heap is begun and the old one drained into it, a few
entries with each operation: an item that has left the tree is not held for long, and no single
operation pays for all. Equal scores leave in the order in which they came.

This module does not know what a score means.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Generic, TypeVar

SLACK = 64  # dead entries that are never worth a new heap
MOVES = 8  # entries drained with each operation

T = TypeVar("T")


class ScoreOrder(Generic[T]):
    """A set of items, each with a score; hashable by identity."""

    __slots__ = ("_heap", "_number", "_old", "_scores")

    def __init__(self) -> None:
        self._scores: dict[T, float] = {}
        self._heap: list[tuple[float, int, T]] = []  # (score, number of arrival, item)
        self._old: list[tuple[float, int, T]] = []  # being drained
        self._number = 0

    def __len__(self) -> int:
        return len(self._scores)

    def __contains__(self, item: object) -> bool:
        return item in self._scores

    def __iter__(self) -> Iterator[T]:
        """Every item, in no order."""
        return iter(self._scores)

    @property
    def num_entries(self) -> int:
        """Entries kept, dead ones included."""
        return len(self._heap) + len(self._old)

    def score_of(self, item: T) -> float:
        """Score that `item` stands under; KeyError where it is not in the order."""
        return self._scores[item]

    def put(self, item: T, score: float) -> None:
        """Add an item, or move it to another score."""
        if self._scores.get(item) == score:
            return
        self._scores[item] = score
        self._number += 1
        heappush(self._heap, (score, self._number, item))
        self._tidy()

    def discard(self, item: T) -> None:
        """Take an item out, if it is there."""
        if self._scores.pop(item, None) is not None:
            self._tidy()

    def first(self) -> T | None:
        """Find the item with the least score; None where there is none."""
        scores = self._scores
        if not scores:
            return None
        best: tuple[float, int, T] | None = None
        for heap in (self._heap, self._old):
            while heap and scores.get(heap[0][2]) != heap[0][0]:
                heappop(heap)
            if heap and (best is None or heap[0] < best):
                best = heap[0]
        return None if best is None else best[2]

    def _tidy(self) -> None:
        heap, old, scores = self._heap, self._old, self._scores
        if old:
            for _ in range(min(MOVES, len(old))):
                entry = old.pop()  # what is left of a heap without its last entry is one
                if scores.get(entry[2]) == entry[0]:
                    heappush(heap, entry)
        elif len(heap) > 2 * len(scores) + SLACK:
            self._heap, self._old = [], heap
