"""The disk tier's index: where each page lies, in SQLite.

The index is written after the bytes it points to are on the medium, in one transaction for a
batch: a page is in the index whole, or not at all. It can be thrown away: extents describe
themselves, and `disk` reads them again.

Rows hold what finding, evicting and checking need; everything else about a page is in its record.
This module does not open extents and keeps nothing in memory.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from statewise.runtime.tiers.files import can_write
from statewise.runtime.tiers.page import ALIGNMENT, KEY_BYTES

FORMAT = 1
APPLICATION_ID = 0x53574958  # "SWIX"
FILE_NAME = "index.sqlite"
SUFFIXES = ("", "-wal", "-shm", "-journal")  # of the file and its journals

_TABLES = f"""
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {FORMAT};
CREATE TABLE extents (
    id INTEGER PRIMARY KEY,
    container BLOB NOT NULL,
    size_bytes INTEGER NOT NULL
) STRICT;
CREATE TABLE pages (
    key BLOB PRIMARY KEY,
    extent INTEGER NOT NULL,
    offset INTEGER NOT NULL,
    record_bytes INTEGER NOT NULL,
    header_bytes INTEGER NOT NULL,
    header_sum INTEGER NOT NULL,
    content INTEGER NOT NULL,
    dependency INTEGER NOT NULL,
    state_group TEXT NOT NULL,
    position INTEGER NOT NULL,
    codec INTEGER NOT NULL,
    sealing INTEGER NOT NULL,
    created_s REAL NOT NULL,
    used_s REAL NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX pages_by_extent ON pages (extent);
"""


class IndexRow(NamedTuple):
    """One page, as stored."""

    key: bytes
    extent: int
    offset: int
    record_bytes: int
    header_bytes: int
    header_sum: int  # 64 bits, unsigned
    content: int
    dependency: int
    group: str
    position: int
    codec: int
    sealing: int
    created_s: float
    used_s: float


class ExtentRow(NamedTuple):
    """One extent, as stored."""

    id: int
    container: bytes
    size_bytes: int


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _unsigned(value: int) -> int:
    return value + (1 << 64) if value < 0 else value


def _to_sql(row: IndexRow) -> tuple[object, ...]:
    return row._replace(
        header_sum=_signed(row.header_sum),
        content=_signed(row.content),
        dependency=_signed(row.dependency),
    )


def _from_sql(values: tuple[object, ...]) -> IndexRow:
    row = IndexRow._make(values)
    return row._replace(
        header_sum=_unsigned(row.header_sum),
        content=_unsigned(row.content),
        dependency=_unsigned(row.dependency),
    )


class IndexUnusableError(Exception):
    """The index file is damaged, foreign, or of another format."""


class DiskIndex:
    """An open index. Calls may come from any thread, one at a time. Raises sqlite3.Error."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        """Open or create; IndexUnusableError for a file that is not such an index."""
        uri = f"{path.resolve().as_uri()}?{_mode(path, read_only=read_only)}"
        self._db = sqlite3.connect(uri, uri=True, check_same_thread=False, isolation_level=None)
        try:
            self._prepare(read_only)
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise IndexUnusableError(str(error)) from error
        except IndexUnusableError:
            self._db.close()
            raise

    def _prepare(self, read_only: bool) -> None:
        if not read_only:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
        is_new = not self._db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
        if is_new and not read_only:
            self._db.executescript(f"BEGIN; {_TABLES} COMMIT;")
        found = (self._pragma("application_id"), self._pragma("user_version"))
        if found != (APPLICATION_ID, FORMAT):
            raise IndexUnusableError(f"index format {found}, this is {APPLICATION_ID, FORMAT}")
        if self._db.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
            raise IndexUnusableError("the index is damaged")

    def _pragma(self, name: str) -> int:
        value: int = self._db.execute(f"PRAGMA {name}").fetchone()[0]
        return value

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._db
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def pages(self) -> Iterator[IndexRow]:
        """All pages, by place."""
        fields = ", ".join(IndexRow._fields).replace("group", "state_group")
        query = f"SELECT {fields} FROM pages ORDER BY extent, offset"
        yield from map(_from_sql, self._db.execute(query))

    def extents(self) -> list[ExtentRow]:
        """All extents."""
        query = "SELECT id, container, size_bytes FROM extents ORDER BY id"
        return [ExtentRow._make(row) for row in self._db.execute(query)]

    def add_extent(self, extent: ExtentRow) -> None:
        """Take note of a new extent."""
        self._db.execute("INSERT OR REPLACE INTO extents VALUES (?, ?, ?)", extent)

    def drop_extent(self, extent: int) -> None:
        """Forget an extent and its pages."""
        with self._transaction() as db:
            db.execute("DELETE FROM pages WHERE extent = ?", (extent,))
            db.execute("DELETE FROM extents WHERE id = ?", (extent,))

    def update(
        self,
        added: Sequence[IndexRow],
        removed: Iterable[bytes] = (),
        used: Iterable[tuple[float, bytes]] = (),
    ) -> None:
        """One transaction: pages that are gone, times of use, new pages."""
        marks = ", ".join("?" * len(IndexRow._fields))
        with self._transaction() as db:
            db.executemany("DELETE FROM pages WHERE key = ?", ((key,) for key in removed))
            db.executemany("UPDATE pages SET used_s = ? WHERE key = ?", used)
            db.executemany(f"INSERT OR REPLACE INTO pages VALUES ({marks})", map(_to_sql, added))

    def compact(self) -> None:
        """Shrink the file."""
        self._db.execute("VACUUM")
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Close the file."""
        self._db.close()


def _mode(path: Path, *, read_only: bool) -> str:
    """How to open the file. A journal that is shared needs a directory that can be written."""
    if not read_only:
        return "mode=rwc"
    journal = path.with_name(path.name + "-wal")
    is_still = not can_write(path.parent)
    with contextlib.suppress(OSError):
        is_still = is_still and journal.stat().st_size == 0
    return "mode=ro&immutable=1" if is_still else "mode=ro"


def is_plausible(row: IndexRow) -> bool:
    """Whether a row could have been written: a damaged index may hold anything."""
    sizes = (row.offset, row.header_bytes, row.record_bytes)
    return (
        len(row.key) == KEY_BYTES
        and all(size > 0 and size % ALIGNMENT == 0 for size in sizes)
        and row.header_bytes <= row.record_bytes
        and 0 <= row.codec < 1 << 16
        and 0 <= row.sealing < 1 << 16
    )


def remove_index(directory: Path) -> None:
    """Delete an index and its journal."""
    for suffix in SUFFIXES:
        (directory / (FILE_NAME + suffix)).unlink(missing_ok=True)
