"""The one source of time and of fresh names; everything else is handed one of these.

A simulation replaces `Clock`, so that one seed decides a whole run. Control-plane code never
imports `time`, `random`, `secrets` or `uuid`: it takes a `Clock`, or a name made here.

This module does not sleep and does not schedule.
"""

from __future__ import annotations

import secrets
import time
from typing import Protocol


class Clock(Protocol):
    """Two readings: `monotonic` for durations and deadlines, `wall` for timestamps (seconds)."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary start; never goes back."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch."""
        ...


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        """See `Clock`."""
        return time.monotonic()

    def wall(self) -> float:
        """See `Clock`."""
        return time.time()


def thread_seconds() -> float:
    """Processor time that the calling thread has used, in seconds. For I/O threads."""
    return time.thread_time()


def fresh_id(prefix: str = "", num_bytes: int = 12) -> str:
    """Return a name nobody else has: `prefix`, then `num_bytes` random bytes in hexadecimal."""
    return prefix + secrets.token_hex(num_bytes)
