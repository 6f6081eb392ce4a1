"""Keeping a prefix warm.

`pin` has a prefix computed and kept, and asks for it again now and then, so that it stays among the
most recently used and is the last to be evicted; if it was evicted all the same, asking computes it
again. The keeping is the client's: it ends with the process, and it promises likelihood, not
residency.
"""

from __future__ import annotations

import threading
from typing import Any

from statewise.frontend import defaults
from statewise.frontend.backends.base import Backend, CacheHints
from statewise.frontend.errors import ProgramError

DEFAULT_REFRESH_S = 30.0


class Pin:
    """A prefix being kept. Ends with `release()`, its `with` block, or its time to live."""

    def __init__(
        self,
        backend: Backend,
        prefix: str,
        hints: CacheHints,
        ttl_s: float | None,
        refresh_s: float,
    ) -> None:
        self.prefix = prefix
        self.num_refreshes = 0
        self._backend = backend
        self._hints = hints
        self._released = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(
            target=self._keep, args=(ttl_s, refresh_s), name="statewise-pin", daemon=True
        )
        self.meta_info = backend.publish(prefix, hints)
        self._thread.start()

    @property
    def is_active(self) -> bool:
        """Whether the prefix is still being kept."""
        return self._thread.is_alive() and not self._released.is_set()

    def release(self) -> None:
        """Stop keeping the prefix. Raises `ProgramError` if keeping it failed meanwhile."""
        self._released.set()
        self._thread.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise ProgramError(f"the prefix could not be kept: {error}") from error

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _keep(self, ttl_s: float | None, refresh_s: float) -> None:
        left_s = float("inf") if ttl_s is None else ttl_s
        while left_s > 0:
            pause_s = min(refresh_s, left_s)
            if self._released.wait(pause_s):
                return
            left_s -= pause_s
            if left_s <= 0:
                return
            try:
                self._backend.publish(self.prefix, self._hints)
                self.num_refreshes += 1
            except Exception as error:
                self._error = error
                return


def pin(
    prefix: str,
    ttl: float | None = None,
    *,
    backend: Any = None,
    cache_salt: str = "",
    exact: bool = False,
    refresh: float = DEFAULT_REFRESH_S,
) -> Pin:
    """Compute a prefix now and keep it warm for `ttl` seconds (None: until released).

    `refresh` is the time between two askings in seconds. Raises `BackendError` where the prefix
    cannot be computed and ValueError for an empty prefix or a time that is not positive.
    """
    if not prefix:
        raise ValueError("an empty prefix cannot be pinned")
    if refresh <= 0 or (ttl is not None and ttl <= 0):
        raise ValueError("ttl and refresh must be positive")
    hints = CacheHints(salt=cache_salt, checkpoint=True, exact=exact)
    return Pin(defaults.resolve(backend), prefix, hints, ttl, refresh)
