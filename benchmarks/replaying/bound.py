"""What no cache of the budget could exceed, and what an endless one would reach.

Upper bound. Whoever reuses the first t tokens of a prompt holds the history of all of them. So
forget that windows and snapshots need room, and leave only history: then every block of 512 tokens
costs the same bytes, and the cache is one of equal pages which may refuse what it does not want.
For that, taking out the page whose next use is furthest away gives the most hits (Belady's MIN).
A prompt that uses a block uses all blocks before it, so a block's next use is never later than
that of the blocks after it: with the deeper one going first among equals, MIN's content is always
closed under prefixes, and each of its page hits is a hit of a whole prefix. Hence

    any policy's effective reuse  <=  MIN over history blocks,  at every budget,

with equality possible for a schema of history alone. For a schema with trailing state the bound is
not tight: nobody can have windows for nothing.

A prompt's last token is always computed, so a hit of all of a prompt's blocks saves a page less.
The bound ignores that too (blocks would no longer be worth the same). It takes requests one after
the other, as the replay does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from replaying.trace import BLOCK_TOKENS, TraceRequest

NEVER = 1 << 60


def usable_tokens(request: TraceRequest, num_blocks: int, page_size: int) -> int:
    """Tokens that a hit of `num_blocks` saves: the last one of a prompt is always computed."""
    last = (request.prompt_len - 1) // page_size * page_size
    return min(num_blocks * BLOCK_TOKENS, last)


@dataclass(frozen=True, slots=True)
class Infinite:
    """A cache that nothing ever leaves."""

    num_blocks: int  # of 512 tokens, distinct
    num_ends: int  # distinct ends of prompts
    hit_tokens: int


def infinite_cache(trace: Sequence[TraceRequest], page_size: int) -> Infinite:
    """Replay without eviction."""
    seen: set[int] = set()
    ends: set[int] = set()
    hit = 0
    for request in trace:
        hit += usable_tokens(request, _prefix(request, seen), page_size)
        seen.update(request.blocks)
        ends.update(request.blocks[-1:])
    return Infinite(len(seen), len(ends), hit)


def _prefix(request: TraceRequest, cached: set[int] | dict[int, int]) -> int:
    """Leading blocks that are cached."""
    for i, block in enumerate(request.blocks):
        if block not in cached:
            return i
    return len(request.blocks)


def best_hits(trace: Sequence[TraceRequest], capacity: int) -> list[int]:
    """[len(trace)] tokens hit so far by MIN with room for `capacity` blocks of equal worth."""
    uses = _next_uses(trace)
    cached: dict[int, int] = {}  # block -> request of its next use
    heap: list[tuple[int, int, int]] = []  # (-next use, -depth, block), stale ones included
    hits: list[int] = []
    for request, later in zip(trace, uses, strict=True):
        hit = _prefix(request, cached) * BLOCK_TOKENS
        hits.append((hits[-1] if hits else 0) + hit)
        for depth, (block, use) in enumerate(zip(request.blocks, later, strict=True)):
            cached[block] = use
            heappush(heap, (-use, -depth, block))
        while len(cached) > capacity or (heap and heap[0][0] == -NEVER):
            use, _, block = heappop(heap)
            if cached.get(block) == -use:
                del cached[block]
    return hits


def _next_uses(trace: Sequence[TraceRequest]) -> list[list[int]]:
    """Per request and block the index of the next request that uses the block."""
    upcoming: dict[int, int] = {}
    found: list[list[int]] = []
    for index in range(len(trace) - 1, -1, -1):
        blocks = trace[index].blocks
        found.append([upcoming.get(block, NEVER) for block in blocks])
        upcoming.update(dict.fromkeys(blocks, index))
    found.reverse()
    return found
