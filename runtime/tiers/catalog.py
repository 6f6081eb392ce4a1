"""Where every page of the disk tier lies, in memory: what the control plane may ask at any time.

A page is an `IndexRow`; it moves only by being replaced, so whoever took a row under the lock reads
from the place it names. Removals and times of use are collected here and written to the index
with the next batch: losing them in a crash costs nothing but a page that should have been gone.

About 600 bytes a page. This module does no I/O.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from statewise.runtime.clock import Clock
from statewise.runtime.tiers.disk_index import IndexRow
from statewise.runtime.tiers.store import NO_HANDLE, HandleSource, Loss


@dataclass(slots=True)
class ExtentUse:
    """What one extent holds. `used_sum` adds up its pages' times of use."""

    live_bytes: int = 0
    used_sum: float = 0.0
    handles: set[int] = field(default_factory=set)

    @property
    def mean_use_s(self) -> float:
        """Mean time of use of its pages; 0 for none."""
        return self.used_sum / len(self.handles) if self.handles else 0.0


@dataclass(slots=True)
class Changes:
    """What the index does not know yet."""

    removed: list[bytes] = field(default_factory=list)
    used: dict[bytes, float] = field(default_factory=dict)


class Catalog:
    """Pages by handle and by key. `ttl_s`: age at which a page is no longer found; 0: never."""

    def __init__(self, clock: Clock, ttl_s: float = 0.0) -> None:
        self._clock = clock
        self._ttl_s = ttl_s
        self._lock = threading.Lock()
        self._rows: dict[int, IndexRow] = {}
        self._handles: dict[bytes, int] = {}
        self._used: dict[int, float] = {}
        self._extents: dict[int, ExtentUse] = {}
        self._source = HandleSource()
        self._dropped: list[tuple[int, bytes, Loss]] = []
        self._changes = Changes()

    def __len__(self) -> int:
        return len(self._rows)

    # ---------------------------------------------------------------- asking

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Handle of each key, `NO_HANDLE` for none."""
        now = self._clock.wall()
        with self._lock:
            return [self._find(key, now) for key in keys]

    def _find(self, key: bytes, now: float) -> int:
        handle = self._handles.get(key, NO_HANDLE)
        if handle != NO_HANDLE and self._is_expired(handle, now):
            return NO_HANDLE
        return handle

    def _is_expired(self, handle: int, now: float) -> bool:
        return self._ttl_s > 0 and self._rows[handle].created_s + self._ttl_s < now

    def is_too_old(self, created_s: float) -> bool:
        """Whether a page made at this time would not be found."""
        return self._ttl_s > 0 and created_s + self._ttl_s < self._clock.wall()

    def row_of(self, handle: int) -> IndexRow | None:
        """Where a page lies now; None where it is gone or expired."""
        return self.rows_of([handle])[0]

    def rows_of(self, handles: Sequence[int]) -> list[IndexRow | None]:
        """`row_of` of each."""
        now = self._clock.wall()
        with self._lock:
            return [
                None if self._ttl_s and self._is_gone(handle, now) else self._rows.get(handle)
                for handle in handles
            ]

    def _is_gone(self, handle: int, now: float) -> bool:
        return handle not in self._rows or self._is_expired(handle, now)

    def row_by_key(self, key: bytes) -> IndexRow | None:
        """`row_of` by key."""
        with self._lock:
            handle = self._handles.get(key)
            return None if handle is None else self._rows[handle]

    def expired(self) -> list[int]:
        """Handles of pages past their age."""
        now = self._clock.wall()
        with self._lock:
            return [handle for handle in self._rows if self._is_expired(handle, now)]

    def pages_by_group(self) -> dict[str, int]:
        """Pages of each group."""
        counts: dict[str, int] = {}
        with self._lock:
            for row in self._rows.values():
                counts[row.group] = counts.get(row.group, 0) + 1
        return counts

    def in_extent(self, extent: int) -> list[tuple[int, IndexRow, float]]:
        """(handle, row, time of use) of an extent's pages, by place."""
        with self._lock:
            use = self._extents.get(extent)
            handles = [] if use is None else sorted(use.handles, key=lambda h: self._rows[h].offset)
            return [(handle, self._rows[handle], self._used[handle]) for handle in handles]

    def extent_use(self, extent: int) -> tuple[int, float]:
        """(live bytes, mean time of use) of an extent."""
        with self._lock:
            use = self._extents.get(extent)
            return (0, 0.0) if use is None else (use.live_bytes, use.mean_use_s)

    def mean_use_s(self) -> float:
        """Mean time of use over all pages."""
        with self._lock:
            return sum(self._used.values()) / len(self._used) if self._used else 0.0

    # ---------------------------------------------------------------- changing

    def add(self, rows: Iterable[IndexRow]) -> list[int]:
        """Take in pages; one whose key is known moves and keeps its handle."""
        with self._lock:
            return [self._add(row) for row in rows]

    def _add(self, row: IndexRow) -> int:
        handle = self._handles.get(row.key)
        if handle is None:
            handle = self._source.take(self._rows)
            self._handles[row.key] = handle
            self._used[handle] = row.used_s
        else:
            self._leave_extent(handle)
        self._rows[handle] = row
        use = self._extents.setdefault(row.extent, ExtentUse())
        use.handles.add(handle)
        use.live_bytes += row.record_bytes
        use.used_sum += self._used[handle]
        return handle

    def _leave_extent(self, handle: int) -> None:
        row = self._rows[handle]
        use = self._extents[row.extent]
        use.handles.remove(handle)
        use.live_bytes -= row.record_bytes
        use.used_sum -= self._used[handle]
        if not use.handles:
            del self._extents[row.extent]

    def touch(self, handles: Iterable[int]) -> None:
        """These pages were of use now."""
        now = self._clock.wall()
        with self._lock:
            for handle in handles:
                row = self._rows.get(handle)
                if row is not None:
                    self._extents[row.extent].used_sum += now - self._used[handle]
                    self._used[handle] = now
                    self._changes.used[row.key] = now

    def remove(self, handles: Iterable[int], why: Loss | None = None) -> int:
        """Forget pages; with `why`, `pop_dropped` names them. Returns how many there were."""
        count = 0
        with self._lock:
            for handle in handles:
                row = self._rows.get(handle)
                if row is None:
                    continue
                self._leave_extent(handle)
                del self._rows[handle], self._handles[row.key], self._used[handle]
                self._changes.removed.append(row.key)
                self._changes.used.pop(row.key, None)
                if why is not None:
                    self._dropped.append((handle, row.key, why))
                count += 1
        return count

    def remove_at(self, handle: int, row: IndexRow, why: Loss) -> int:
        """Forget a page if it still lies at `row`; `pop_dropped` will name it."""
        with self._lock:
            if self._rows.get(handle) is not row:
                return 0
        return self.remove([handle], why)

    def pop_dropped(self) -> list[tuple[int, bytes, Loss]]:
        """(handle, key, why) of pages removed for a reason since the last call."""
        with self._lock:
            dropped, self._dropped = self._dropped, []
            return dropped

    def pop_changes(self) -> Changes:
        """What the index is to be told; keys that came back meanwhile are not removals."""
        with self._lock:
            changes, self._changes = self._changes, Changes()
            changes.removed = [key for key in changes.removed if key not in self._handles]
            return changes
