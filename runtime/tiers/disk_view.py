"""A disk cache that may be read and not written: on a read-only medium, or another user's.

Pages are those that the index names; where it cannot be read, those whose headers are found in the
extents. Nothing is dropped, trimmed, rebuilt or locked. Where there is a lock file, its owner is
respected: a cache that a server has open is refused, as it is by `disk`.

This module finds no page by name: it is for looking after a directory.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from pathlib import Path

from statewise.runtime.tiers.buffers import Bytes
from statewise.runtime.tiers.disk_index import FILE_NAME, DiskIndex, IndexRow, IndexUnusableError
from statewise.runtime.tiers.disk_open import EXTENTS, check_is_ours
from statewise.runtime.tiers.disk_read import read_stored
from statewise.runtime.tiers.extents import Extents
from statewise.runtime.tiers.files import LOCK, Files
from statewise.runtime.tiers.record import Header, RecordError
from statewise.runtime.tiers.store import TierError
from statewise.runtime.tiers.writing import row_of_header


class DiskView:
    """Pages of a directory, by their number in it. Raises TierError where it cannot be read."""

    def __init__(self, directory: Path) -> None:
        check_is_ours(directory)
        self._lock_fd = _share(directory)
        self._extents = Extents(directory / EXTENTS, Files())
        try:
            self.num_foreign = self._adopt_all()
            self._rows = self._indexed(directory)
        except (OSError, sqlite3.Error) as error:
            self.close()
            raise TierError(f"disk cache directory {directory}: {error}") from error

    def _adopt_all(self) -> int:
        """Take in all extents; returns how many files are none."""
        foreign = 0
        for number, path in self._extents.on_disk().items():
            try:
                self._extents.adopt(number, path)
            except RecordError:
                foreign += 1
        return foreign

    def _indexed(self, directory: Path) -> list[IndexRow]:
        try:
            index = DiskIndex(directory / FILE_NAME, read_only=True)
        except (IndexUnusableError, sqlite3.Error):
            return self._scanned()
        try:
            rows = list(index.pages())
        except sqlite3.Error:
            return self._scanned()
        finally:
            index.close()
        return rows

    def _scanned(self) -> list[IndexRow]:
        extents = self._extents
        return [row_of_header(e.id, header) for e in extents.all() for header in extents.scan(e)]

    @property
    def used_bytes(self) -> int:
        """Bytes of all extents."""
        return self._extents.total_bytes

    def all_handles(self) -> list[int]:
        """Numbers of all pages, by place."""
        return list(range(len(self._rows)))

    def read_record(self, handle: int) -> tuple[Header, Bytes] | RecordError | OSError:
        """A page as it is stored, verified; what is damaged stays where it is."""
        try:
            return read_stored(self._extents, self._rows[handle])
        except (RecordError, OSError) as error:
            return error

    def close(self) -> None:
        """Close all files."""
        self._extents.close()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def _share(directory: Path) -> int:
    """Shared lock on a directory that nobody writes to; -1 where there is no lock file."""
    try:
        fd = os.open(directory / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        raise TierError(f"the cache directory {directory} is in use by process {owner}") from error
    return fd
