"""Reading pages out of extents: one vectored read for each run of neighbours.

Headers go to aligned memory of their own, plain payloads straight into the rows they are for. A
header is believed if its checksum is the one that the index holds, and it names this place and
this key.

This module does not know the catalog, and drops nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from statewise.runtime.tiers.body import Bodies, check_content
from statewise.runtime.tiers.buffers import Bytes, Row, allocate
from statewise.runtime.tiers.disk_index import IndexRow
from statewise.runtime.tiers.extents import Extent, Extents
from statewise.runtime.tiers.page import PageRecord
from statewise.runtime.tiers.record import (
    Header,
    RecordError,
    check_body,
    check_place,
    decode_header,
)

MAX_RUN_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """A page to read: where it lies and the row its payload is for."""

    index: int  # of the page in the caller's order
    at: IndexRow
    row: Row

    @property
    def is_direct(self) -> bool:
        """The stored body is the payload: it can be read into the row."""
        size = self.at.record_bytes - self.at.header_bytes
        return not self.at.codec and not self.at.sealing and size == self.row.whole.size


Result = PageRecord | RecordError | OSError


def runs_of(places: Sequence[Place]) -> Iterator[list[Place]]:
    """Neighbours in one extent, at most `MAX_RUN_BYTES` together (or one page)."""
    run: list[Place] = []
    size = 0
    for place in sorted(places, key=lambda p: (p.at.extent, p.at.offset)):
        at = place.at
        follows = run and run[-1].at.extent == at.extent
        follows = follows and run[-1].at.offset + run[-1].at.record_bytes == at.offset
        if run and (not follows or size + at.record_bytes > MAX_RUN_BYTES):
            yield run
            run, size = [], 0
        run.append(place)
        size += at.record_bytes
    if run:
        yield run


def read_run(extents: Extents, bodies: Bodies, run: Sequence[Place]) -> list[Result]:
    """Read neighbours; a record, or why there is none, for each of them in order."""
    try:
        extent = extents.lease(run[0].at.extent)
    except OSError as error:
        return [error] * len(run)
    try:
        return _read_leased(extents, extent, bodies, run)
    except OSError as error:
        return [error] * len(run)
    finally:
        extents.release(extent)


def _read_leased(
    extents: Extents, extent: Extent, bodies: Bodies, run: Sequence[Place]
) -> list[Result]:
    scratch = allocate(sum(p.at.header_bytes if p.is_direct else p.at.record_bytes for p in run))
    buffers: list[Bytes] = []
    heads: list[Bytes] = []
    at = 0
    for place in run:
        size = place.at.header_bytes if place.is_direct else place.at.record_bytes
        heads.append(scratch[at : at + size])
        buffers.append(heads[-1])
        if place.is_direct:
            buffers.append(place.row.whole)
        at += size
    total = extents.read(extent, buffers, run[0].at.offset)
    results: list[Result] = []
    end = 0
    for place, head in zip(run, heads, strict=True):
        end += place.at.record_bytes
        if end > total:
            results.append(RecordError("truncated", "the extent ends within the record"))
        else:
            results.append(_page_of(place, head, extent, bodies))
    return results


def _page_of(place: Place, head: Bytes, extent: Extent, bodies: Bodies) -> PageRecord | RecordError:
    try:
        header = verified_header(place.at, extent, head.data)
        if place.is_direct:
            if header.payload_bytes != place.row.size:
                raise RecordError("layout", "a payload of another size")
            page = header.page
        else:
            body = head.data[header.header_bytes : header.header_bytes + header.body_bytes]
            page = bodies.decode(header, body, place.row)
        check_content(page, bodies.secret)
    except RecordError as error:
        return error
    finally:
        place.row.clear_padding()
    return page


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
