"""Extents: large files that records are appended to, read from, and deleted with.

    extent   = header (4096 bytes) | record | record | ... | reserved room

A page is never changed in place and never deleted alone: an extent goes as a whole, after the
pages worth keeping were copied out. Only what must never be found again loses its head (`blank`).
New records go to one extent at a time, so writing is sequential, and pages written together are
read together. An extent is sealed when it is full or when its writer has ended.

This module does not know keys or recency, and does not verify bodies.
"""

from __future__ import annotations

import errno
import secrets
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from statewise.runtime.tiers.buffers import Bytes, allocate
from statewise.runtime.tiers.files import Files
from statewise.runtime.tiers.page import ALIGNMENT
from statewise.runtime.tiers.record import (
    CONTAINER_BYTES,
    Header,
    RecordError,
    check_place,
    decode_header,
    peek_sizes,
)

EXTENT_MAGIC = b"SWEXTENT"
EXTENT_VERSION = 1
EXTENT_HEADER_BYTES = ALIGNMENT
SUFFIX = ".swx"
MAX_OPEN = 64
_HEADER = struct.Struct("<8sQHH4x16sQ")  # magic, checksum, version, flags, container, size
_SCAN_BYTES = 1 << 20


def encode_extent_header(container: bytes, size_bytes: int) -> bytes:
    """4096 bytes at the start of an extent."""
    out = bytearray(EXTENT_HEADER_BYTES)
    _HEADER.pack_into(out, 0, EXTENT_MAGIC, 0, EXTENT_VERSION, 0, container, size_bytes)
    struct.pack_into("<Q", out, 8, xxhash.xxh3_64_intdigest(memoryview(out)[16:]))
    return bytes(out)


def decode_extent_header(data: memoryview) -> bytes:
    """Container id of an extent. Raises RecordError."""
    if len(data) < EXTENT_HEADER_BYTES:
        raise RecordError("truncated", "too short for an extent")
    magic, checksum, version, _flags, container, _size = _HEADER.unpack_from(data, 0)
    if magic != EXTENT_MAGIC:
        raise RecordError("magic", "not an extent")
    if xxhash.xxh3_64_intdigest(data[16:EXTENT_HEADER_BYTES]) != checksum:
        raise RecordError("header", "the extent's header is damaged")
    if version != EXTENT_VERSION:
        raise RecordError("version", f"extent format {version}, this is {EXTENT_VERSION}")
    found: bytes = container
    return found


@dataclass(slots=True, eq=False)
class Extent:
    """One file. `cursor` is where the next record goes; `size_bytes` what the file occupies."""

    id: int
    container: bytes
    path: Path
    size_bytes: int
    cursor: int
    fd: int = -1
    readers: int = 0
    is_sealed: bool = False
    is_gone: bool = False

    @property
    def room(self) -> int:
        """Bytes that still fit."""
        return self.size_bytes - self.cursor


class Extents:
    """The extents of one directory. Raises OSError as the file system does. Thread-safe."""

    def __init__(self, directory: Path, files: Files) -> None:
        self._directory = directory
        self._files = files
        self._lock = threading.Lock()
        self._extents: dict[int, Extent] = {}
        self._open: OrderedDict[int, Extent] = OrderedDict()  # for reading, least recent first

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        with self._lock:
            return sum(extent.size_bytes for extent in self._extents.values())

    def all(self) -> list[Extent]:
        """Extents, oldest first."""
        with self._lock:
            return [self._extents[i] for i in sorted(self._extents)]

    def get(self, extent: int) -> Extent | None:
        """Extent by number."""
        with self._lock:
            return self._extents.get(extent)

    def path_of(self, extent: int) -> Path:
        """Where an extent lies."""
        return self._directory / f"{extent:08d}{SUFFIX}"

    def on_disk(self) -> dict[int, Path]:
        """Extent files that are there, by number, known or not."""
        found = {}
        for path in sorted(self._directory.glob(f"*{SUFFIX}")):
            if path.stem.isdecimal():
                found[int(path.stem)] = path
        return found

    # ---------------------------------------------------------------- writing

    def create(self, size_bytes: int) -> Extent:
        """Create a new extent with its header written and its room reserved."""
        with self._lock:
            number = max([*self._extents, *self.on_disk()], default=0) + 1
        container = secrets.token_bytes(CONTAINER_BYTES)
        path = self.path_of(number)
        fd = self._files.create(path, size_bytes)
        try:
            header = allocate(EXTENT_HEADER_BYTES)
            header.data[:] = encode_extent_header(container, size_bytes)
            self._files.write(fd, [header], 0)
            self._files.sync(fd)
            self._files.sync_directory(self._directory)
        except OSError:
            self._files.close(fd)
            self._files.remove(path)
            raise
        extent = Extent(number, container, path, size_bytes, EXTENT_HEADER_BYTES, fd)
        with self._lock:
            self._extents[number] = extent
        return extent

    def append(self, extent: Extent, buffers: list[Bytes], size: int) -> None:
        """Write `size` bytes at the cursor and wait until they are on the medium."""
        assert size <= extent.room, "the extent is full"
        self._files.write(extent.fd, buffers, extent.cursor)
        self._files.sync(extent.fd)
        extent.cursor += size

    def seal(self, extent: Extent) -> None:
        """No more records: give back the reserved room."""
        if extent.is_sealed:
            return
        extent.is_sealed = True
        with self._lock:
            self._open[extent.id] = extent
            self._close_surplus()
        self.trim(extent, extent.cursor)

    def blank(self, number: int, offset: int) -> None:
        """Overwrite the head of the record at `offset`: it is a record no more."""
        extent = self.get(number)
        if extent is None:
            return
        fd = self._files.open_again(extent.path)
        try:
            self._files.write(fd, [allocate(ALIGNMENT)], offset)
            self._files.sync(fd)
        finally:
            self._files.close(fd)

    # ---------------------------------------------------------------- reading

    def adopt(self, number: int, path: Path) -> Extent:
        """Take in a file that is there, sealed. Raises RecordError."""
        fd = self._files.open(path)
        try:
            header = allocate(EXTENT_HEADER_BYTES)
            self._files.read(fd, [header], 0)
            container = decode_extent_header(header.data)
        finally:
            self._files.close(fd)
        size = path.stat().st_size
        extent = Extent(number, container, path, size, size, is_sealed=True)
        with self._lock:
            self._extents[number] = extent
        return extent

    def trim(self, extent: Extent, end: int) -> None:
        """Cut off what lies behind `end`."""
        end = max(end, EXTENT_HEADER_BYTES)
        if end < extent.size_bytes:
            self._files.truncate(extent.path, end)
            extent.size_bytes = extent.cursor = end

    def lease(self, number: int) -> Extent:
        """Extent by number, open for reading until `release`; OSError where it cannot be."""
        with self._lock:
            extent = self._extents.get(number)
            if extent is None:
                raise FileNotFoundError(errno.ENOENT, f"extent {number} is gone")
            if extent.fd < 0:
                extent.fd = self._files.open(extent.path)
                self._open[number] = extent
            elif number in self._open:
                self._open.move_to_end(number)
            extent.readers += 1  # before others are closed: not this one
            self._close_surplus()
            return extent

    def release(self, extent: Extent) -> None:
        """Give up a lease."""
        with self._lock:
            extent.readers -= 1
            if extent.is_gone and not extent.readers:
                self._files.close(extent.fd)
                extent.fd = -1

    def _close_surplus(self) -> None:
        for number in list(self._open):
            if len(self._open) <= MAX_OPEN:
                return
            extent = self._open[number]
            if not extent.readers:
                self._files.close(extent.fd)
                extent.fd = -1
                del self._open[number]

    def read(self, extent: Extent, buffers: list[Bytes], offset: int) -> int:
        """Fill buffers from a leased extent; returns how many bytes there were."""
        return self._files.read(extent.fd, buffers, offset)

    @property
    def has_own_reads(self) -> bool:
        """Whether only `read` may read: an extent's descriptor is not enough."""
        return self._files.has_own_reads

    def remove(self, extent: Extent) -> None:
        """Delete a file; who reads it at the moment may go on."""
        with self._lock:
            self._extents.pop(extent.id, None)
            self._open.pop(extent.id, None)
            extent.is_gone = True
            if not extent.readers and extent.fd >= 0:
                self._files.close(extent.fd)
                extent.fd = -1
        self._files.remove(extent.path)

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            for extent in self._extents.values():
                if extent.fd >= 0:
                    self._files.close(extent.fd)
                    extent.fd = -1
            self._open.clear()

    def scan(self, extent: Extent) -> Iterator[Header]:
        """Headers of the records found in an extent, in order; damaged places are stepped over.

        A header says that a record was begun here. Whether its body is whole shows when it is
        read: its checksum covers it.
        """
        self.lease(extent.id)
        try:
            yield from scan_file(self._files, extent)
        finally:
            self.release(extent)


class _Window:
    """A stretch of a file in memory, moved as needed."""

    def __init__(self, files: Files, fd: int, size: int) -> None:
        self._files, self._fd, self._size = files, fd, size
        self._buffer = allocate(_SCAN_BYTES)
        self._start = self._end = 0

    def at(self, offset: int, size: int) -> memoryview:
        """`size` bytes at an aligned offset, fewer at the end of the file."""
        size = min(size, _SCAN_BYTES)
        if not (self._start <= offset and offset + size <= self._end):
            self._start = offset
            self._end = offset + self._files.read(self._fd, [self._buffer], offset)
        return self._buffer.data[offset - self._start : min(offset + size, self._end) - self._start]


def scan_file(files: Files, extent: Extent) -> Iterator[Header]:
    """`Extents.scan` over an extent that is open."""
    window = _Window(files, extent.fd, extent.size_bytes)
    offset = EXTENT_HEADER_BYTES
    while offset < extent.size_bytes:
        header = _header_at(window, extent, offset)
        if header is None:
            offset += ALIGNMENT
            continue
        yield header
        offset += header.record_bytes


def _header_at(window: _Window, extent: Extent, offset: int) -> Header | None:
    try:
        size, _record = peek_sizes(window.at(offset, ALIGNMENT))
        header = decode_header(window.at(offset, size))
        check_place(header, extent.container, offset)
    except RecordError:
        return None
    return header if offset + header.record_bytes <= extent.size_bytes else None
