"""Opening a disk tier's directory: whose it is, what is in it, what of that can be used.

    directory/ (0700)      lock  format  index.sqlite  extents/00000001.swx ...
    index usable           its rows, less those whose extent is gone, foreign or too short
    extent not indexed     scanned: its intact headers become rows
    index unusable         deleted; every extent is scanned
    extent of another format, or damaged at its start: deleted

Nothing is read that is not checked, and nothing outside these names is touched.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from statewise.runtime.tiers.body import Bodies
from statewise.runtime.tiers.disk_index import (
    FILE_NAME,
    SUFFIXES,
    DiskIndex,
    ExtentRow,
    IndexRow,
    IndexUnusableError,
    is_plausible,
    remove_index,
)
from statewise.runtime.tiers.extents import Extent, Extents
from statewise.runtime.tiers.files import FILE_MODE, DirectoryLock, Files
from statewise.runtime.tiers.record import RecordError
from statewise.runtime.tiers.store import Counters, TierError
from statewise.runtime.tiers.writing import row_of_header

logger = logging.getLogger(__name__)

FORMAT_FILE = "format"
FORMAT = {"format": "statewise disk cache", "version": 1}
EXTENTS = "extents"
STANDARD = {"lock", "lost+found", "writable"}  # in a directory that is as good as empty
OWN = {FORMAT_FILE, EXTENTS, *(FILE_NAME + suffix for suffix in SUFFIXES)}


@dataclass
class Opened:
    """An owned directory, and the pages that can be used."""

    lock: DirectoryLock
    index: DiskIndex
    extents: Extents
    rows: list[IndexRow]


def check_is_ours(directory: Path) -> None:
    """TierError for a directory that holds something and is not a disk cache."""
    try:
        text = (directory / FORMAT_FILE).read_text()
        ours = STANDARD | (OWN if not text else set())
    except FileNotFoundError:
        text, ours = "", STANDARD
    except (OSError, ValueError):
        text, ours = "?", set()
    if not text:  # never made, or not to its end: by a kill, or a power failure
        names = {entry.name for entry in directory.iterdir()} - ours
        if names:
            raise TierError(
                f"{directory} holds other files ({sorted(names)[0]}, ...) and is no cache "
                "directory; name an empty or a new one"
            )
        return
    try:
        found = json.loads(text)
        name = found.get("format") if isinstance(found, dict) else None
    except ValueError:
        name = None
    if name != FORMAT["format"]:
        raise TierError(f"{directory / FORMAT_FILE} is not of a disk cache; name another directory")


def open_directory(directory: Path, files: Files, bodies: Bodies, counters: Counters) -> Opened:
    """Own a directory and take stock of it. Raises TierError, naming the directory."""
    try:
        files.make_directory(directory)
        lock = DirectoryLock(directory)
    except OSError as error:
        raise TierError(
            f"disk cache directory {directory}: {error}; name one that can be made and written"
        ) from error
    try:
        check_is_ours(directory)
    except BaseException:
        lock.withdraw()
        raise
    try:
        _write_format(directory)
        files.make_directory(directory / EXTENTS)
        index, extents, rows = _open_all(directory, files, counters)
    except (OSError, sqlite3.Error, IndexUnusableError) as error:
        lock.release()
        raise TierError(f"disk cache directory {directory}: {error}") from error
    except BaseException:
        lock.release()
        raise
    usable = [row for row in rows if bodies.can_decode(row.codec, row.sealing)]
    counters.add("undecodable", len(rows) - len(usable))
    return Opened(lock, index, extents, usable)


def _write_format(directory: Path) -> None:
    path = directory / FORMAT_FILE
    path.touch(mode=FILE_MODE)
    if not path.stat().st_size:
        with path.open("w") as file:
            file.write(json.dumps(FORMAT) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _open_all(
    directory: Path, files: Files, counters: Counters
) -> tuple[DiskIndex, Extents, list[IndexRow]]:
    """Index, extents and usable rows; an index that cannot be used is made anew."""
    path = directory / FILE_NAME
    index: DiskIndex | None = None
    try:
        path.touch(mode=FILE_MODE)
        index = DiskIndex(path)
        extents = Extents(directory / EXTENTS, files)
        return index, extents, _take_stock(extents, index, files, counters)
    except (IndexUnusableError, sqlite3.Error) as error:
        logger.warning("the index of %s is made anew: %s", directory, error)
        counters.add("index_rebuilt")
    if index is not None:
        index.close()
    remove_index(directory)
    path.touch(mode=FILE_MODE)
    index = DiskIndex(path)
    extents = Extents(directory / EXTENTS, files)
    return index, extents, _take_stock(extents, index, files, counters)


def _take_stock(
    extents: Extents, index: DiskIndex, files: Files, counters: Counters
) -> list[IndexRow]:
    known = {row.id: row for row in index.extents()}
    on_disk = extents.on_disk()
    for gone in sorted(known.keys() - on_disk.keys()):
        counters.add("extents_lost")
        index.drop_extent(gone)
    by_extent: dict[int, list[IndexRow]] = {}
    for row in index.pages():
        by_extent.setdefault(row.extent, []).append(row)
    rows = []
    for number, path in on_disk.items():
        extent = _adopt(extents, files, number, path, counters)
        if extent is None:
            index.drop_extent(number)
            continue
        indexed = known.get(number)
        if indexed is not None and indexed.container == extent.container:
            found = _within(extent, by_extent.get(number, []), index, counters)
        else:
            found = _scanned(extents, extent, index, counters)
        if not found:
            index.drop_extent(number)
            extents.remove(extent)
            continue
        extents.trim(extent, max(row.offset + row.record_bytes for row in found))
        rows.extend(found)
    return rows


def _adopt(
    extents: Extents, files: Files, number: int, path: Path, counters: Counters
) -> Extent | None:
    """Take in a file; None, and the file is deleted, where it is no extent of this format."""
    try:
        return extents.adopt(number, path)
    except RecordError as error:
        logger.info("%s is removed: %s", path, error)
        counters.add("extents_foreign" if error.kind == "version" else "extents_damaged")
        files.remove(path)
        return None
    except OSError as error:
        if error.errno not in (errno.EIO, errno.ENOENT):
            raise
        counters.add("extents_lost")
        return None


def _within(
    extent: Extent, rows: list[IndexRow], index: DiskIndex, counters: Counters
) -> list[IndexRow]:
    """Rows that lie within the file."""
    whole = [
        row
        for row in rows
        if is_plausible(row) and row.offset + row.record_bytes <= extent.size_bytes
    ]
    if len(whole) < len(rows):
        counters.add("corrupt", len(rows) - len(whole))
        counters.add("corrupt_truncated", len(rows) - len(whole))
        kept = {row.key for row in whole}
        index.update((), [row.key for row in rows if row.key not in kept])
    return whole


def _scanned(
    extents: Extents, extent: Extent, index: DiskIndex, counters: Counters
) -> list[IndexRow]:
    """Rows of an extent that the index does not know (any more)."""
    index.drop_extent(extent.id)
    rows = [row_of_header(extent.id, header) for header in extents.scan(extent)]
    index.add_extent(ExtentRow(extent.id, extent.container, extent.size_bytes))
    index.update(rows)
    counters.add("pages_recovered", len(rows))
    return rows
