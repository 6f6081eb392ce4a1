"""A file system that fails, and damage done to real files.

Fault model of `FaultyFiles`: the n-th call of the chosen kinds either raises an error, leaving what
it began half done (a write stops at a random aligned or unaligned place), or ends the program there
(`Crash`), which nobody can catch by accident.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from statewise.runtime.tiers.disk_open import Opened
from statewise.runtime.tiers.files import Files

Bytes = NDArray[np.uint8]
KINDS = ("create", "open", "write", "read", "sync", "truncate", "remove", "sync_directory")


class Crash(BaseException):
    """The program ends here."""


class FaultyFiles(Files):
    """Fails the `fail_at`-th call of `kinds` (from 0), and all `then` following ones.

    `code` is the error number; None: the program crashes instead.
    """

    def __init__(
        self,
        fail_at: int,
        code: int | None = errno.EIO,
        kinds: Sequence[str] = KINDS,
        then: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.fail_at, self.code, self.kinds, self.then = fail_at, code, kinds, then
        self.num_calls = 0
        self.has_failed = False
        self._rng = np.random.default_rng(seed)

    def _fails(self, kind: str) -> bool:
        if kind not in self.kinds:
            return False
        call, self.num_calls = self.num_calls, self.num_calls + 1
        if not self.fail_at <= call <= self.fail_at + self.then:
            return False
        self.has_failed = True
        return True

    def _fail(self, kind: str) -> None:
        if self.code is None:
            raise Crash(kind)
        raise OSError(self.code, f"injected at {kind}")

    def create(self, path: Path, size: int) -> int:
        if self._fails("create"):
            self._fail("create")
        return super().create(path, size)

    def open(self, path: Path) -> int:
        if self._fails("open"):
            self._fail("open")
        return super().open(path)

    def write(self, fd: int, buffers: Sequence[Bytes], offset: int) -> None:
        if self._fails("write"):
            sectors = sum(buffer.size for buffer in buffers) // 512
            self._write_part(fd, buffers, offset, 512 * int(self._rng.integers(0, sectors + 1)))
            self._fail("write")
        super().write(fd, buffers, offset)

    def _write_part(self, fd: int, buffers: Sequence[Bytes], offset: int, size: int) -> None:
        """What a power cut leaves: some of the sectors."""
        for buffer in buffers:
            part = buffer.copy()[: max(0, size)]
            if part.size:
                with open(f"/proc/self/fd/{fd}", "r+b") as out:
                    out.seek(offset)
                    out.write(part.tobytes())
            offset += buffer.size
            size -= buffer.size

    def read(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        if self._fails("read"):
            self._fail("read")
        return super().read(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        if self._fails("sync"):
            self._fail("sync")
        super().sync(fd)

    def truncate(self, path: Path, size: int) -> None:
        if self._fails("truncate"):
            self._fail("truncate")
        super().truncate(path, size)

    def remove(self, path: Path) -> None:
        if self._fails("remove"):
            self._fail("remove")
        super().remove(path)

    def sync_directory(self, path: Path) -> None:
        if self._fails("sync_directory"):
            self._fail("sync_directory")
        super().sync_directory(path)


def abandon(opened: Opened) -> None:
    """What the kernel does when a process ends: descriptors and locks go, nothing is flushed."""
    opened.extents.close()
    opened.index.close()
    opened.lock.release()


def flip_bit(path: Path, bit: int) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(bit // 8)
        old = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([old ^ 1 << bit % 8]))
