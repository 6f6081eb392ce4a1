"""A slow medium under the disk tier's files: reads happen, and then wait as it would make them.

A bandwidth and a latency are the only things made up. Writes are not slowed down.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from statewise.runtime.tiers.buffers import Bytes
from statewise.runtime.tiers.files import Files

LATENCY_S = 0.002
MB = 1e6
REAL_READ = Files.read


class Medium:
    """A bandwidth and a latency for every read of a file, however many threads read.

    It lies under all files of this process from `mount` on.
    """

    def __init__(self, bytes_per_s: float = float("inf")) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    def mount(self) -> None:
        """All reads go through it from now on."""
        Files.read = lambda *args: self.read(*args)  # type: ignore[method-assign]
        Files.has_own_reads = True

    def read(self, files: Files, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        """Read, and wait until a medium of this kind would have done so."""
        began = time.monotonic()
        count = REAL_READ(files, fd, buffers, offset)
        with self._lock:
            self._free_at = max(self._free_at, began) + count / self.bytes_per_s
            ready = self._free_at + LATENCY_S
        time.sleep(max(ready - time.monotonic(), 0.0))
        return count
