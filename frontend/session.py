"""What all states of one program run share: settings, one condition, and the body's progress.

One condition for the whole run keeps waiting simple: whatever changes (a variable, a piece of
text, the end of the body) wakes every waiter, which looks again at what it waits for. Asynchronous
waiters are woken through their event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from statewise.frontend.backends.base import Backend, CacheHints
from statewise.frontend.sampling import SamplingOptions

T = TypeVar("T")


@dataclass
class Session:
    """One run of a program. Fields above the line do not change."""

    backend: Backend
    options: SamplingOptions
    stream: bool = False
    use_thread: bool = True
    salt: str = ""
    exact: bool = False
    # ---
    changed: threading.Condition = field(default_factory=threading.Condition)
    body_thread: int = 0  # which thread runs the program's body; 0: none
    body_done: bool = False
    body_error: BaseException | None = None
    _wakers: list[Callable[[], None]] = field(default_factory=list)

    @property
    def hints(self) -> CacheHints:
        """What an ordinary call asks of the cache."""
        return CacheHints(salt=self.salt, exact=self.exact)

    def body_starts(self) -> None:
        """Expect the body to run in another thread."""
        self.body_done = False

    def enter_body(self) -> None:
        """Note that the calling thread starts to run the program's body."""
        self.body_thread = threading.get_ident()

    def leave_body(self, error: BaseException | None) -> None:
        """Note that the body ended: what it did not assign will not come any more."""
        with self.changed:
            self.body_done = True
            self.body_thread = 0
            self.body_error = error
            self.notify()

    def more_may_come(self) -> bool:
        """Whether the body can still append, as the calling thread sees it.

        False in the body itself: it would wait for its own next line.
        """
        return not self.body_done and self.body_thread != threading.get_ident()

    def notify(self) -> None:
        """Wake every waiter. The caller holds `changed`."""
        self.changed.notify_all()
        for wake in self._wakers:
            wake()

    def wait_for(self, poll: Callable[[], T | None], timeout_s: float | None = None) -> T:
        """Call `poll`, with `changed` held, until it returns something.

        Raises TimeoutError after `timeout_s`, and whatever `poll` raises.
        """
        with self.changed:
            found = self.changed.wait_for(lambda: _boxed(poll()), timeout_s)
            if not found:
                raise TimeoutError(f"nothing arrived within {timeout_s} s")
            return found[0]

    async def wait_for_async(self, poll: Callable[[], T | None]) -> T:
        """`wait_for` without blocking the running event loop."""
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(woken.set)

        with self.changed:
            self._wakers.append(wake)
        try:
            while True:
                woken.clear()
                with self.changed:
                    value = poll()
                if value is not None:
                    return value
                await woken.wait()
        finally:
            with self.changed:
                self._wakers.remove(wake)


def _boxed(value: T | None) -> tuple[T, ...]:
    return () if value is None else (value,)
