"""What one process knows of a remote store, so that it need not ask again.

    present   written or found by this process, or presumed: a later page of its prompt is there
    absent    asked for, and not there
    damaged   there, and not what it should be: not believed before it is written anew

Other servers write to the store and the store expires objects, so knowledge grows old: what is
present is believed for `KNOWN_S` seconds, what is absent for `ABSENT_S`. Both sets are bounded; the
oldest entries go first. Believing wrongly costs a load that fails, or a prefix computed once more.

This module does no I/O.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from statewise.runtime.clock import Clock
from statewise.runtime.tiers.store import NO_HANDLE, HandleSource, Loss

KNOWN_S = 3600.0
ABSENT_S = 30.0
MAX_KNOWN = 1 << 18
MAX_ABSENT = 1 << 16


@dataclass(slots=True)
class Known:
    """A page that is there. `content` and `dependency` are 0 where it is only presumed."""

    handle: int
    key: bytes
    group: str
    content: int = 0
    dependency: int = 0
    until_s: float = 0.0


class KnownPages:
    """Pages by handle and by key, and keys that nothing is stored under. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._by_handle: dict[int, Known] = {}
        self._by_key: OrderedDict[bytes, Known] = OrderedDict()  # longest unconfirmed first
        self._absent: OrderedDict[bytes, float] = OrderedDict()  # until when
        self._handles = HandleSource()
        self._dropped: list[tuple[int, bytes, Loss]] = []

    # ---------------------------------------------------------------- present

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Handle of each key's page; `NO_HANDLE` for what is not known, or not any more."""
        now = self._clock.monotonic()
        with self._lock:
            found = [self._by_key.get(key) for key in keys]
            for known in found:
                if known is not None and known.until_s <= now:
                    self._remove(known)
            return [NO_HANDLE if k is None or k.until_s <= now else k.handle for k in found]

    def by_handle(self, handle: int) -> Known | None:
        """The page of a handle."""
        return self._by_handle.get(handle)

    def by_key(self, key: bytes) -> Known | None:
        """The page of a key."""
        return self._by_key.get(key)

    def learn(self, key: bytes, group: str, content: int = 0, dependency: int = 0) -> int:
        """A page is there; its handle. One that is known is confirmed."""
        with self._lock:
            self._absent.pop(key, None)
            known = self._by_key.get(key)
            if known is None:
                known = Known(self._handles.take(self._by_handle), key, group)
                self._by_handle[known.handle] = self._by_key[key] = known
            if content:
                known.content, known.dependency = content, dependency
            known.until_s = self._clock.monotonic() + KNOWN_S
            self._by_key.move_to_end(key)
            if len(self._by_key) > MAX_KNOWN:
                self._remove(next(iter(self._by_key.values())))
            return known.handle

    def forget(self, handle: int, why: Loss | None = None) -> None:
        """A page is not there, or not wanted; with `why`, `pop_dropped` says so."""
        with self._lock:
            known = self._by_handle.get(handle)
            if known is not None:
                self._remove(known)
                if why is not None:
                    self._dropped.append((handle, known.key, why))

    def _remove(self, known: Known) -> None:
        """The lock is held."""
        if self._by_handle.pop(known.handle, None) is not None:
            del self._by_key[known.key]

    def pop_dropped(self) -> list[tuple[int, bytes, Loss]]:
        """(handle, key, why) of pages that turned out not to be there since the last call."""
        with self._lock:
            dropped, self._dropped = self._dropped, []
            return dropped

    def handles(self) -> list[int]:
        """All of them."""
        with self._lock:
            return list(self._by_handle)

    def counts(self) -> dict[str, int]:
        """Pages by group."""
        counts: dict[str, int] = {}
        with self._lock:
            for known in self._by_key.values():
                counts[known.group] = counts.get(known.group, 0) + 1
        return counts

    # ---------------------------------------------------------------- absent

    def note_absent(self, key: bytes, seconds: float = ABSENT_S) -> None:
        """Nothing that counts is stored under a key."""
        with self._lock:
            self._absent[key] = self._clock.monotonic() + seconds
            self._absent.move_to_end(key)
            if len(self._absent) > MAX_ABSENT:
                self._absent.popitem(last=False)

    def is_absent(self, key: bytes) -> bool:
        """Whether asking would be for nothing."""
        with self._lock:
            until_s = self._absent.get(key)
            if until_s is not None and until_s <= self._clock.monotonic():
                del self._absent[key]
                return False
            return until_s is not None
