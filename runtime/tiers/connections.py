"""Threads that ask a remote store many things at a time, and that nobody has to wait for.

A request to a store that does not answer cannot be taken back: the thread that made it comes back
when the request times out. These threads are daemons, so that neither `close` nor the end of the
interpreter waits for them, as it would for those of `concurrent.futures`.

This module knows nothing of stores.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any


class Connections:
    """At most `count` calls at a time; threads start with the first of them."""

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[Any], Any], Any] | None]
        self._queue = SimpleQueue()
        self._lock = threading.Lock()
        self._has_begun = self.is_closed = False

    def each(self, call: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """Call `call` with every item, side by side; results in order. Raises what they raise.

        On this thread, one after the other, where `close` was called.
        """
        with self._lock:
            futures = None
            if not self.is_closed:
                futures = [self._submit(call, item) for item in items]
        if futures is None:
            return [call(item) for item in items]
        return [future.result() for future in futures]

    def _submit(self, call: Callable[[Any], Any], item: Any) -> Future[Any]:
        if not self._has_begun:
            self._has_begun = True
            for number in range(self._count):
                name = f"{self._name}-{number}"
                threading.Thread(target=self._work, name=name, daemon=True).start()
        future: Future[Any] = Future()
        self._queue.put((future, call, item))
        return future

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            future, call, item = task
            try:
                future.set_result(call(item))
            except BaseException as error:
                future.set_exception(error)

    def close(self) -> None:
        """Threads end when what is queued was called; waits for none of them. Idempotent."""
        with self._lock:
            if self._has_begun and not self.is_closed:
                for _ in range(self._count):
                    self._queue.put(None)
            self.is_closed = True
