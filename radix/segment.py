"""A segment: one state group's share of one node, as a value.

Per page one column of an int32 table:

    row          meaning
    BLOCK        device block, -1 where the page is not on the device
    GENERATION   the pool's generation of that block when it was written
    STAMP        interned write version
    SEQ          write sequence number
    DEPENDENCY   SEQ of the page it was built over (index groups); -1 otherwise

What few pages have is kept aside and absent until used: `slow` (copies in slower tiers),
`invalid` (layers that failed validation), `checksums`.

Segments are never changed: an operation returns a new one, slices share memory. A match therefore
is a true snapshot for the price of one reference per node.

This module does not know leases, recency, or what a group needs.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Bool = NDArray[np.bool_]

BLOCK, GENERATION, STAMP, SEQ, DEPENDENCY = range(5)
NUM_ROWS = 5
SLOW_BLOCK, SLOW_TIER = range(2)
NUM_SLOW_ROWS = 2
MIXED = -2  # `Segment.stamp` where pages differ
FEW = 16  # pages that are looked at one by one: array operations would cost more
SEQ_MASK = 0x7FFFFFFF  # sequence numbers wrap: they are compared for equality only


class Tier(enum.IntEnum):
    """Where bytes are; ordered from fast to slow."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    REMOTE = 3


class PageAside(NamedTuple):
    """What only some pages have."""

    slow: Int32 | None = None  # [NUM_SLOW_ROWS, num_pages]: handle, tier; -1 for none
    invalid: Mapping[int, int] | None = None  # page -> bit mask of layers that may not be used
    checksums: NDArray[np.uint64] | None = None  # [num_pages, num_layers of the group]

    def part(self, start: int, stop: int) -> PageAside:
        """Pages [start, stop)."""
        bad = self.invalid and {
            page - start: mask for page, mask in self.invalid.items() if start <= page < stop
        }
        return PageAside(
            None if self.slow is None else self.slow[:, start:stop],
            bad or None,
            None if self.checksums is None else self.checksums[start:stop],
        )


NOTHING_ASIDE = PageAside()


class Segment:
    """One group's pages of one node; immutable."""

    __slots__ = ("aside", "first", "num_present", "stamp", "table")

    table: Int32  # [NUM_ROWS, num_pages]
    num_present: int  # pages on the device
    first: int  # the first of them; num_pages where there is none
    stamp: int  # of every device page, or MIXED
    aside: PageAside

    def __init__(
        self,
        table: Int32,
        num_present: int,
        stamp: int,
        aside: PageAside = NOTHING_ASIDE,
        first: int = -1,
    ) -> None:
        """`first`: -1 where the caller does not know it."""
        self.table = table
        self.num_present = num_present
        self.stamp = stamp
        self.aside = aside
        self.first = first if first >= 0 else presence(table[BLOCK])[1]

    @property
    def num_pages(self) -> int:
        """Pages of the run, resident or not."""
        num_pages: int = self.table.shape[1]
        return num_pages

    @property
    def blocks(self) -> Int32:
        """[num_pages] device blocks, -1 where absent."""
        row: Int32 = self.table[BLOCK]
        return row

    def is_whole(self, stamp: int) -> bool:
        """Every page is on the device, written under `stamp`, all layers valid."""
        return (
            self.num_present == self.table.shape[1]
            and (self.stamp == stamp or not self.num_present)
            and self.aside.invalid is None
        )

    def valid(self, stamp: int) -> Bool:
        """[num_pages] pages written under `stamp` whose layers are all valid."""
        good: Bool = self.table[STAMP] == stamp
        if self.aside.invalid is not None:
            good[list(self.aside.invalid)] = False
        return good

    def resident(self, stamp: int) -> Bool:
        """[num_pages] pages usable now."""
        present: Bool = self.table[BLOCK] >= 0
        return self.valid(stamp) & present

    def loadable(self, stamp: int) -> Bool:
        """[num_pages] pages usable now or after a load."""
        present: Bool = self.table[BLOCK] >= 0
        if self.aside.slow is not None:
            present = present | (self.aside.slow[SLOW_BLOCK] >= 0)
        return self.valid(stamp) & present

    def holds(self, start: int, stop: int, stamp: int) -> bool:
        """Whether `part(start, stop)` is whole."""
        if self.stamp == stamp and self.aside.invalid is None:
            return self.present_in(start, stop)[0] == stop - start
        return self.part(start, stop).is_whole(stamp)

    def part(self, start: int, stop: int) -> Segment:
        """Pages [start, stop), sharing memory."""
        table = self.table[:, start:stop]
        aside = self.aside if self.aside is NOTHING_ASIDE else self.aside.part(start, stop)
        size: int = table.shape[1]
        if not self.num_present:
            return Segment(table, 0, MIXED, aside, size)
        if self.stamp == MIXED:  # a part of a mixed run may be uniform
            return of_table(table, aside)
        if self.num_present == self.table.shape[1]:
            return Segment(table, size, self.stamp, aside, 0)
        present, first = self.present_in(start, start + size)
        return Segment(table, present, self.stamp if present else MIXED, aside, first)

    def present_in(self, start: int, stop: int) -> tuple[int, int]:
        """(number of pages of [start, stop) on the device, index of the first from `start`)."""
        if self.num_present == self.table.shape[1] - self.first:  # nothing is missing after it
            first = min(max(self.first, start), stop)
            return stop - first, first - start
        return presence(self.table[BLOCK, start:stop])

    def joined(self, other: Segment) -> Segment:
        """Append `other` to this run."""
        table = np.concatenate((self.table, other.table), axis=1)
        if self.num_present and other.num_present:
            stamp = self.stamp if self.stamp == other.stamp else MIXED
        else:
            stamp = self.stamp if self.num_present else other.stamp
        aside = NOTHING_ASIDE
        if self.aside is not NOTHING_ASIDE or other.aside is not NOTHING_ASIDE:
            aside = _join_aside(self, other)
        first = self.first if self.num_present else self.table.shape[1] + other.first
        return Segment(table, self.num_present + other.num_present, stamp, aside, first)

    def with_pages(
        self, pages: NDArray[np.intp], columns: Int32, sums: NDArray[np.uint64] | None = None
    ) -> Segment:
        """`columns` [NUM_ROWS, len(pages)] put at `pages`; these pages' layers are all valid.

        `sums` [len(pages), num_layers] are their checksums, if any are kept.
        """
        table = self.table.copy()
        table[:, pages] = columns
        invalid = self.aside.invalid
        if invalid is not None:
            filled = set(pages.tolist())
            invalid = {p: mask for p, mask in invalid.items() if p not in filled} or None
        checksums = self.aside.checksums
        some = checksums if checksums is not None else sums
        if some is not None:
            checksums = _checksums_of(self, some.shape[1]).copy()
            checksums[pages] = 0 if sums is None else sums
        return of_table(table, PageAside(self.aside.slow, invalid, checksums))

    def with_invalid(self, masks: Mapping[int, int]) -> Segment:
        """`masks` (page -> layers that may not be used) added to what is marked already."""
        invalid = dict(self.aside.invalid or {})
        for page, mask in masks.items():
            invalid[page] = invalid.get(page, 0) | mask
        return self.with_aside(self.aside._replace(invalid=invalid or None))

    def without(self, pages: NDArray[np.intp]) -> Segment:
        """`pages` off the device; copies in slower tiers stay."""
        table = self.table.copy()
        table[BLOCK, pages] = -1
        return of_table(table, self.aside)

    def without_run(self, start: int, stop: int) -> Segment:
        """Pages [start, stop), all of them on the device, off it; copies in slower tiers stay."""
        table = self.table.copy()
        table[BLOCK, start:stop] = -1
        left = self.num_present + start - stop
        if self.stamp == MIXED:  # what is left may be uniform
            return of_table(table, self.aside)
        if not left:
            return Segment(table, 0, MIXED, self.aside, table.shape[1])
        first = self.first
        if start == first:
            first = stop
            if self.num_present != table.shape[1] - start:  # there are gaps after it
                first += int((table[BLOCK, stop:] >= 0).argmax())
        return Segment(table, left, self.stamp, self.aside, first)

    def with_aside(self, aside: PageAside) -> Segment:
        """Keep the table, with other pages' extras."""
        return Segment(self.table, self.num_present, self.stamp, aside, self.first)


def presence(blocks: Int32) -> tuple[int, int]:
    """(number of pages on the device, index of the first; number of pages where there is none)."""
    size = len(blocks)
    if size <= FEW:
        row = blocks.tolist()
        if not row or min(row) >= 0:
            return size, 0
        there = [i for i, block in enumerate(row) if block >= 0]
        return len(there), there[0] if there else size
    absent = blocks < 0
    present = size - int(np.count_nonzero(absent))
    if present == size:
        return size, 0
    return present, int(absent.argmin()) if present else size


def of_table(table: Int32, aside: PageAside = NOTHING_ASIDE) -> Segment:
    """Segment of a table, its summary counted."""
    present, first = presence(table[BLOCK])
    stamps = table[STAMP] if present == table.shape[1] else table[STAMP, table[BLOCK] >= 0]
    uniform = MIXED
    if present and bool((stamps == stamps[0]).all()):
        uniform = int(stamps[0])
    if all(part is None for part in aside):
        aside = NOTHING_ASIDE
    return Segment(table, present, uniform, aside, first)


def new_columns(blocks: Int32, generations: Int32 | None, stamp: int, seq: int) -> Int32:
    """[NUM_ROWS, n] columns of freshly written pages; `generations` is indexed by block."""
    table = np.empty((NUM_ROWS, len(blocks)), dtype=np.int32)
    table[BLOCK] = blocks
    table[GENERATION] = 0 if generations is None else generations.take(blocks)
    table[STAMP] = stamp
    table[SEQ] = seq
    table[DEPENDENCY] = -1
    return table


def empty_segment() -> Segment:
    """Make a segment of no pages."""
    return Segment(np.empty((NUM_ROWS, 0), dtype=np.int32), 0, MIXED, NOTHING_ASIDE, 0)


def _join_aside(first: Segment, second: Segment) -> PageAside:
    size = first.num_pages
    invalid = dict(first.aside.invalid or {})
    for page, mask in (second.aside.invalid or {}).items():
        invalid[page + size] = mask
    slow = None
    if first.aside.slow is not None or second.aside.slow is not None:
        slow = np.concatenate((_slow_of(first), _slow_of(second)), axis=1)
    checksums = None
    some = first.aside.checksums if first.aside.checksums is not None else second.aside.checksums
    if some is not None:
        width = some.shape[1]
        checksums = np.concatenate((_checksums_of(first, width), _checksums_of(second, width)))
    return PageAside(slow, invalid or None, checksums)


def _slow_of(segment: Segment) -> Int32:
    if segment.aside.slow is not None:
        return segment.aside.slow
    return np.full((NUM_SLOW_ROWS, segment.num_pages), -1, dtype=np.int32)


def _checksums_of(segment: Segment, width: int) -> NDArray[np.uint64]:
    if segment.aside.checksums is not None:
        return segment.aside.checksums
    return np.zeros((segment.num_pages, width), dtype=np.uint64)
