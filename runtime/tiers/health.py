"""How well a medium is doing: online, read only, or offline; one warning for each change.

    online    --write failed (full, read-only)-->       read only   --after a while--> tries again
    online    --several reads failed, or vanished-->    offline     --after a while--> tries again

A medium that fails costs a warning and counters, never a request. While it is down, at most one
attempt in `retry_s` seconds is let through; if that succeeds the medium is online again.
"""

from __future__ import annotations

import logging
import threading

from statewise.runtime.clock import Clock
from statewise.runtime.events import EventLog
from statewise.runtime.tiers.store import Counters

logger = logging.getLogger(__name__)

ONLINE, READ_ONLY, OFFLINE = "online", "read only", "offline"
READ_FAILURES_TO_OFFLINE = 4
RETRY_S = 60.0


class Health:
    """State of one medium, called `name` in warnings. Thread-safe."""

    def __init__(
        self, name: str, clock: Clock, counters: Counters, retry_s: float = RETRY_S
    ) -> None:
        self._name = name
        self._clock = clock
        self._counters = counters
        self._retry_s = retry_s
        self._lock = threading.Lock()
        self._state = ONLINE
        self._read_failures = 0
        self._retry_at = 0.0

    @property
    def state(self) -> str:
        """The word of status and metrics."""
        return self._state

    @property
    def is_down(self) -> bool:
        """Offline, and not yet due to be tried again. Asking changes nothing."""
        return self._state == OFFLINE and self._clock.monotonic() < self._retry_at

    def may_read(self) -> bool:
        """Whether to try a read now."""
        return self._state != OFFLINE or self._is_retry()

    def may_write(self) -> bool:
        """Whether to try a write now."""
        return self._state == ONLINE or self._is_retry()

    def _is_retry(self) -> bool:
        with self._lock:
            now = self._clock.monotonic()
            if now < self._retry_at:
                return False
            self._retry_at = now + self._retry_s
            return True

    def read_ok(self) -> None:
        """A read succeeded."""
        self._read_failures = 0
        if self._state == OFFLINE:
            self._change(ONLINE, "reads succeed again")

    def write_ok(self) -> None:
        """A write succeeded."""
        if self._state != ONLINE:
            self._change(ONLINE, "writes succeed again")

    def read_failed(self, error: Exception) -> None:
        """A read failed; several in a row take the medium offline."""
        self._counters.add("read_errors")
        self._read_failures += 1
        if self._read_failures >= READ_FAILURES_TO_OFFLINE:
            self._change(OFFLINE, str(error))

    def write_failed(self, error: Exception) -> None:
        """A write failed: nothing more is written for a while."""
        self._counters.add("write_errors")
        if self._state == ONLINE:
            self._change(READ_ONLY, str(error))

    def _change(self, state: str, why: str) -> None:
        with self._lock:
            if state == self._state:
                return
            before, self._state = self._state, state
            self._read_failures = 0
            self._retry_at = self._clock.monotonic() + self._retry_s
        self._counters.add("state_changes")
        EventLog().emit("tier_state", medium=self._name, before=before, after=state, why=why)
        level = logging.INFO if state == ONLINE else logging.WARNING
        logger.log(level, "%s is %s: %s", self._name, state, why)
