"""How many blocks each group's pool gets out of one budget in bytes.

    budget       a share of the bytes that the endless cache would hold: every page of every paged
                 group once, and at every prompt's end one snapshot of each group that needs one
    history      T tokens in every history group, T being what is found here
    windows      a share of T; all of T where a policy keeps or drops all groups together
    snapshots    one for each `SNAPSHOT_SPACING` of T; where none is needed at page boundaries, only
                 what the running request works in

This module does not replay.
"""

from __future__ import annotations

from dataclasses import dataclass

from replaying.bound import Infinite
from replaying.trace import BLOCK_TOKENS
from statewise.radix import CacheSchema, StateGroupSpec
from statewise.radix.need import needs_snapshot, trailing_pages

SNAPSHOT_SPACING = 4096
WORKING_SNAPSHOTS = 4


@dataclass(frozen=True, slots=True)
class Pools:
    """Blocks and bytes of each group, in the schema's order."""

    num_blocks: tuple[int, ...]
    group_bytes: tuple[int, ...]
    history_blocks: int  # of the trace's 512 tokens, that the budget would hold without the rest


def is_needed(spec: StateGroupSpec, page_size: int) -> bool:
    """Whether a page boundary needs a snapshot of the group."""
    return spec.kind.is_snapshot and needs_snapshot(spec, page_size)


def infinite_bytes(schema: CacheSchema, infinite: Infinite) -> int:
    """Bytes of a cache that nothing leaves."""
    size = schema.page_size
    pages = infinite.num_blocks * BLOCK_TOKENS // size
    total = 0
    for spec in schema.groups:
        if not spec.kind.is_snapshot:
            total += pages * spec.block_bytes(size)
        elif is_needed(spec, size):
            total += infinite.num_ends * spec.block_bytes(size)
    return total


def split(schema: CacheSchema, budget: int, window_share: float, chunk: int) -> Pools:
    """Pools within `budget` bytes; ValueError where not even one chunk of a prompt fits."""
    size = schema.page_size
    per_page = [spec.block_bytes(size) for spec in schema.groups]
    history = sum(b for b, s in zip(per_page, schema.groups, strict=True) if s.kind.is_history)

    def blocks(pages: int) -> tuple[int, ...]:
        return tuple(_blocks(spec, size, pages, window_share, chunk) for spec in schema.groups)

    def cost(pages: int) -> int:
        return sum(n * b for n, b in zip(blocks(pages), per_page, strict=True))

    low, high = 1, max(2, budget // max(history, 1))
    if cost(low) > budget:
        raise ValueError(f"a budget of {budget} bytes holds no page; {cost(low)} would hold one")
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cost(middle) <= budget else (low, middle - 1)
    chosen = blocks(low)
    sizes = tuple(n * b for n, b in zip(chosen, per_page, strict=True))
    return Pools(chosen, sizes, budget * size // (max(history, 1) * BLOCK_TOKENS))


def _blocks(spec: StateGroupSpec, size: int, pages: int, window_share: float, chunk: int) -> int:
    """Blocks of one group beside `pages` pages of history."""
    if spec.kind.is_history:
        return pages
    if spec.kind.is_snapshot:
        kept = pages * size // SNAPSHOT_SPACING if is_needed(spec, size) else 0
        return WORKING_SNAPSHOTS + kept
    far = spec.window * size * 4
    first, end = trailing_pages(spec, far, size)
    least = end - first + -(-chunk // size) + 1 + -(-spec.sinks // size)
    return max(least, int(pages * window_share))
