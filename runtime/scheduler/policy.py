"""In which order waiting requests are tried.

`lpm` (longest prefix match first) keeps hot prefixes hot; whoever has waited longer than
`max_wait_s` goes before everybody, oldest first whatever its priority, so nobody starves. `fcfs` is
arrival order. Among those who have not waited so long a higher priority goes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from statewise.runtime.scheduler.request import Request

# Matching every waiting prompt each step costs more than it gains on a long queue.
MAX_MATCHED = 64


def is_aged(request: Request, now: float, max_wait_s: float) -> bool:
    """Whether the request has waited so long that nobody may overtake it."""
    return now - request.arrival > max_wait_s


def order(
    waiting: Iterable[Request],
    policy: str,
    now: float,
    max_wait_s: float,
    matched_len: Callable[[Request], int],
) -> list[Request]:
    """Waiting requests, the first to try first. `matched_len` is reusable tokens."""
    queue = sorted(waiting, key=lambda r: (-r.message.priority, r.arrival))
    aged = [r for r in queue if is_aged(r, now, max_wait_s)]
    fresh = [r for r in queue if not is_aged(r, now, max_wait_s)]
    aged.sort(key=lambda r: r.arrival)
    if policy == "lpm" and len(fresh) > 1:
        head = fresh[:MAX_MATCHED]
        head.sort(key=lambda r: (-r.message.priority, -matched_len(r), r.arrival))
        fresh[:MAX_MATCHED] = head
    return aged + fresh
