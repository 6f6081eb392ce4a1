"""A token's numbers do not depend, bit for bit, on what else is in the step or how it was cut.

Every operation of the native backend runs over many rows at once, and over the same rows in other
company: alone, in pairs, in runs of other lengths, at other places. Attention runs over a prompt
as a whole and in chunks of many sizes. Whole models: test_worker_exactness.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from statewise.kernels import cpu_backend, native
from statewise.kernels.cpu_backend import CpuAttention, CpuOps
from statewise.kernels.interface import AttentionGeometry, BatchLayout
from statewise.kernels.packed import TileWeight
from support.native_kernels import INSTRUCTION_SETS, native_setting, needs_native

pytestmark = needs_native
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NUM_ROWS = 601
# (first, last) rows that are computed together.
COMPANIES = [
    *((0, 1), (5, 6), (600, 601), (3, 5), (7, 10), (11, 16), (96, 112), (500, 517)),
    *((1, 33), (31, 64), (17, 65), (2, 130), (100, 357), (1, 514), (0, 600)),
]


def random_of(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(params=INSTRUCTION_SETS)
def ops(request: pytest.FixtureRequest) -> Iterator[CpuOps]:
    with native_setting(request.param, num_threads=2):
        yield CpuOps()


def assert_rows_are_their_own(compute: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """`compute` of any run of rows of x are the same rows of `compute(x)`."""
    whole = compute(x)
    for first, last in COMPANIES:
        part = compute(x[first:last])
        assert torch.equal(part, whole[first:last]), f"rows {first} to {last}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_operations(ops: CpuOps, dtype: torch.dtype) -> None:
    x = random_of(NUM_ROWS, 160, dtype=dtype)
    weight = random_of(160, dtype=dtype, seed=1)
    assert_rows_are_their_own(lambda part: ops.rms_norm(part, weight, 1e-5), x)
    assert_rows_are_their_own(lambda part: ops.add_rms_norm(part, part, weight, 1e-5)[0], x)
    for kind in ("silu", "gelu_tanh"):
        assert_rows_are_their_own(lambda part, k=kind: ops.gated_act(part, k), x)
    cos, sin = random_of(NUM_ROWS, 16), random_of(NUM_ROWS, 16, seed=1)

    def rotated(part: Tensor) -> Tensor:
        heads = part[:, :128].clone().view(-1, 4, 32)
        ops.rope(heads, heads[:, :0], cos, sin, part[:, 0].float().abs().mul(100).long())
        return heads

    assert_rows_are_their_own(rotated, x)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("in_dim", "out_dim"), [(96, 400), (320, 130), (100, 170)])
def test_linear_layers(
    ops: CpuOps, dtype: torch.dtype, in_dim: int, out_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = random_of(NUM_ROWS, 2 * in_dim, dtype=dtype)[:, in_dim:]  # rows need not touch
    weight = (random_of(out_dim, in_dim, seed=1) / in_dim**0.5).to(dtype)
    bias = random_of(out_dim, dtype=dtype, seed=2)
    monkeypatch.setattr(cpu_backend, "MIN_PACKED_BYTES", 0)
    packed = ops.pack(weight)
    has_tiles = native.instruction_set() == "amx" and dtype == torch.bfloat16
    assert isinstance(packed, TileWeight) == (has_tiles and in_dim % 32 == 0)
    for w in (weight, packed):
        assert_rows_are_their_own(lambda part, w=w: ops.linear(part, w), x)
        assert_rows_are_their_own(lambda part, w=w: ops.linear(part, w, bias), x)


GEOMETRIES = {
    # query heads, K/V heads, head dim, page size, window, soft cap, sinks
    "groups of 3": (9, 3, 64, 16, 0, 0.0, False),
    "window": (4, 1, 128, 16, 200, 0.0, False),
    "small pages, soft cap, sinks": (8, 1, 64, 8, 0, 30.0, True),
    "groups of 8, short window": (16, 2, 32, 32, 70, 0.0, True),
    "no whole vectors": (2, 1, 24, 4, 0, 0.0, False),
}
PROMPT_LEN = 1100  # tokens: three segments of keys
CHUNKS = [
    [PROMPT_LEN],
    [256] * 4 + [76],
    [97] * 11 + [33],
    [511, 1, 1, 511, 1, 75],
    [63, 1, 64, 65, 2, 17, 300, 3, 500, 85],
    [1080, *[1] * 20],
]


@pytest.mark.slow
@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_however_a_prompt_is_cut(ops: CpuOps, name: str, dtype: torch.dtype) -> None:
    assert ops.name == "cpu"
    hq, hkv, dim, page, window, cap, has_sinks = GEOMETRIES[name]
    geometry = AttentionGeometry(hq, hkv, dim, page, dtype, dim**-0.5, window, cap, has_sinks)
    backend = CpuAttention()
    num_pages = -(-PROMPT_LEN // page)
    pool = random_of(num_pages + 2, 2, hkv, page, dim, dtype=dtype)
    table = torch.randperm(num_pages + 2, generator=torch.Generator().manual_seed(3))[:num_pages]
    q = random_of(PROMPT_LEN, hq, dim, dtype=dtype, seed=1)
    sinks = random_of(hq, seed=2) if has_sinks else None
    outs = []
    for chunks in CHUNKS:
        assert sum(chunks) == PROMPT_LEN
        parts, end = [], 0
        for count in chunks:
            end += count
            layout = BatchLayout(
                query_starts=torch.tensor([0, count], dtype=torch.int32),
                context_lens=torch.tensor([end], dtype=torch.int32),
                context_starts=torch.zeros(1, dtype=torch.int32),
                page_table=table.to(torch.int32)[None],
                write_mask=torch.ones(1, dtype=torch.uint8),
            )
            plan = backend.plan(geometry, layout)
            parts.append(backend.run(plan, q[end - count : end], pool, sinks))
        outs.append(torch.cat(parts))
    for chunks, out in zip(CHUNKS, outs, strict=True):
        assert torch.equal(out, outs[0]), chunks
