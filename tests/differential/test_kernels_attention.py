"""Paged attention: the reference against float64 arithmetic, native kernels against the same.

Pools are poisoned (see support.attention_cases), so reading one slot too many is a NaN.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from statewise.kernels.cpu_backend import CpuAttention
from statewise.kernels.interface import AttentionBackend
from statewise.kernels.reference import TorchAttention
from support.attention_cases import Case, Row, Step, expected_output, make_step
from support.native_kernels import INSTRUCTION_SETS, native_setting, needs_native

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}

MIXED = (Row(1, 70), Row(33, 97), Row(0, 12), Row(1, 1), Row(7, 7), Row(90, 300), Row(1, 600))
REPLAY = (Row(5, 69, start=64, writes=False), Row(40, 140, start=96), Row(1, 50, start=49))

CASES = {
    "grouped heads": Case(MIXED, num_q_heads=9, num_kv_heads=3, head_dim=64, page_size=16),
    "one kv head": Case(MIXED, num_q_heads=4, num_kv_heads=1, head_dim=256, page_size=16),
    "window": Case(MIXED, num_q_heads=6, num_kv_heads=2, head_dim=32, page_size=8, window=17),
    "window one": Case(MIXED, head_dim=16, page_size=8, window=1),
    "cap and sinks": Case(MIXED, head_dim=80, page_size=16, soft_cap=5.0, sinks=True),
    "page of one": Case(MIXED, num_q_heads=8, num_kv_heads=1, head_dim=128, page_size=1),
    "wide page": Case(MIXED, num_q_heads=5, num_kv_heads=5, head_dim=16, page_size=64),
    "odd head dim": Case(MIXED, num_q_heads=3, num_kv_heads=1, head_dim=20, page_size=8, window=9),
    "replay": Case(REPLAY, num_q_heads=4, num_kv_heads=2, head_dim=64, page_size=16),
    "replay in a window": Case(REPLAY, head_dim=32, page_size=16, window=40, sinks=True),
    "no rows": Case(()),
}


@functools.cache
def prepared(case: Case) -> tuple[Step, np.ndarray]:
    """A step, which nobody may change, and its exact result."""
    step = make_step(case)
    return step, expected_output(step)


def computed(backend: AttentionBackend, step: Step) -> torch.Tensor:
    """Append, then attend, on a copy of the step's pool."""
    pool = step.pool.clone()
    plan = backend.plan(step.case.geometry(), step.layout)
    backend.append(plan, pool, step.k, step.v)
    return backend.run(plan, step.q, pool, step.sinks)


def assert_close(actual: torch.Tensor, expected: np.ndarray, tolerance: float) -> None:
    difference = np.abs(actual.double().numpy() - expected)
    worst = np.unravel_index(difference.argmax(), difference.shape) if difference.size else None
    assert not np.isnan(difference).any(), "NaN: a slot outside the readable range was read"
    assert difference.max(initial=0) <= tolerance, f"at {worst}: {difference.max()}"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_reference_equals_the_definition(name: str, dtype: torch.dtype) -> None:
    step, expected = prepared(replace(CASES[name], dtype=dtype))
    assert_close(computed(TorchAttention(), step), expected, TOLERANCE[dtype])


@needs_native
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_native_equals_the_definition(name: str, dtype: torch.dtype, instruction_set: str) -> None:
    step, expected = prepared(replace(CASES[name], dtype=dtype))
    with native_setting(instruction_set, num_threads=2):
        assert_close(computed(CpuAttention(), step), expected, TOLERANCE[dtype])


@needs_native
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_queries_may_be_wider_than_the_pool(instruction_set: str) -> None:
    case = replace(CASES["grouped heads"], dtype=torch.bfloat16, q_dtype=torch.float32)
    step, expected = prepared(case)
    with native_setting(instruction_set):
        assert_close(computed(CpuAttention(), step), expected, 2e-5)


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_batch_or_on_threads(
    dtype: torch.dtype, instruction_set: str
) -> None:
    rows = (Row(1, 2000), Row(60, 700), Row(3, 1100), Row(130, 130), Row(1, 5))
    case = Case(rows, num_q_heads=9, num_kv_heads=3, head_dim=64, page_size=16, dtype=dtype)
    step = make_step(case)
    backend = CpuAttention()
    with native_setting(instruction_set, num_threads=3):
        together = computed(backend, step)
    with native_setting(instruction_set, num_threads=1):
        assert torch.equal(computed(backend, step), together)
        for r in range(len(rows)):
            first, last = step.layout.query_starts[r : r + 2].tolist()
            alone = computed(backend, _only_row(step, r))
            assert torch.equal(alone, together[first:last]), f"row {r}"


def _only_row(step: Step, r: int) -> Step:
    """The same pool and row r alone."""
    first, last = step.layout.query_starts[r : r + 2].tolist()
    row = slice(r, r + 1)
    layout = replace(
        step.layout,
        query_starts=torch.tensor([0, last - first], dtype=torch.int32),
        context_lens=step.layout.context_lens[row],
        context_starts=step.layout.context_starts[row],
        page_table=step.layout.page_table[row],
        write_mask=step.layout.write_mask[row],
    )
    tokens = slice(first, last)
    return replace(step, layout=layout, q=step.q[tokens], k=step.k[tokens], v=step.v[tokens])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rows = []
    for _ in range(draw(st.integers(0, 4))):
        tokens = draw(st.sampled_from([0, 1, 1, 2, 7, 33, 90]))
        before = draw(st.sampled_from([0, 1, 5, 63, 64, 200, 700]))
        start = draw(st.integers(0, before))
        rows.append(Row(tokens, tokens + before, start, draw(st.booleans())))
    num_kv_heads = draw(st.integers(1, 3))
    return Case(
        tuple(rows),
        num_q_heads=num_kv_heads * draw(st.sampled_from([1, 2, 3, 4, 5, 8])),
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from([8, 16, 20, 32, 64, 80, 128, 256])),
        page_size=draw(st.sampled_from([1, 8, 16, 64])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        window=draw(st.sampled_from([0, 0, 1, 5, 17, 64, 130])),
        soft_cap=draw(st.sampled_from([0.0, 30.0])),
        sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


@pytest.mark.slow
@needs_native
@settings(max_examples=25)
@given(case=cases(), instruction_set=st.sampled_from(INSTRUCTION_SETS))
def test_any_step_equals_the_definition(case: Case, instruction_set: str) -> None:
    step = make_step(case)
    expected = expected_output(step)
    tolerance = TOLERANCE[case.dtype]
    assert_close(computed(TorchAttention(), step), expected, tolerance)
    with native_setting(instruction_set, num_threads=2):
        assert_close(computed(CpuAttention(), step), expected, tolerance)


@pytest.mark.parametrize(
    "backend_type", [TorchAttention, pytest.param(CpuAttention, marks=needs_native)]
)
def test_append_writes_the_new_slots_and_nothing_else(
    backend_type: type[TorchAttention] | type[CpuAttention],
) -> None:
    case = Case((Row(5, 13), Row(3, 20, writes=False), Row(1, 8)), num_q_heads=4, num_kv_heads=2)
    step = make_step(case)
    pool = torch.full_like(step.pool, 7.0)
    backend = backend_type()
    backend.append(backend.plan(case.geometry(), step.layout), pool, step.k, step.v)
    expected = torch.full_like(step.pool, 7.0)
    for r, token in ((0, 0), (2, 8)):
        row = case.rows[r]
        for i, position in enumerate(range(row.context - row.tokens, row.context)):
            block = step.layout.page_table[r, position // case.page_size]
            expected[block, 0, :, position % case.page_size] = step.k[token + i]
            expected[block, 1, :, position % case.page_size] = step.v[token + i]
    assert torch.equal(pool, expected)


@pytest.mark.parametrize(
    "backend_type", [TorchAttention, pytest.param(CpuAttention, marks=needs_native)]
)
@pytest.mark.parametrize("bad", [-1, 99])
def test_a_block_outside_the_pool_is_an_error_not_a_read(
    backend_type: type[TorchAttention] | type[CpuAttention], bad: int
) -> None:
    case = Case((Row(2, 20),))
    step = make_step(case)
    backend = backend_type()
    for page in (0, 2):
        table = step.layout.page_table.clone()
        table[0, page] = bad
        plan = backend.plan(case.geometry(), replace(step.layout, page_table=table))
        with pytest.raises(IndexError, match=f"block {bad}, the pool has"):
            backend.run(plan, step.q, step.pool)
        if page == 2:
            with pytest.raises(IndexError, match=f"block {bad}, the pool has"):
                backend.append(plan, step.pool, step.k, step.v)


@needs_native
def test_native_takes_views_of_wider_tensors() -> None:
    case = replace(CASES["grouped heads"], dtype=torch.bfloat16)
    step = make_step(case)
    backend = CpuAttention()
    expected = computed(backend, step)
    fused = torch.cat([x.flatten(1) for x in (step.q, step.k, step.v)], dim=1)
    q_width, kv_width = step.q[0].numel(), step.k[0].numel()
    q, k, v = fused.split([q_width, kv_width, kv_width], dim=1)
    layers = torch.full((step.pool.shape[0], 3, *step.pool.shape[1:]), float("nan")).bfloat16()
    layers[:, 1] = step.pool
    plan = backend.plan(case.geometry(), step.layout)
    backend.append(plan, layers[:, 1], k.view_as(step.k), v.view_as(step.v))
    out = backend.run(plan, q.view_as(step.q), layers[:, 1])
    assert torch.equal(out, expected)
    assert bool(layers[:, 0].isnan().all())
    assert bool(layers[:, 2].isnan().all())


@needs_native
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_nan_in_a_readable_key_reaches_the_output(instruction_set: str) -> None:
    for tokens in (1, 64):
        case = Case((Row(tokens, 200),), num_q_heads=3, head_dim=64, dtype=torch.bfloat16)
        step = make_step(case)
        pool = step.pool.nan_to_num(0.0)
        pool[step.layout.page_table[0, 10], 0] = float("nan")
        backend = CpuAttention()
        with native_setting(instruction_set):
            out = backend.run(backend.plan(case.geometry(), step.layout), step.q, pool)
        assert bool(out.isnan().all())
