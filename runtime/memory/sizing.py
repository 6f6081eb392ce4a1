"""How many blocks each state group's device pool gets, and the sentence that explains it.

History groups grow with every token; window groups need only what running requests hold plus what
retention may keep; snapshot groups need a few blocks for each request. One budget in bytes is
split so that every pool runs out at about the same time: the number of history tokens is the one
unknown, found by bisection over an increasing cost. Nothing is allocated here.

    history tokens T      FULL, COMPRESSED, INDEX      T tokens
    window tokens         WINDOW, CHUNKED              min(T, max(least, WINDOW_SHARE * T))
    snapshots             TAIL, RECURRENT              max(least, T / SNAPSHOT_SPACING)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from statewise.radix.schema import CacheSchema, StateGroupSpec
from statewise.runtime.errors import OperatingError

WINDOW_SHARE = 0.25  # retained window tokens for each history token (docs/replay.md)
SNAPSHOT_SPACING = 1024  # history tokens for each retained snapshot
SNAPSHOTS_PER_REQUEST = 2  # the working one and the next checkpoint
MAX_BLOCKS = (1 << 31) - 1  # block ids are int32


class PoolSizeError(OperatingError):
    """The memory budget does not hold even one request; the message says what would."""

    code = "pool_size"


@dataclass(frozen=True)
class SizingRequest:
    """What limits the pools. Token counts of 0 are chosen from `budget_bytes`."""

    budget_bytes: int
    max_total_tokens: int = 0  # tokens of every history pool
    max_window_tokens: int = 0  # tokens of every window pool
    max_running_requests: int = 64
    chunk_tokens: int = 512  # most tokens of one step
    context_length: int = 0  # the model's longest context; 0: unknown


@dataclass(frozen=True)
class PoolPlan:
    """Blocks and bytes of each group's pool, in the schema's order."""

    num_blocks: tuple[int, ...]
    group_bytes: tuple[int, ...]
    max_context_len: int  # longest request that fits alone, in tokens
    num_running: int  # requests that can hold their windows and snapshots at once
    lines: tuple[str, ...]  # for the start log

    @property
    def total_bytes(self) -> int:
        """Bytes of all pools."""
        return sum(self.group_bytes)


def _ceil_div(value: int, unit: int) -> int:
    return -(-value // unit)


def window_blocks_per_request(group: StateGroupSpec, page_size: int) -> int:
    """Blocks one request holds between steps: its window, its sinks, the page it fills."""
    reach = group.window if group.kind.value == "chunked" else group.window - 1
    return _ceil_div(reach, page_size) + 2 + _ceil_div(group.sinks, page_size)


def _least_blocks(group: StateGroupSpec, page_size: int, running: int, chunk_tokens: int) -> int:
    if group.kind.is_window:
        held = running * window_blocks_per_request(group, page_size)
        return held + _ceil_div(chunk_tokens, page_size) + 1
    if group.kind.is_snapshot:
        return running * SNAPSHOTS_PER_REQUEST + 1
    return 1


def _group_blocks(
    group: StateGroupSpec, schema: CacheSchema, tokens: int, request: SizingRequest, running: int
) -> int:
    page_size = schema.page_size
    has_history = any(g.kind.is_history for g in schema.groups)
    if group.kind.is_history:
        return max(1, tokens // page_size)
    least = _least_blocks(group, page_size, running, request.chunk_tokens)
    if group.kind.is_snapshot:
        return max(least, tokens // SNAPSHOT_SPACING)
    if request.max_window_tokens:
        return max(1, request.max_window_tokens // page_size)
    wanted = max(least, int(tokens * WINDOW_SHARE) // page_size)
    # No window page can be held whose history page is not: more blocks than history is waste.
    most = max(tokens // page_size, _least_blocks(group, page_size, 1, request.chunk_tokens))
    return min(wanted, most) if has_history else wanted


def _blocks(
    schema: CacheSchema, tokens: int, request: SizingRequest, running: int
) -> tuple[int, ...]:
    return tuple(_group_blocks(g, schema, tokens, request, running) for g in schema.groups)


def _bytes(schema: CacheSchema, blocks: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(
        n * g.block_bytes(schema.page_size) for n, g in zip(blocks, schema.groups, strict=True)
    )


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """Largest value in [low, high] that fits (whatever is below one fits too); low if none."""
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _choose_tokens(schema: CacheSchema, request: SizingRequest, running: int) -> int:
    """History tokens that the budget holds beside the windows of `running` requests."""
    if request.max_total_tokens:
        return request.max_total_tokens
    page = schema.page_size

    def fits(pages: int) -> bool:
        blocks = _blocks(schema, pages * page, request, running)
        return sum(_bytes(schema, blocks)) <= request.budget_bytes

    pages = _largest(0, min(MAX_BLOCKS, 1 << 40), fits)
    if not any(g.kind.is_history for g in schema.groups) and request.context_length:
        pages = min(pages, _ceil_div(request.context_length, page) * running)
    return pages * page


def _choose_running(schema: CacheSchema, request: SizingRequest) -> int:
    """How many requests' windows and snapshots fit in half of the budget; at least 1."""
    if request.max_total_tokens:
        return request.max_running_requests

    trailing = [g for g in schema.groups if not g.kind.is_history]

    def fits(running: int) -> bool:
        page, chunk = schema.page_size, request.chunk_tokens
        needs = (_least_blocks(g, page, running, chunk) * g.block_bytes(page) for g in trailing)
        return sum(needs) <= request.budget_bytes // 2

    return _largest(1, request.max_running_requests, fits)


def _longest_context(schema: CacheSchema, blocks: tuple[int, ...], request: SizingRequest) -> int:
    history = [
        n * schema.page_size
        for n, g in zip(blocks, schema.groups, strict=True)
        if g.kind.is_history
    ]
    limits = history + ([request.context_length] if request.context_length else [])
    return min(limits) if limits else 0


def _check(schema: CacheSchema, blocks: tuple[int, ...], request: SizingRequest) -> None:
    total = sum(_bytes(schema, blocks))
    if not request.max_total_tokens and total > request.budget_bytes:
        raise PoolSizeError(
            f"the pools need at least {total >> 20} MiB and {request.budget_bytes >> 20} MiB are "
            "given; raise --mem-fraction-static or lower --max-running-requests or "
            "--chunked-prefill-size"
        )
    for n, group in zip(blocks, schema.groups, strict=True):
        least = _least_blocks(group, schema.page_size, 1, request.chunk_tokens)
        if n < least:
            raise PoolSizeError(
                f"group {group.name!r}: {n} blocks of {schema.page_size} tokens, and one request "
                f"needs {least}; raise --max-window-tokens to {least * schema.page_size}"
            )
        if n > MAX_BLOCKS:
            raise PoolSizeError(f"group {group.name!r}: {n} blocks exceed {MAX_BLOCKS}")


def _lines(schema: CacheSchema, plan: tuple[int, ...], sizes: tuple[int, ...]) -> list[str]:
    page = schema.page_size
    out = []
    for group, n, size in zip(schema.groups, plan, sizes, strict=True):
        what = f"{n} blocks" if group.kind.is_snapshot else f"{n * page} tokens in {n} blocks"
        window = f" of {group.window} tokens" if group.kind.is_window else ""
        per_token = group.block_bytes(page) / page
        unit = "snapshot" if group.kind.is_snapshot else "token"
        cost = group.block_bytes(page) if group.kind.is_snapshot else per_token
        out.append(
            f"group {group.name}: {group.kind.value}{window}, {len(group.layers)} layers, "
            f"{cost:,.0f} bytes a {unit}; pool {what}, {size / (1 << 20):,.0f} MiB"
        )
    return out


def plan_pools(schema: CacheSchema, request: SizingRequest) -> PoolPlan:
    """Blocks per group under one budget.

    Raises PoolSizeError where not even one request of one chunk fits.
    """
    running = _choose_running(schema, request)
    tokens = _choose_tokens(schema, request, running)
    blocks = _blocks(schema, tokens, request, running)
    _check(schema, blocks, request)
    sizes = _bytes(schema, blocks)
    longest = _longest_context(schema, blocks, request)
    lines = _lines(schema, blocks, sizes)
    if running < request.max_running_requests:
        lines.append(
            f"memory holds the windows of {running} running requests, "
            f"not of {request.max_running_requests}"
        )
    return PoolPlan(blocks, sizes, longest, running, tuple(lines))
