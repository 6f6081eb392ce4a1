"""What an operator does with a disk cache that no server has open: list, verify, collect, copy.

    list_pages    what is there, by group and stamp       works beside a running server
    verify        every record read and checked           needs the directory for itself
                                                          (a read-only one: without a lock)
    collect       expired pages, sparse extents           needs the directory for itself
    export_pages  all records into one file               an extent: it describes itself
    import_pages  the records of such a file              damaged and known ones are left out

Pages of every model, layout and key are handled: nothing here decodes a payload, and sealed pages
stay sealed. This module prints nothing: `progress` is called with (done, total) counts.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from statewise.runtime.clock import Clock
from statewise.runtime.tiers.body import Bodies
from statewise.runtime.tiers.buffers import Bytes, allocate
from statewise.runtime.tiers.disk import DiskOptions, DiskTier
from statewise.runtime.tiers.disk_index import FILE_NAME, DiskIndex, IndexUnusableError
from statewise.runtime.tiers.disk_open import FORMAT_FILE, check_is_ours
from statewise.runtime.tiers.disk_view import DiskView
from statewise.runtime.tiers.extents import EXTENT_HEADER_BYTES, Extent, Extents
from statewise.runtime.tiers.files import Files, can_write
from statewise.runtime.tiers.record import Header, RecordError, check_body
from statewise.runtime.tiers.store import NO_HANDLE, TierError
from statewise.runtime.tiers.writing import Batch

Progress = Callable[[int, int], None]
BATCH_BYTES = 8 << 20
EXPORT_NUMBER = 1


def _quiet(_done: int, _total: int) -> None:
    """Show nothing."""


@dataclass
class GroupListing:
    """Pages of one state group. Bytes are those of whole records; times are since the epoch."""

    num_pages: int = 0
    size_bytes: int = 0
    longest: int = 0  # tokens up to the end of the deepest page
    oldest_s: float = 0.0
    newest_used_s: float = 0.0


@dataclass
class VerifyReport:
    """What `verify` found. `damaged` counts kinds; damaged pages were dropped if `has_dropped`."""

    num_whole: int = 0
    size_bytes: int = 0
    damaged: Counter[str] = field(default_factory=Counter)
    has_dropped: bool = True


class _AnyPages(Bodies):
    """Handles records as they are: whatever codec or key they were made with."""

    def can_decode(self, codec: int, sealing: int) -> bool:
        """Every record counts."""
        return True


def list_pages(directory: Path) -> dict[str, GroupListing]:
    """Pages by group, from the index. Raises TierError where there is no cache."""
    check_is_ours(_existing(directory))
    try:
        index = DiskIndex(directory / FILE_NAME, read_only=True)
    except (IndexUnusableError, sqlite3.Error) as error:
        raise TierError(
            f"the index of {directory} cannot be read: {error}; "
            "`statewise cache verify` makes it anew from the pages, as a server's start does"
        ) from error
    groups: dict[str, GroupListing] = {}
    try:
        for row in index.pages():
            one = groups.setdefault(row.group, GroupListing(oldest_s=row.created_s))
            one.num_pages += 1
            one.size_bytes += row.record_bytes
            one.longest = max(one.longest, row.position)
            one.oldest_s = min(one.oldest_s, row.created_s)
            one.newest_used_s = max(one.newest_used_s, row.used_s)
    finally:
        index.close()
    return groups


def _existing(directory: Path) -> Path:
    if not (directory / FORMAT_FILE).exists():
        raise TierError(f"{directory} holds no disk cache")
    return directory


@contextmanager
def opened(directory: Path, clock: Clock, ttl_s: float = 0.0) -> Iterator[DiskTier]:
    """A disk cache for maintenance. Raises TierError where a server has it."""
    options = DiskOptions(budget_bytes=1 << 62, extent_bytes=64 << 20, ttl_s=ttl_s)
    disk = DiskTier(directory, (), options, clock, _AnyPages())
    try:
        yield disk
    finally:
        disk.close()


@contextmanager
def readable(directory: Path, clock: Clock) -> Iterator[DiskTier | DiskView]:
    """A disk cache to be read through: its own owner's where it can be written."""
    if can_write(directory):
        with opened(directory, clock) as disk:
            yield disk
        return
    view = DiskView(directory)
    try:
        yield view
    finally:
        view.close()


def verify(directory: Path, clock: Clock, progress: Progress = _quiet) -> VerifyReport:
    """Read every record, check header, place and body, and drop what is damaged.

    In a directory that cannot be written nothing is dropped.
    """
    report = VerifyReport()
    with readable(_existing(directory), clock) as disk:
        report.has_dropped = isinstance(disk, DiskTier)
        handles = disk.all_handles()
        for done, handle in enumerate(handles):
            progress(done, len(handles))
            found = disk.read_record(handle)
            if isinstance(found, RecordError):
                report.damaged[found.kind] += 1
            elif isinstance(found, OSError):
                report.damaged["unreadable"] += 1
            else:
                report.num_whole += 1
                report.size_bytes += found[0].record_bytes
        progress(len(handles), len(handles))
    return report


def collect(directory: Path, clock: Clock, ttl_s: float = 0.0, progress: Progress = _quiet) -> int:
    """Drop pages older than `ttl_s` (0: none), compact; returns the bytes given back."""
    with opened(_existing(directory), clock, ttl_s) as disk:
        given_back = disk.collect(progress)
        disk.compact_index()
        return given_back


def export_pages(directory: Path, target: Path, clock: Clock, progress: Progress = _quiet) -> int:
    """Copy all whole pages into a new file; returns how many. Raises TierError."""
    if target.exists():
        raise TierError(f"{target} exists")
    files = Files()
    with readable(_existing(directory), clock) as disk:
        handles = disk.all_handles()
        records = _records(disk, handles, progress)
        used = disk.status().used_bytes if isinstance(disk, DiskTier) else disk.used_bytes
        try:
            return _write_export(files, target, records, used)
        except OSError as error:
            files.remove(target)
            raise TierError(f"{target}: {error}") from error


def _records(
    disk: DiskTier | DiskView, handles: list[int], progress: Progress
) -> Iterator[tuple[Header, Bytes]]:
    for done, handle in enumerate(handles):
        progress(done, len(handles))
        found = disk.read_record(handle)
        if not isinstance(found, RecordError | OSError):
            yield found
    progress(len(handles), len(handles))


def _write_export(
    files: Files, target: Path, records: Iterator[tuple[Header, Bytes]], size_bytes: int
) -> int:
    extents = _SingleFile(target, files)
    extent = extents.create(size_bytes + BATCH_BYTES)
    count = 0
    batch = Batch(0.0)
    for header, body in records:
        batch.add(header, body, None)
        if batch.total_bytes >= BATCH_BYTES:
            count += _append(extents, extent, batch)
    if not batch.is_empty:
        count += _append(extents, extent, batch)
    extents.seal(extent)
    extents.close()
    return count


def _append(extents: Extents, extent: Extent, batch: Batch) -> int:
    part = batch.place(extent.id, extent.container, extent.cursor, extent.room)
    assert batch.is_empty, "the file was made large enough"
    extents.append(extent, part.buffers, part.size_bytes)
    return len(part.rows)


class _SingleFile(Extents):
    """One extent, in a file of any name."""

    def __init__(self, path: Path, files: Files) -> None:
        super().__init__(path.resolve().parent, files)
        self._path = path.resolve()

    def path_of(self, extent: int) -> Path:
        """Where the extent lies."""
        return self._path

    def on_disk(self) -> dict[int, Path]:
        """Nothing else is looked at."""
        return {}


@dataclass
class ImportReport:
    """What `import_pages` did. `lost_bytes`: of the file, where no page could be made out."""

    num_new: int = 0
    num_known: int = 0
    num_damaged: int = 0
    lost_bytes: int = 0


def import_pages(
    directory: Path, source: Path, clock: Clock, progress: Progress = _quiet
) -> ImportReport:
    """Take the whole pages of an exported file into a cache; the directory may be new.

    Raises TierError for a file that is no export, and where the directory cannot be made, a
    server has it, or it takes no more pages: what it took by then stays. A directory is made only
    for a file that is an export.
    """
    files = Files()
    extents = _SingleFile(source, files)
    try:
        extent = extents.adopt(EXPORT_NUMBER, source)
    except (RecordError, OSError) as error:
        raise TierError(f"{source} is no exported cache: {error}") from error
    report = ImportReport()
    try:
        _make_directory(directory)
        with opened(directory, clock) as disk:
            batch: list[tuple[Header, Bytes]] = []
            for header, body in _new_pages(disk, extents, extent, report, progress):
                batch.append((header, body))
                if sum(one.record_bytes for one, _ in batch) >= BATCH_BYTES:
                    _take_in(disk, batch, report)
                    batch = []
            _take_in(disk, batch, report)
        progress(extent.size_bytes, extent.size_bytes)
    finally:
        extents.close()
    return report


def _new_pages(
    disk: DiskTier, extents: Extents, extent: Extent, report: ImportReport, progress: Progress
) -> Iterator[tuple[Header, Bytes]]:
    """Whole pages of a file that the cache has not; the others are counted."""
    end = EXTENT_HEADER_BYTES
    seen: set[bytes] = set()
    for header in extents.scan(extent):
        progress(header.offset, extent.size_bytes)
        report.lost_bytes += header.offset - end
        end = header.offset + header.record_bytes
        key = header.page.address.key
        if key in seen or disk.find([key]) != [NO_HANDLE]:
            report.num_known += 1
            continue
        body = _body_of(extents, extent, header)
        if body is None:
            report.num_damaged += 1
            continue
        seen.add(key)
        yield header, body
    report.lost_bytes += extent.size_bytes - end


def _take_in(disk: DiskTier, batch: list[tuple[Header, Bytes]], report: ImportReport) -> None:
    taken = disk.take_records(batch)
    report.num_new += taken
    if taken < len(batch):
        raise TierError(
            f"{disk.directory} took {report.num_new:,} pages and then no more; "
            "make room there and import again: known pages are left out"
        )


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise TierError(f"cache directory {directory}: {error}") from error


def _body_of(extents: Extents, extent: Extent, header: Header) -> Bytes | None:
    """Verified body of a record; None for a damaged one."""
    record = allocate(header.record_bytes)
    leased = extents.lease(extent.id)
    try:
        extents.read(leased, [record], header.offset)
        end = header.header_bytes + header.body_bytes
        body = record[header.header_bytes : end]
        check_body(header, body.data, record[end:].data)
    except (RecordError, OSError):
        return None
    finally:
        extents.release(leased)
    return body
