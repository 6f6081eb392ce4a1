"""The only module that reads a clock; everything else is handed one, so a simulation can replace it."""

from __future__ import annotations

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
