"""Running many items side by side, with results in order.

One generator serves both styles: it keeps a bounded number of items in flight, so that a batch of a
million arguments costs the memory of a few hundred, and yields results in the items' order. Ending
it early drops what has not started.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from statewise.frontend.progress import Progress

T = TypeVar("T")
MIN_AUTO_THREADS = 96
AUTO_THREADS_PER_CPU = 16
IN_FLIGHT_PER_THREAD = 4


def thread_count(asked: int | str, num_items: int) -> int:
    """Return how many items run at once. Raises ValueError for no number and not "auto"."""
    if asked == "auto":
        asked = max(MIN_AUTO_THREADS, AUTO_THREADS_PER_CPU * (os.cpu_count() or 1))
    if not isinstance(asked, int) or asked < 1:
        raise ValueError(f'num_threads must be "auto" or a positive number, not {asked!r}')
    return max(1, min(asked, num_items))


def run_all(
    run: Callable[[T], Any],
    items: Sequence[T],
    *,
    num_threads: int,
    progress_bar: bool,
    return_exceptions: bool,
) -> Iterator[Any]:
    """Yield `run(item)` for each item, in order; failures are raised, or yielded if asked for."""
    progress = Progress(len(items)) if progress_bar else None
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="statewise-batch")
    flying: deque[Future[Any]] = deque()
    waiting = iter(items)

    def launch() -> None:
        for item in waiting:
            future = pool.submit(run, item)
            if progress is not None:
                future.add_done_callback(lambda _: progress.advance())
            flying.append(future)
            if len(flying) >= num_threads * IN_FLIGHT_PER_THREAD:
                return

    try:
        launch()
        while flying:
            yield _result(flying.popleft(), return_exceptions)
            launch()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        if progress is not None:
            progress.close()


def _result(future: Future[Any], return_exceptions: bool) -> Any:
    if not return_exceptions:
        return future.result()
    error = future.exception()
    return future.result() if error is None else error
