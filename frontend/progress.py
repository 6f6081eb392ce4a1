"""A progress bar on standard error: counts only, one line, no dependency.

Redrawn when the count changes, at most once for each percent, so that a large batch does not spend
its time on drawing. Where nobody looks on (a file, a pipe), only the last state is written.
"""

from __future__ import annotations

import sys
import threading
from typing import TextIO

WIDTH = 40


class Progress:
    """Counts up to `total`. Thread-safe."""

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self._total = total
        self._stream = stream if stream is not None else sys.stderr
        self._is_live = self._stream.isatty()
        self._done = 0
        self._drawn = -1
        self._lock = threading.Lock()
        self._draw()

    def advance(self) -> None:
        """One more item is done."""
        with self._lock:
            self._done += 1
            self._draw()

    def to(self, done: int) -> None:
        """So many items are done."""
        with self._lock:
            self._done = done
            self._draw()

    def close(self) -> None:
        """End the line."""
        with self._lock:
            self._stream.write("\n" if self._is_live else f"{self._line()}\n")
            self._stream.flush()

    def _draw(self) -> None:
        percent = 100 * self._done // self._total if self._total else 100
        if percent == self._drawn:
            return
        self._drawn = percent
        if self._is_live:
            self._stream.write(f"\r{self._line()}")
            self._stream.flush()

    def _line(self) -> str:
        percent = 100 * self._done // self._total if self._total else 100
        filled = WIDTH * percent // 100
        bar = "#" * filled + "." * (WIDTH - filled)
        return f"{percent:3d}% [{bar}] {self._done}/{self._total}"
