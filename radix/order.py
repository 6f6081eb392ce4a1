"""Items in ascending order of a score that is fixed between two uses: the next victim at once.

    put(item, score)    log n; again with another score: the old entry is left behind, dead
    discard(item)       its entry is left behind, dead
    first()             dead entries on top are dropped, amortised log n

When dead entries outnumber living ones the heap is made anew, so an item that has left the tree is
not held for long. Equal scores leave in the order in which they came.

This module does not know what a score means.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

SLACK = 64  # dead entries that are never worth a new heap

T = TypeVar("T")


class ScoreOrder(Generic[T]):
    """A set of items, each with a score; hashable by identity."""

    __slots__ = ("_heap", "_number", "_scores")

    def __init__(self) -> None:
        self._scores: dict[T, float] = {}
        self._heap: list[tuple[float, int, T]] = []  # (score, number of arrival, item)
        self._number = 0

    def __len__(self) -> int:
        return len(self._scores)

    def __contains__(self, item: object) -> bool:
        return item in self._scores

    def __iter__(self) -> Iterator[T]:
        """Every item, in no order."""
        return iter(self._scores)

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
        heap, scores = self._heap, self._scores
        while heap:
            score, _, item = heap[0]
            if scores.get(item) == score:
                return item
            heappop(heap)
        return None

    def _tidy(self) -> None:
        heap, scores = self._heap, self._scores
        if len(heap) > 2 * len(scores) + SLACK:
            # One living entry each: the same score may have been put, taken out and put again.
            living = {item: entry for entry in heap if scores.get(item := entry[2]) == entry[0]}
            heap[:] = living.values()
            heapify(heap)
