"""The small operations: torch against float64, native kernels against torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from statewise.kernels import cpu_backend
from statewise.kernels.cpu_backend import CpuOps
from statewise.kernels.interface import Ops
from statewise.kernels.reference import TorchOps
from support.native_kernels import INSTRUCTION_SETS, native_setting, needs_native

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # relative
ROWS = [0, 1, 3, 17, 300]
DIMS = [1, 7, 16, 80, 576]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == dtype
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=TOLERANCE[dtype], atol=2 * TOLERANCE[dtype]
    )


def each_backend() -> list[object]:
    native = [pytest.param(name, marks=needs_native) for name in INSTRUCTION_SETS]
    return [pytest.param("torch"), *native]


@pytest.fixture(params=each_backend())
def ops(request: pytest.FixtureRequest) -> Iterator[Ops]:
    if request.param == "torch":
        yield TorchOps()
        return
    with native_setting(request.param, num_threads=2):
        yield CpuOps()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(ops: Ops, dtype: torch.dtype) -> None:
    for rows in ROWS:
        for dim in DIMS:
            x, weight = random(rows, dim, dtype=dtype), random(dim, dtype=dtype, seed=1)
            for offset in (0.0, 1.0):
                wide = x.double()
                scale = (wide.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
                expected = wide * scale * (weight.double() + offset)
                assert_near(ops.rms_norm(x, weight, 1e-5, offset), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_heads_and_of_a_slice(ops: Ops, dtype: torch.dtype) -> None:
    weight = random(16, seed=1)
    heads = random(5, 3, 16, dtype=dtype)
    expected = TorchOps().rms_norm(heads.double(), weight.double(), 1e-6)
    assert_near(ops.rms_norm(heads, weight, 1e-6), expected, dtype)
    strided = random(5, 48, dtype=dtype)[:, 16:32]
    expected = TorchOps().rms_norm(strided.double(), weight.double(), 1e-6)
    assert_near(ops.rms_norm(strided, weight, 1e-6), expected, dtype)
    part = random(5, 4, 48, dtype=dtype)[:, 1:3, 16:32]
    expected = TorchOps().rms_norm(part.double(), weight.double(), 1e-6)
    assert_near(ops.rms_norm(part, weight, 1e-6), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_returns_the_rounded_sum_and_its_norm(ops: Ops, dtype: torch.dtype) -> None:
    for rows in ROWS:
        x, residual = random(rows, 80, dtype=dtype), random(rows, 80, dtype=dtype, seed=1)
        weight = random(80, dtype=dtype, seed=2)
        before = x.clone(), residual.clone()
        normed, total = ops.add_rms_norm(x, residual, weight, 1e-5, 1.0)
        assert torch.equal(total, x + residual)
        assert_near(normed, TorchOps().rms_norm(total.double(), weight, 1e-5, 1.0), dtype)
        assert torch.equal(x, before[0])
        assert torch.equal(residual, before[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [1, 2])  # all dimensions rotate, or half of them
def test_rope_rotates_pairs_in_place(ops: Ops, dtype: torch.dtype, share: int) -> None:
    for tokens, head_dim in ((0, 16), (1, 64), (7, 80), (150, 256), (3, 8)):
        half = head_dim // 2 // share
        angles = random(40, half).double()
        cos, sin = angles.cos().float(), angles.sin().float()
        positions = torch.arange(tokens) * 13 % 40
        wide = random(tokens, 5 * head_dim, dtype=dtype)
        q, k = wide[:, : 3 * head_dim].view(tokens, 3, head_dim), wide[:, 3 * head_dim :]
        k = k.view(tokens, 2, head_dim)
        turn = torch.polar(torch.ones(1, dtype=torch.float64), angles[positions]).unsqueeze(1)
        expected = []
        for x in (q, k):
            pairs = torch.complex(x[..., :half].double(), x[..., half : 2 * half].double()) * turn
            expected.append(torch.cat([pairs.real, pairs.imag, x[..., 2 * half :].double()], -1))
        ops.rope(q, k, cos, sin, positions)
        assert_near(q, expected[0], dtype)
        assert_near(k, expected[1], dtype)


def test_rope_refuses_positions_beyond_its_tables(ops: Ops) -> None:
    table = torch.ones(4, 8)
    for bad in (4, -5):
        with pytest.raises(IndexError):
            ops.rope(random(1, 1, 16), random(1, 1, 16), table, table, torch.tensor([bad]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_gated_act(ops: Ops, dtype: torch.dtype, kind: str) -> None:
    for rows in ROWS:
        for dim in DIMS:
            x = random(rows, 2 * dim, dtype=dtype) * 4
            expected = TorchOps().gated_act(x.double(), kind)
            assert_near(ops.gated_act(x, kind), expected, dtype)
    extreme = torch.tensor([[-200.0, -90.0, 0.0, 90.0, 200.0] + [1.0] * 5]).to(dtype)
    expected = TorchOps().gated_act(extreme.double(), kind)
    assert_near(ops.gated_act(extreme, kind), expected, dtype)


def test_unknown_activation_is_an_error(ops: Ops) -> None:
    with pytest.raises(ValueError, match="unknown activation 'tanh'"):
        ops.gated_act(random(1, 2), "tanh")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear(ops: Ops, dtype: torch.dtype) -> None:
    for rows in (0, 1, 2, 5, 16, 17, 33, 50, 128, 129):
        for dim, width in ((7, 1), (32, 15), (64, 32), (96, 200), (576, 96)):
            x = random(rows, 2 * dim, dtype=dtype)[:, :dim]
            weight = (random(width, dim, seed=1) / dim**0.5).to(dtype)
            for bias in (None, random(width, dtype=dtype, seed=2)):
                wide_bias = None if bias is None else bias.double()
                expected = TorchOps().linear(x.double(), weight.double(), wide_bias)
                assert_near(ops.linear(x, ops.pack(weight), bias), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_the_linear_layers_numbers(
    ops: Ops, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_backend, "MIN_PACKED_BYTES", 0)
    for rows in (1, 3, 16, 33):
        for dim, width in ((7, 1), (64, 47), (96, 208)):
            x = random(rows, 2 * dim, dtype=dtype)[:, :dim]
            weight = ops.pack(random(width, dim, dtype=dtype, seed=1))
            logits = ops.logits(x, weight)
            assert logits.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            assert torch.equal(logits, ops.linear(x, weight).to(logits.dtype))


@needs_native
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_each_other_or_on_threads(
    dtype: torch.dtype, instruction_set: str
) -> None:
    x, weight = random(200, 640, dtype=dtype), random(640, dtype=dtype, seed=1)
    square = random(512, 640, dtype=dtype, seed=2)
    with native_setting(instruction_set, num_threads=3):
        ops = CpuOps()
        normed, gated = ops.rms_norm(x, weight, 1e-5), ops.gated_act(x, "silu")
        product = ops.linear(x[:4], square)
    with native_setting(instruction_set, num_threads=1):
        for r in (0, 99, 199):
            assert torch.equal(ops.rms_norm(x[r : r + 1], weight, 1e-5)[0], normed[r])
            assert torch.equal(ops.gated_act(x[r : r + 1], "silu")[0], gated[r])
        assert torch.equal(ops.linear(x[:4], square), product)
        others = torch.cat([x[50:53], x[3:4]])
        assert torch.equal(ops.linear(others, square)[3], product[3])


@needs_native
def test_float64_goes_to_torch() -> None:
    ops, plain = CpuOps(), TorchOps()
    x, weight = random(3, 16).double(), random(16, seed=1).double()
    assert torch.equal(ops.rms_norm(x, weight, 1e-5), plain.rms_norm(x, weight, 1e-5))
    assert torch.equal(ops.gated_act(x, "silu"), plain.gated_act(x, "silu"))
    assert torch.equal(ops.linear(x, x), plain.linear(x, x))
    mixed = ops.add_rms_norm(x.float(), x.float(), weight, 1e-5)
    assert mixed[0].dtype == torch.float32
