"""What the disk tier asks of a file system, in one place, so that a test can make it fail.

Direct I/O bypasses the page cache: restored pages are read once, and their copy in the cache would
only push out something else. Where a file system refuses it, ordinary I/O does the same slower.

Every call raises OSError as the system gave it; reads past the end return less.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

from statewise.runtime.tiers.buffers import Bytes
from statewise.runtime.tiers.page import ALIGNMENT
from statewise.runtime.tiers.store import TierError

LOCK = "lock"
FILE_MODE = 0o600
DIRECTORY_MODE = 0o700
MAX_SEGMENTS = 1024  # buffers of one vectored call (IOV_MAX)


class Files:
    """The real file system. `direct`: ask for direct I/O.

    `has_own_reads`: reads are more than the system's, so that everybody must go through `read`. A
    class that has a `read` of its own has that by itself.
    """

    has_own_reads = False

    def __init_subclass__(cls) -> None:
        """Notice that reads are not the system's."""
        cls.has_own_reads = cls.has_own_reads or "read" in cls.__dict__

    def __init__(self, direct: bool = True) -> None:
        self.direct = direct and hasattr(os, "O_DIRECT")

    def make_directory(self, path: Path) -> None:
        """Create a private directory, its parents included."""
        path.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)

    def create(self, path: Path, size: int) -> int:
        """Create a new file of `size` zero bytes, its room reserved; returns its descriptor."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = self._open(path, flags)
        try:
            self._reserve(fd, size)
        except OSError:
            os.close(fd)
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        return fd

    def _reserve(self, fd: int, size: int) -> None:
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            os.ftruncate(fd, size)

    def open(self, path: Path) -> int:
        """Open a file for reading; returns its descriptor."""
        return self._open(path, os.O_RDONLY | os.O_CLOEXEC)

    def open_again(self, path: Path) -> int:
        """Open a file that is there for writing; returns its descriptor."""
        return self._open(path, os.O_RDWR | os.O_CLOEXEC)

    def _open(self, path: Path, flags: int) -> int:
        if self.direct:
            try:
                return os.open(path, flags | os.O_DIRECT, FILE_MODE)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.direct = False
                with contextlib.suppress(OSError):
                    if flags & os.O_CREAT:  # some systems create the file, then refuse
                        path.unlink()
        return os.open(path, flags, FILE_MODE)

    def write(self, fd: int, buffers: Sequence[Bytes], offset: int) -> None:
        """Write all buffers one after the other from `offset`."""
        pending = [buffer.data for buffer in buffers]
        while pending:
            done = os.pwritev(fd, pending[:MAX_SEGMENTS], offset)
            if done == 0:
                raise OSError(errno.ENOSPC, "the file takes no more bytes")
            offset += done
            pending = _advance(pending, done)

    def read(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        """Fill the buffers from `offset`; returns how many bytes there were."""
        pending = [buffer.data for buffer in buffers]
        total = 0
        while pending:
            done = os.preadv(fd, pending[:MAX_SEGMENTS], offset + total)
            total += done
            if done == 0 or done % ALIGNMENT:
                break  # the end of the file
            pending = _advance(pending, done)
        return total

    def sync(self, fd: int) -> None:
        """Return when what was written is on the medium."""
        os.fdatasync(fd)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def truncate(self, path: Path, size: int) -> None:
        """Cut a file to `size` bytes."""
        os.truncate(path, size)

    def remove(self, path: Path) -> None:
        """Delete a file; one that is gone is fine."""
        path.unlink(missing_ok=True)

    def sync_directory(self, path: Path) -> None:
        """Return when the directory's entries are on the medium."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def can_write(directory: Path) -> bool:
    """Whether files can be made in a directory: not on a read-only medium, nor in another's."""
    effective = os.access in os.supports_effective_ids
    return os.access(directory, os.W_OK, effective_ids=effective)


def _advance(buffers: list[memoryview], done: int) -> list[memoryview]:
    for i, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[i + 1 :]] if done else buffers[i:]
        done -= len(buffer)
    return []


class DirectoryLock:
    """The right of one process to a directory, held until `release` or the process's end.

    Who takes a directory and then finds that it cannot be used leaves no lock file there
    (`withdraw`). So a file that was locked is asked whether it is still the directory's: it may
    have been removed by its owner just before.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK
        self._fd = -1
        while not self.is_current():
            self.release()
            self._fd, self._is_new = self._open()
            self._take(directory)
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def _open(self) -> tuple[int, bool]:
        """Descriptor of the lock file, and whether it was made just now."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            return os.open(self._path, flags | os.O_EXCL, FILE_MODE), True
        except FileExistsError:
            return os.open(self._path, flags, FILE_MODE), False

    def _take(self, directory: Path) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            self.release()
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise TierError(
                f"the cache directory {directory} is in use by process {owner}; "
                "give each server a directory of its own"
            ) from error

    def is_current(self) -> bool:
        """Whether the directory is still the one that was locked: not wiped, nor made anew."""
        try:
            return self._fd >= 0 and os.path.samestat(os.fstat(self._fd), self._path.stat())
        except OSError:
            return False

    def check(self) -> None:
        """OSError where it is not: what lies there now may be another's."""
        if not self.is_current():
            raise OSError(errno.ESTALE, f"{self._path.parent} was removed, or made anew by others")

    def withdraw(self) -> None:
        """Give the directory up and leave no lock file that was not there before. Idempotent."""
        if self._fd >= 0 and self._is_new:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
        self.release()

    def release(self) -> None:
        """Give the directory up. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
