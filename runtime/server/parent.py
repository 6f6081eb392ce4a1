"""Notices when another process ends, whatever ended it, so that a server need not outlive it.

    --parent-pid P  ->  ParentWatch(P)  --P has ended-->  the server stops as after SIGTERM

A process is named by its id, and not "whoever started me", so that a shell or a launcher in between
does not matter, and a parent that is gone before the server looks is noticed, too. Linux tells
through a pidfd; elsewhere the process is looked for every second.

This module ends nothing: it calls back.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

POLL_S = 1.0


class ParentWatch:
    """Calls `on_end` once, on the running event loop, after process `pid` has ended."""

    def __init__(self, pid: int, on_end: Callable[[], None]) -> None:
        self._pid = pid
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._fd = -1
        self._timer: asyncio.TimerHandle | None = None
        try:
            self._fd = os.pidfd_open(pid)
            self._loop.add_reader(self._fd, self._ended)
        except ProcessLookupError:
            self._timer = self._loop.call_later(0, self._ended)
        except (AttributeError, OSError):  # not Linux, or a kernel without pidfd
            self._poll()

    def close(self) -> None:
        """Watch no more; a second call does nothing."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _ended(self) -> None:
        self.close()
        self._on_end()

    def _poll(self) -> None:
        if _exists(self._pid):
            self._timer = self._loop.call_later(POLL_S, self._poll)
        else:
            self._ended()


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
