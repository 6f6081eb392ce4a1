"""The disk tier: pages in extents, found through an index, whole or not at all.

    commit   bytes into the current extent -> on the medium -> index -> found
    fetch    one read for each run of neighbours -> header against index and place -> payload
    room     extents beyond the budget go: the least recently used first, hot pages copied out

A kill at any point leaves a page found and whole, or not found: the index is told after the bytes
are safe, and what it says is checked against the record (the referrer holds the header's
checksum). Restart finds the pages by key. What is old, foreign, damaged or of another key is not
found.

A medium that fails makes the tier refuse or miss, with one warning (`health`). This module does not
decide what is stored, and does not verify payloads' digests: they are checked where they land.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from statewise.radix.segment import Tier
from statewise.runtime.clock import Clock
from statewise.runtime.tiers.body import Bodies
from statewise.runtime.tiers.buffers import Arena, Bytes, Row, Slabs
from statewise.runtime.tiers.catalog import Catalog
from statewise.runtime.tiers.disk_index import ExtentRow, IndexRow
from statewise.runtime.tiers.disk_open import Opened, open_directory
from statewise.runtime.tiers.disk_plain import PlainRun, plain_runs
from statewise.runtime.tiers.disk_read import (
    MAX_RUN_BYTES,
    Buffers,
    Place,
    read_pages,
    read_stored,
    runs_of,
)
from statewise.runtime.tiers.extents import EXTENT_HEADER_BYTES, Extent
from statewise.runtime.tiers.files import Files
from statewise.runtime.tiers.health import OFFLINE, RETRY_S, Health
from statewise.runtime.tiers.page import ALIGNMENT, GroupShape, PageRecord
from statewise.runtime.tiers.record import Header, RecordError, header_bytes
from statewise.runtime.tiers.store import (
    NO_HANDLE,
    Counters,
    Fetched,
    Loss,
    Outcome,
    TierStatus,
)
from statewise.runtime.tiers.writing import Batch

logger = logging.getLogger(__name__)

KEEP_SHARE = 0.5  # most of an evicted extent that may be copied out
SPARSE_SHARE = 0.5  # an extent with less in use is worth compacting
LEAST_EXTENTS = 8  # of a page of every group: below that a budget is a mistake


@dataclass(frozen=True)
class DiskOptions:
    """How a disk tier is kept. Bytes, seconds."""

    budget_bytes: int
    extent_bytes: int = 64 << 20
    ttl_s: float = 0.0  # 0: pages do not age
    codec: str = "none"
    direct_io: bool = True
    retry_s: float = RETRY_S


class DiskTier:
    """Pages in a directory of this process alone; a `TierStore`.

    Raises TierError where the directory is in use, is something else's, or cannot be written.
    """

    tier = Tier.DISK

    def __init__(
        self,
        directory: Path,
        shapes: Sequence[GroupShape],
        options: DiskOptions,
        clock: Clock,
        bodies: Bodies | None = None,
        files: Files | None = None,
    ) -> None:
        self.directory = directory
        self.options = options
        self.bodies = bodies if bodies is not None else Bodies(options.codec)
        self._clock = clock
        self._shapes = {shape.name: shape for shape in shapes}
        self._arenas = {s.name: Arena(s.block_bytes, 1 << 20, group=s.name) for s in shapes}
        self._buffers = Buffers(Slabs(MAX_RUN_BYTES), self._arenas)
        self._counters = Counters()
        self._health = Health(f"disk cache {directory}", clock, self._counters, options.retry_s)
        self._catalog = Catalog(clock, options.ttl_s)
        self._write_lock = threading.Lock()
        opened = open_directory(
            directory, files or Files(options.direct_io), self.bodies, self._counters
        )
        self._opened: Opened | None = opened
        self._extents, self._index = opened.extents, opened.index
        self._catalog.add(opened.rows)
        self._current: Extent | None = None
        least = EXTENT_HEADER_BYTES + max(map(_record_bytes, shapes), default=0)
        self._extent_bytes = max(min(options.extent_bytes, options.budget_bytes // 8), least)

    # ---------------------------------------------------------------- control plane

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """See `TierStore`."""
        if self._health.is_down:
            return [NO_HANDLE] * len(keys)
        return self._catalog.find(keys)

    def content(self, key: bytes) -> int:
        """See `TierStore`."""
        row = self._catalog.row_by_key(key)
        return 0 if row is None else row.content

    def dependency(self, handle: int) -> int:
        """See `TierStore`."""
        row = self._catalog.row_of(handle)
        return 0 if row is None else row.dependency

    def key_of(self, handle: int) -> bytes:
        """See `TierStore`."""
        row = self._catalog.row_of(handle)
        return b"" if row is None else row.key

    def touch(self, handles: Sequence[int]) -> None:
        """See `TierStore`."""
        self._catalog.touch(handles)

    def free(self, handles: Sequence[int]) -> None:
        """See `TierStore`. The room comes back when the extent does."""
        self._catalog.remove(handles)

    def report_corrupt(self, handle: int) -> None:
        """See `TierStore`."""
        if self._catalog.remove([handle], Loss.DAMAGED):
            self._counters.add("corrupt")
            self._counters.add("corrupt_payload")

    def pop_dropped(self) -> list[tuple[int, bytes, Loss]]:
        """See `TierStore`."""
        return self._catalog.pop_dropped()

    def rebind(self, shapes: Sequence[GroupShape]) -> None:
        """See `TierStore`. Pages of the old ones stay: those weights may come back."""
        self._shapes = {shape.name: shape for shape in shapes}

    def status(self) -> TierStatus:
        """See `TierStore`."""
        return TierStatus(
            Tier.DISK,
            self._health.state,
            len(self._catalog),
            self._extents.total_bytes,
            self.options.budget_bytes,
            self._catalog.pages_by_group(),
            self._counters.as_dict(),
            self.bodies.codec_name,
        )

    # ---------------------------------------------------------------- rows

    def stage(self, group: str, count: int) -> list[Row]:
        """See `TierStore`."""
        return self._arenas[group].take(count)

    def discard(self, rows: Sequence[Row]) -> None:
        """See `TierStore`."""
        self._buffers.discard(rows)

    # ---------------------------------------------------------------- writing

    def commit(self, pages: Sequence[tuple[PageRecord, Row]]) -> list[int]:
        """See `TierStore`. Returns when the pages are on the medium."""
        try:
            with self._write_lock:
                self._commit(pages)
        finally:
            self.discard([row for _, row in pages])
        return self._catalog.find([record.address.key for record, _ in pages])

    def _commit(self, pages: Sequence[tuple[PageRecord, Row]]) -> None:
        batch = Batch(self._clock.wall())
        for record, row in pages:
            key = record.address.key
            if key in batch.keys or self._catalog.find([key]) != [NO_HANDLE]:
                self._counters.add("duplicates")
                continue
            if self._catalog.is_too_old(record.created_s):
                self._counters.add("too_old")
                continue
            shape = self._shapes[record.address.group]
            batch.add(*self.bodies.encode(shape, record, row.data), row)
        if not batch.is_empty:
            self._write_batch(batch)

    def _write_batch(self, batch: Batch) -> int:
        """Write what can be written; returns how many pages were. The write lock is held."""
        if self._opened is None or not self._health.may_write():
            self._counters.add("refused", len(batch))
            return 0
        payload_bytes = batch.payload_bytes
        try:
            self._opened.lock.check()
            written = self._write(batch)
        except (OSError, sqlite3.Error) as error:
            self._counters.add("refused", len(batch))
            self._health.write_failed(error)
            self._abandon()
            return 0
        self._health.write_ok()
        self._counters.add("pages_written", written)
        self._counters.add("bytes_written", payload_bytes)
        return written

    def _write(self, batch: Batch) -> int:
        """Write a batch, in parts that fit the extents; returns how many pages were."""
        written = 0
        while not batch.is_empty:
            extent = self._extent_with_room(batch.first_bytes)
            if extent is None:
                self._counters.add("refused", len(batch))
                break
            part = batch.place(extent.id, extent.container, extent.cursor, extent.room)
            self._extents.append(extent, part.buffers, part.size_bytes)
            changes = self._catalog.pop_changes()
            used = ((at, key) for key, at in changes.used.items())
            self._index.update(part.rows, changes.removed, used)
            self._catalog.add(part.rows)
            written += len(part.rows)
        return written

    def withdraw(self, keys: Sequence[bytes]) -> None:
        """See `TierStore`. The records' headers are overwritten, so that no scan finds them."""
        with self._write_lock:
            rows = [row for key in keys if (row := self._catalog.row_by_key(key)) is not None]
            self._catalog.remove(self._catalog.find([row.key for row in rows]))
            if self._opened is None or not rows:
                return
            try:
                self._opened.lock.check()
                for row in rows:
                    self._extents.blank(row.extent, row.offset)
                self._flush()
            except (OSError, sqlite3.Error) as error:
                self._counters.add("withdrawals_failed")
                self._health.write_failed(error)

    def _extent_with_room(self, size: int) -> Extent | None:
        if self._current is not None and self._current.room >= size:
            return self._current
        if self._current is not None:
            self._extents.seal(self._current)
            self._current = None
        wanted = max(self._extent_bytes, EXTENT_HEADER_BYTES + size)
        self._make_room(wanted)
        if self._extents.total_bytes + wanted > self.options.budget_bytes:
            return None
        self._current = self._extents.create(wanted)
        extent = self._current
        self._index.add_extent(ExtentRow(extent.id, extent.container, extent.size_bytes))
        return extent

    def _abandon(self) -> None:
        """Write no more to an extent of which a write failed: what is on the medium is unknown."""
        current, self._current = self._current, None
        if current is not None and self._opened is not None:
            with contextlib.suppress(OSError):
                self._opened.lock.check()
                self._extents.seal(current)

    # ---------------------------------------------------------------- room

    def _make_room(self, wanted: int) -> None:
        """Evict extents until `wanted` bytes fit the budget."""
        hot_since = self._catalog.mean_use_s()
        while self._extents.total_bytes + wanted > self.options.budget_bytes:
            sealed = [e for e in self._extents.all() if e is not self._current]
            if not sealed:
                return
            victim = min(sealed, key=lambda e: self._catalog.extent_use(e.id)[1])
            self._evict(victim, hot_since)

    def _evict(self, victim: Extent, hot_since: float) -> None:
        """Drop an extent; its hot pages go on where the next extent has room for them."""
        pages = self._catalog.in_extent(victim.id)
        hot, budget = [], int(victim.size_bytes * KEEP_SHARE)
        for handle, row, used_s in sorted(pages, key=lambda page: -page[2]):
            if used_s > hot_since and row.record_bytes <= budget:
                budget -= row.record_bytes
                hot.append((handle, row))
        survivors = self._read_records(hot)
        gone = [handle for handle, row, _ in pages if row.key not in survivors.keys]
        self._counters.add("evicted", self._catalog.remove(gone, Loss.ROOM))
        self._counters.add("extents_removed")
        self._drop_extent(victim)
        if not survivors.is_empty:
            self._put_back(survivors)

    def _put_back(self, survivors: Batch) -> None:
        """Write what was copied out of an extent into a new one of just its size."""
        size = EXTENT_HEADER_BYTES + survivors.total_bytes
        extent = self._extents.create(size)
        self._index.add_extent(ExtentRow(extent.id, extent.container, extent.size_bytes))
        part = survivors.place(extent.id, extent.container, extent.cursor, extent.room)
        self._extents.append(extent, part.buffers, part.size_bytes)
        self._index.update(part.rows)
        self._catalog.add(part.rows)
        self._extents.seal(extent)
        self._counters.add("compacted", len(part.rows))

    def _drop_extent(self, extent: Extent) -> None:
        self._index.drop_extent(extent.id)
        self._extents.remove(extent)

    def _read_records(self, pages: Sequence[tuple[int, IndexRow]]) -> Batch:
        """Pages as they are stored, verified, to be written elsewhere."""
        batch = Batch(self._clock.wall())
        for handle, row in pages:
            try:
                batch.add(*read_stored(self._extents, row), None, row.used_s)
            except (RecordError, OSError) as error:
                self._failed(handle, row, error)
        return batch

    def collect(self, progress: Callable[[int, int], None] = lambda _done, _total: None) -> int:
        """Drop expired pages and compact sparse extents; returns the bytes given back.

        `progress` is called with counts of extents: done, in all.
        """
        before = self._extents.total_bytes
        with self._write_lock:
            self._counters.add("expired", self._catalog.remove(self._catalog.expired(), Loss.AGE))
            if self._opened is None or not self._opened.lock.is_current():
                return 0
            extents = self._extents.all()
            for done, extent in enumerate(extents):
                progress(done, len(extents))
                live, _ = self._catalog.extent_use(extent.id)
                if extent is not self._current and live < SPARSE_SHARE * extent.size_bytes:
                    self._evict(extent, -1.0)
            progress(len(extents), len(extents))
            self._flush()
        return before - self._extents.total_bytes

    # ---------------------------------------------------------------- reading

    def fetch(self, handles: Sequence[int]) -> list[Fetched]:
        """See `TierStore`."""
        results = [Fetched(handle, Outcome.MISSING) for handle in handles]
        if self._opened is None or not self._health.may_read():
            return results
        for run in runs_of(self._places(handles)):
            found = read_pages(self._extents, self.bodies, self._buffers, run)
            num_pages = num_bytes = 0
            for place, result in zip(run, found, strict=True):
                handle = handles[place.index]
                if isinstance(result, tuple):
                    record, row = result
                    num_pages += 1
                    num_bytes += row.size
                    results[place.index] = Fetched(handle, Outcome.OK, row, record)
                else:
                    outcome = self._failed(handle, place.at, result)
                    results[place.index] = Fetched(handle, outcome, reason=str(result))
            if num_pages:
                self._health.read_ok()
                self._counters.add("pages_read", num_pages)
                self._counters.add("bytes_read", num_bytes)
        return results

    def plain_runs(
        self, group: str, handles: Sequence[int], keys: Sequence[bytes]
    ) -> Iterator[PlainRun]:
        """See `PlainStore`."""
        if self._opened is None or self._health.state == OFFLINE or self.bodies.secret:
            return
        shape = self._shapes.get(group)
        if shape is None:
            return
        rows = self._catalog.rows_of(handles)
        for run in plain_runs(shape, rows, keys, (self._extents, self._buffers.slabs)):
            yield run
            if run.num_loaded:
                self._health.read_ok()
                self._counters.add("pages_read", run.num_loaded)
                self._counters.add("bytes_read", run.num_loaded * run.shape.block_bytes)

    def _places(self, handles: Sequence[int]) -> list[Place]:
        shapes = self._shapes
        return [
            Place(i, at, shapes[at.group])
            for i, at in enumerate(self._catalog.rows_of(handles))
            if at is not None and at.group in shapes
        ]

    def _failed(self, handle: int, at: IndexRow, error: RecordError | OSError) -> Outcome:
        """Count a page that could not be read, and drop it unless the medium may recover."""
        if isinstance(error, FileNotFoundError):
            self._catalog.remove_at(handle, at, Loss.GONE)
            return Outcome.MISSING
        if isinstance(error, OSError):
            self._health.read_failed(error)
            return Outcome.FAILED
        is_foreign = error.kind == "codec"
        self._catalog.remove_at(handle, at, Loss.GONE if is_foreign else Loss.DAMAGED)
        if is_foreign:
            self._counters.add("undecodable")
            return Outcome.MISSING
        self._counters.add("corrupt")
        self._counters.add(f"corrupt_{error.kind}")
        return Outcome.CORRUPT

    def release(self, fetched: Sequence[Fetched]) -> None:
        """See `TierStore`."""
        self.discard([one.row for one in fetched if one.row is not None])

    # ---------------------------------------------------------------- maintenance

    def all_handles(self) -> list[int]:
        """See `TierStore`. By place."""
        return [h for e in self._extents.all() for h, _, _ in self._catalog.in_extent(e.id)]

    def read_record(self, handle: int) -> tuple[Header, Bytes] | RecordError | OSError:
        """A page as it is stored, verified; a damaged one is counted and dropped."""
        row = self._catalog.row_of(handle)
        if row is None:
            return RecordError("missing", "the page is gone")
        try:
            return read_stored(self._extents, row)
        except (RecordError, OSError) as error:
            self._failed(handle, row, error)
            return error

    def take_records(self, records: Sequence[tuple[Header, Bytes]]) -> int:
        """Store records of another container as they are; returns how many were."""
        batch = Batch(self._clock.wall())
        for header, body in records:
            if header.page.address.key not in batch.keys:
                batch.add(header, body, None)
        with self._write_lock:
            return 0 if batch.is_empty else self._write_batch(batch)

    def compact_index(self) -> None:
        """Shrink the index's file."""
        with self._write_lock:
            self._index.compact()

    # ---------------------------------------------------------------- end

    def _flush(self) -> None:
        changes = self._catalog.pop_changes()
        self._index.update((), changes.removed, ((at, key) for key, at in changes.used.items()))

    def close(self) -> None:
        """See `TierStore`. Seals the current extent and gives the directory up."""
        with self._write_lock:
            opened, self._opened = self._opened, None
            if opened is None:
                return
            try:
                opened.lock.check()
                if self._current is not None:
                    self._extents.seal(self._current)
                self._flush()
            except (OSError, sqlite3.Error) as error:
                self._health.write_failed(error)
            self._extents.close()
            self._index.close()
            opened.lock.release()


def least_budget(shapes: Sequence[GroupShape]) -> int:
    """Bytes below which a directory does not even hold a few pages of each group."""
    return LEAST_EXTENTS * (EXTENT_HEADER_BYTES + sum(map(_record_bytes, shapes)))


def _record_bytes(shape: GroupShape) -> int:
    return header_bytes(shape.name, shape.stamp, shape.num_layers) + shape.row_bytes + ALIGNMENT
