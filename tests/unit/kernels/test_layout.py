"""What a block looks like, and which layouts are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from statewise.kernels.cpu_backend import CpuAttention
from statewise.kernels.interface import BatchLayout
from statewise.kernels.layout import block_layout_id, check_layout
from statewise.kernels.reference import TorchAttention
from support.attention_cases import Case, Row, make_step
from support.native_kernels import needs_native

CASE = Case((Row(2, 20), Row(1, 5)), num_q_heads=6, num_kv_heads=3, head_dim=64, page_size=16)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_layout_id_names_everything_that_changes_the_bytes() -> None:
    geometry = CASE.geometry()
    base = block_layout_id(geometry)
    assert base == "hnd-f32-h3-p16-d64-v1"
    for field, value in (
        ("dtype", torch.bfloat16),
        ("num_kv_heads", 2),
        ("page_size", 8),
        ("head_dim", 32),
    ):
        assert block_layout_id(replace(geometry, **{field: value})) != base
    for field, value in (("num_q_heads", 3), ("window", 7), ("scale", 2.0), ("soft_cap", 1.0)):
        assert block_layout_id(replace(geometry, **{field: value})) == base


@needs_native
def test_cpu_backends_share_their_layout() -> None:
    geometry = CASE.geometry()
    native, plain = CpuAttention(), TorchAttention()
    assert native.layout_id(geometry) == plain.layout_id(geometry)
    assert native.pool_shape(geometry, 7) == plain.pool_shape(geometry, 7) == (7, 2, 3, 16, 64)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_unknown_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="not supported"):
        block_layout_id(replace(CASE.geometry(), dtype=dtype))


def test_heads_must_divide() -> None:
    with pytest.raises(ValueError, match="do not divide"):
        check_layout(replace(CASE.geometry(), num_q_heads=7), make_step(CASE).layout)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("query_starts", ints(0, 2), "query_starts: expected"),
        ("query_starts", torch.tensor([0, 2, 3]), "query_starts: expected"),
        ("query_starts", ints(1, 2, 3), "must ascend from 0"),
        ("query_starts", ints(0, 2, 1), "must ascend from 0"),
        ("query_starts", ints(0, 2, 9), "more tokens than its context"),
        ("context_lens", torch.tensor([20, 5]), "context_lens: expected"),
        ("context_lens", ints(20, 90), "rows need 6"),
        ("context_starts", ints(0, -1), "must not be negative"),
        ("write_mask", ints(1, 1), "write_mask: expected"),
        ("page_table", ints(1, 2), "page_table: expected"),
    ],
)
def test_malformed_layouts_are_refused(field: str, value: torch.Tensor, message: str) -> None:
    layout: BatchLayout = replace(make_step(CASE).layout, **{field: value})
    with pytest.raises(ValueError, match=message):
        check_layout(CASE.geometry(), layout)


@needs_native
def test_native_plan_refuses_a_pool_of_another_geometry() -> None:
    step = make_step(CASE)
    backend = CpuAttention()
    plan = backend.plan(CASE.geometry(), step.layout)
    with pytest.raises(ValueError, match="the plan is for"):
        backend.run(plan, step.q, step.pool.double())
    with pytest.raises(ValueError, match="the plan is for"):
        backend.run(plan, step.q, step.pool[:, :, :2])
    with pytest.raises(ValueError, match="contiguous"):
        backend.run(plan, step.q, step.pool.transpose(3, 4).contiguous().transpose(3, 4))
    with pytest.raises(ValueError, match="use torch"):
        backend.plan(replace(CASE.geometry(), dtype=torch.float64), step.layout)
