"""Pool sizes: within budget, enough for what runs, refused with the fix where not."""

from __future__ import annotations

import pytest

from statewise.radix.schema import CacheSchema, GroupKind, StateGroupSpec
from statewise.runtime.memory.sizing import (
    PoolSizeError,
    SizingRequest,
    plan_pools,
    window_blocks_per_request,
)

MIB = 1 << 20


def group(kind: GroupKind, layers: int, first: int = 0, **fields: object) -> StateGroupSpec:
    base: dict[str, object] = {
        "name": kind.value,
        "kind": kind,
        "layers": tuple(range(first, first + layers)),
        "layout_id": "x",
        "version": "1",
        "entry_bytes": 1024,
    }
    return StateGroupSpec(**(base | fields))  # type: ignore[arg-type]


def schema(*groups: StateGroupSpec, page_size: int = 16) -> CacheSchema:
    return CacheSchema(page_size, 64, groups, "m")


FULL = group(GroupKind.FULL, 3)
WINDOW = group(GroupKind.WINDOW, 15, 3, window=512)
RECURRENT = group(GroupKind.RECURRENT, 8, 20, entry_bytes=0, snapshot_bytes=50_000)


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW), (WINDOW,), (FULL, RECURRENT)])
@pytest.mark.parametrize("budget", [64 * MIB, 600 * MIB, 5000 * MIB])
def test_the_budget_is_used_and_not_exceeded(groups, budget):
    plan = plan_pools(schema(*groups), SizingRequest(budget))
    assert budget * 0.5 < plan.total_bytes <= budget
    assert plan.num_running >= 1
    assert len(plan.num_blocks) == len(groups)
    assert sum(plan.group_bytes) == plan.total_bytes
    assert len(plan.lines) == len(groups) + (plan.num_running < 64)


def test_every_running_request_can_hold_its_window_and_a_chunk_fits():
    request = SizingRequest(2000 * MIB, max_running_requests=64, chunk_tokens=512)
    plan = plan_pools(schema(FULL, WINDOW), request)
    assert plan.num_running == 64
    needed = 64 * window_blocks_per_request(WINDOW, 16) + 512 // 16
    assert plan.num_blocks[1] >= needed
    assert plan.num_blocks[1] <= plan.num_blocks[0]


@pytest.mark.parametrize(
    ("kind", "window", "blocks"),
    [
        ("window", 512, 34),
        ("window", 1, 2),
        ("window", 17, 3),
        ("window", 18, 4),
        ("chunked", 512, 34),
        ("chunked", 16, 3),
    ],
)
def test_blocks_a_request_holds_cover_its_window_at_every_offset(kind, window, blocks):
    spec = group(GroupKind(kind), 1, window=window)
    assert window_blocks_per_request(spec, 16) == blocks
    for position in range(200):
        low = max(0, position - window + 1) if kind == "window" else position - position % window
        assert position // 16 - low // 16 + 1 <= blocks


def test_small_memory_holds_fewer_windows_and_says_so():
    plan = plan_pools(schema(FULL, WINDOW), SizingRequest(100 * MIB, max_running_requests=64))
    assert 1 <= plan.num_running < 64
    assert any(f"of {plan.num_running} running requests" in line for line in plan.lines)


def test_asked_sizes_are_taken_as_they_are():
    request = SizingRequest(0, max_total_tokens=800, max_window_tokens=1600)
    plan = plan_pools(schema(FULL, WINDOW), request)
    assert plan.num_blocks == (50, 100)
    small = SizingRequest(0, max_total_tokens=800, chunk_tokens=32)
    assert plan_pools(schema(FULL, WINDOW), small).num_blocks == (50, 50)


def test_the_longest_context_is_the_models_or_the_pools():
    small = SizingRequest(0, max_total_tokens=800, context_length=8192)
    assert plan_pools(schema(FULL), small).max_context_len == 800
    large = SizingRequest(0, max_total_tokens=80_000, context_length=8192)
    assert plan_pools(schema(FULL), large).max_context_len == 8192


def test_too_little_memory_names_the_fix():
    with pytest.raises(PoolSizeError, match="--mem-fraction-static"):
        plan_pools(schema(FULL, WINDOW), SizingRequest(3 * MIB))
    request = SizingRequest(0, max_total_tokens=8000, max_window_tokens=160)
    with pytest.raises(PoolSizeError, match="--max-window-tokens to 1072"):
        plan_pools(schema(FULL, WINDOW), request)


def test_start_log_lines_name_bytes_per_token_and_pools():
    plan = plan_pools(schema(FULL, WINDOW, RECURRENT), SizingRequest(2000 * MIB))
    full, window, recurrent = plan.lines
    assert "group full: full, 3 layers, 3,072 bytes a token" in full
    assert "window of 512 tokens, 15 layers, 15,360 bytes a token" in window
    assert "400,000 bytes a snapshot" in recurrent
