"""Reading pages out of extents: one read into one buffer for each run of neighbours.

A plain payload is used where it was read, between the headers: a medium reads one large piece of
memory faster than many small ones, and it is copied once, into the block it is for. A header is
believed if its checksum is the one that the index holds, and it names this place and this key.
Loads into blocks read plain pages by `disk_plain` first, which is quicker and only ever says yes.

This module does not know the catalog, and drops nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from statewise.runtime.tiers.body import Bodies, check_content
from statewise.runtime.tiers.buffers import Arena, Bytes, Row, Slab, Slabs, allocate
from statewise.runtime.tiers.disk_index import IndexRow
from statewise.runtime.tiers.extents import Extent, Extents
from statewise.runtime.tiers.page import GroupShape, PageRecord
from statewise.runtime.tiers.record import (
    Header,
    RecordError,
    check_body,
    check_place,
    decode_header,
)

MAX_FAILURES = 4  # pages of one run, before the others are taken to fail as well
MAX_RUN_BYTES = 4 << 20  # headers included: one read; larger ones fill colder memory


@dataclass(slots=True)
class Place:
    """A page to read: where it lies and what it should be."""

    index: int  # of the page in the caller's order
    at: IndexRow
    shape: GroupShape

    @property
    def is_direct(self) -> bool:
        """The stored body is the payload: what was read is the row."""
        size = self.at.record_bytes - self.at.header_bytes
        return not self.at.codec and not self.at.sealing and size == self.shape.row_bytes


@dataclass(frozen=True, slots=True)
class Buffers:
    """Memory to read into: whole runs, and rows by group for payloads that must be decoded."""

    slabs: Slabs
    arenas: Mapping[str, Arena]

    def discard(self, rows: Iterable[Row]) -> None:
        """Give back rows that `read_run`, or an arena, gave."""
        read: Counter[Slab] = Counter()
        for row in rows:
            if isinstance(row.owner, Slab):
                read[row.owner] += 1
            elif row.owner is self.arenas.get(row.group):
                self.arenas[row.group].give_back([row])
        for slab, count in read.items():
            slab.give_back(count)


_WHERE = slice(1, 3)  # extent and offset of an `IndexRow`
assert IndexRow._fields[:4] == ("key", "extent", "offset", "record_bytes")

Page = tuple[PageRecord, Row]
Result = Page | RecordError | OSError


def runs_of(places: Sequence[Place]) -> Iterator[list[Place]]:
    """Neighbours in one extent, at most `MAX_RUN_BYTES` together (or one page)."""
    run: list[Place] = []
    size, follows = 0, (0, 0)  # bytes of the run; where its next page would lie
    for place in sorted(places, key=lambda p: p.at[_WHERE]):
        _, extent, offset, record_bytes = place.at[:4]
        if run and (follows != (extent, offset) or size + record_bytes > MAX_RUN_BYTES):
            yield run
            run, size = [], 0
        run.append(place)
        size += record_bytes
        follows = (extent, offset + record_bytes)
    if run:
        yield run


def read_pages(
    extents: Extents, bodies: Bodies, buffers: Buffers, run: Sequence[Place]
) -> list[Result]:
    """`read_run`, and where that fails each page by itself: one bad place costs its own page.

    What cannot be read between others that can is damaged. Where the first `MAX_FAILURES` all
    fail, the medium is taken to, and is asked no more.
    """
    results = read_run(extents, bodies, buffers, run)
    if len(run) == 1 or not all(map(_is_unreadable, results)):
        return results
    for i, place in enumerate(run):
        results[i : i + 1] = read_run(extents, bodies, buffers, [place])
        if i + 1 == MAX_FAILURES and all(map(_is_unreadable, results)):
            return results
    if all(map(_is_unreadable, results)):
        return results
    return [RecordError("unreadable", str(r)) if _is_unreadable(r) else r for r in results]


def _is_unreadable(result: Result) -> bool:
    return isinstance(result, OSError) and not isinstance(result, FileNotFoundError)


def read_run(
    extents: Extents, bodies: Bodies, buffers: Buffers, run: Sequence[Place]
) -> list[Result]:
    """Read neighbours; a record and its row, or why there is none, for each of them in order.

    Rows are the caller's until `Buffers.discard`.
    """
    slab = buffers.slabs.take(sum(place.at.record_bytes for place in run))
    try:
        extent = extents.lease(run[0].at.extent)
        try:
            size = sum(place.at.record_bytes for place in run)
            total = extents.read(extent, [slab.memory[:size]], run[0].at.offset)
            results = _pages_of(run, slab, total, extent, bodies, buffers)
        finally:
            extents.release(extent)
    except OSError as error:
        results = [error] * len(run)
    if not slab.is_used:
        buffers.slabs.discard(slab)
    return results


def _pages_of(
    run: Sequence[Place], slab: Slab, total: int, extent: Extent, bodies: Bodies, buffers: Buffers
) -> list[Result]:
    results: list[Result] = []
    end = 0
    for place in run:
        start, end = end, end + place.at.record_bytes
        if end > total:
            results.append(RecordError("truncated", "the extent ends within the record"))
            continue
        try:
            results.append(_page_of(place, slab, start, end, extent, bodies, buffers))
        except RecordError as error:
            results.append(error)
    return results


def _page_of(
    place: Place,
    slab: Slab,
    start: int,
    end: int,
    extent: Extent,
    bodies: Bodies,
    buffers: Buffers,
) -> Page:
    """The page in bytes `start` to `end` of what was read. Raises RecordError."""
    shape = place.shape
    record = slab.memory[start:end]
    header = verified_header(place.at, extent, record.data)
    if place.is_direct:
        if header.payload_bytes != shape.block_bytes:
            raise RecordError("layout", "a payload of another size")
        check_content(header.page, bodies.secret)
        row = slab.row(start + place.at.header_bytes, end, shape.block_bytes, shape.name)
        row.clear_padding()
        return header.page, row
    rows = buffers.arenas[shape.name].take(1)
    assert rows, "rows for decoding are not bounded"
    body = record.data[header.header_bytes : header.header_bytes + header.body_bytes]
    try:
        page = bodies.decode(header, body, rows[0])
        check_content(page, bodies.secret)
    except RecordError:
        buffers.arenas[shape.name].give_back(rows)
        raise
    rows[0].clear_padding()
    return page, rows[0]


def verified_header(at: IndexRow, extent: Extent, head: memoryview) -> Header:
    """Header of a record, checked against index and place. Raises RecordError."""
    header = decode_header(head)
    if header.header_sum != at.header_sum or header.page.address.key != at.key:
        raise RecordError("stale", "the record is not the one that the index names")
    check_place(header, extent.container, at.offset)
    if header.record_bytes != at.record_bytes or header.codec != at.codec:
        raise RecordError("stale", "the record differs from the index")
    return header


def read_stored(extents: Extents, at: IndexRow) -> tuple[Header, Bytes]:
    """Header and stored body, both verified. Raises RecordError, OSError."""
    extent = extents.lease(at.extent)
    try:
        record = allocate(at.record_bytes)
        if extents.read(extent, [record], at.offset) < at.record_bytes:
            raise RecordError("truncated", "the extent ends within the record")
    finally:
        extents.release(extent)
    header = verified_header(at, extent, record.data)
    end = header.header_bytes + header.body_bytes
    body = record[header.header_bytes : end]
    check_body(header, body.data, record[end:].data)
    return header, body
