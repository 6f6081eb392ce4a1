"""Pages about to be written: laid out one after the other, buffers for one vectored write.

A payload that is stored as it is is written from the row it lies in; headers, and bodies that were
encoded, are put in aligned memory of their own.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from statewise.runtime.tiers.buffers import Bytes, Row, address_of, allocate
from statewise.runtime.tiers.disk_index import IndexRow
from statewise.runtime.tiers.page import round_up
from statewise.runtime.tiers.record import Header, encode_header


@dataclass(frozen=True, slots=True)
class Item:
    """One page: its header without a place, its body, the row it lies in, its time of use."""

    header: Header
    body: Bytes
    row: Row | None
    used_s: float

    @property
    def is_in_row(self) -> bool:
        """The row holds the body as it will be stored, padding included."""
        row = self.row
        return (
            row is not None and self.body.size == row.size and address_of(self.body) == row.address
        )


@dataclass(frozen=True, slots=True)
class Part:
    """What goes into one extent: buffers in order, their bytes, and the rows of the index."""

    buffers: list[Bytes]
    size_bytes: int
    rows: list[IndexRow]


class Batch:
    """Pages in the order they will be written."""

    def __init__(self, now_s: float) -> None:
        self._now_s = now_s
        self.items: deque[Item] = deque()
        self.keys: set[bytes] = set()
        self.payload_bytes = 0

    def __len__(self) -> int:
        return len(self.items)

    @property
    def is_empty(self) -> bool:
        """Nothing is left to write."""
        return not self.items

    @property
    def first_bytes(self) -> int:
        """Bytes of the next record."""
        return self.items[0].header.record_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all records."""
        return sum(item.header.record_bytes for item in self.items)

    def add(self, header: Header, body: Bytes, row: Row | None, used_s: float = 0.0) -> None:
        """Put a page at the end."""
        self.items.append(Item(header, body, row, used_s or self._now_s))
        self.keys.add(header.page.address.key)
        self.payload_bytes += header.payload_bytes

    def place(self, extent: int, container: bytes, offset: int, room: int) -> Part:
        """Take the pages that fit `room` bytes, at least the first, and lay them out."""
        taken: list[tuple[Item, Header]] = []
        size = 0
        while self.items and size + self.first_bytes <= room:
            item = self.items.popleft()
            taken.append((item, item.header.at(container, offset + size)))
            size += item.header.record_bytes
        assert taken, "a record larger than the room it was given"
        buffers, sums = _buffers(taken)
        rows = [
            _index_row(extent, header, checksum, item.used_s)
            for (item, header), checksum in zip(taken, sums, strict=True)
        ]
        return Part(buffers, size, rows)


def _buffers(taken: list[tuple[Item, Header]]) -> tuple[list[Bytes], list[int]]:
    """Memory to write, and the headers' checksums."""
    extra = sum(
        header.header_bytes + (0 if item.is_in_row else round_up(item.body.size))
        for item, header in taken
    )
    scratch = allocate(extra)
    at = 0
    buffers, sums = [], []
    for item, header in taken:
        data, checksum = encode_header(header)
        scratch[at : at + len(data)] = np.frombuffer(data, dtype=np.uint8)
        buffers.append(scratch[at : at + len(data)])
        sums.append(checksum)
        at += len(data)
        if item.is_in_row:
            assert item.row is not None
            item.row.clear_padding()
            buffers.append(item.row.whole)
        else:
            padded = round_up(item.body.size)
            scratch[at : at + item.body.size] = item.body
            buffers.append(scratch[at : at + padded])
            at += padded
    return buffers, sums


def _index_row(extent: int, header: Header, checksum: int, used_s: float) -> IndexRow:
    page = header.page
    return IndexRow(
        page.address.key,
        extent,
        header.offset,
        header.record_bytes,
        header.header_bytes,
        checksum,
        page.content,
        page.dependency,
        page.address.group,
        page.address.position,
        header.codec,
        header.sealing,
        page.created_s,
        used_s,
    )


def row_of_header(extent: int, header: Header) -> IndexRow:
    """Index row of a record that was found in an extent."""
    return _index_row(extent, header, header.header_sum, header.page.created_s)
