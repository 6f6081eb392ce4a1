"""Recurrent kernels against one token at a time, in float64, and against themselves in pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from statewise.kernels import native
from statewise.kernels.interface import Ops
from statewise.kernels.reference import TorchOps
from statewise.kernels.select import select_backend
from support.native_kernels import INSTRUCTION_SETS, native_setting, needs_native

HEADS, KEY, VALUE = 3, 8, 12


def all_ops() -> list[Ops]:
    ops: list[Ops] = [TorchOps()]
    if native.is_available():
        ops.append(select_backend("cpu", torch.float32)[1])
    return ops


OPS = all_ops()
IDS = [o.name for o in OPS]


def inputs(count: int, num_rows: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v, decay, beta, states."""
    g = torch.Generator().manual_seed(0)
    parts = [
        torch.randn(count, HEADS, KEY, generator=g),
        torch.randn(count, HEADS, KEY, generator=g),
        torch.randn(count, HEADS, VALUE, generator=g),
        -2 * torch.rand(count, HEADS, generator=g),
        torch.rand(count, HEADS, generator=g),
        torch.randn(num_rows, HEADS, KEY, VALUE, generator=g),
    ]
    return [p.to(dtype) for p in parts]


def token_by_token(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One row of the recurrence as it is written down."""
    out = []
    for t in range(len(q)):
        key = k[t] / (k[t].square().sum(-1, keepdim=True) + 1e-6).sqrt()
        query = q[t] / (q[t].square().sum(-1, keepdim=True) + 1e-6).sqrt() * KEY**-0.5
        state = state * decay[t].exp()[:, None, None]
        seen = torch.einsum("hkv,hk->hv", state, key)
        state = state + torch.einsum("hk,hv->hkv", key, beta[t][:, None] * (v[t] - seen))
        out.append(torch.einsum("hkv,hk->hv", state, query))
    return torch.stack(out), state


@pytest.mark.parametrize("ops", OPS, ids=IDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-5), (torch.float64, 1e-12)])
def test_the_delta_rule_equals_one_token_at_a_time(
    ops: Ops, dtype: torch.dtype, tolerance: float
) -> None:
    starts, positions = [0, 70, 71, 200, 205], [60, 5, 0, 128]
    q, k, v, decay, beta, states = inputs(205, 4, dtype)
    out, new = ops.delta_rule(q, k, v, decay, beta, states, (starts, positions))
    for r, (a, b) in enumerate(pairwise(starts)):
        wide = [x[a:b].double() for x in (q, k, v, decay, beta)]
        expected, state = token_by_token(*wide, states[r].double())
        assert float((out[a:b].double() - expected).abs().max()) <= tolerance
        assert float((new[r].double() - state).abs().max()) <= tolerance


@pytest.mark.parametrize("ops", OPS, ids=IDS)
def test_stopping_at_multiples_of_64_changes_no_bit(ops: Ops) -> None:
    q, k, v, decay, beta, states = inputs(230, 1)
    whole, end = ops.delta_rule(q, k, v, decay, beta, states, ([0, 230], [30]))
    state, parts = states, []
    for a, b in ((0, 34), (34, 98), (98, 226), (226, 230)):
        part, state = ops.delta_rule(
            q[a:b], k[a:b], v[a:b], decay[a:b], beta[a:b], state, ([0, b - a], [30 + a])
        )
        parts.append(part)
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(state, end)


@pytest.mark.parametrize("ops", OPS, ids=IDS)
def test_rows_do_not_change_each_other(ops: Ops) -> None:
    q, k, v, decay, beta, states = inputs(90, 3)
    both, new = ops.delta_rule(q, k, v, decay, beta, states, ([0, 50, 51, 90], [3, 64, 0]))
    for r, (a, b) in enumerate(((0, 50), (50, 51), (51, 90))):
        alone, state = ops.delta_rule(
            q[a:b],
            k[a:b],
            v[a:b],
            decay[a:b],
            beta[a:b],
            states[r : r + 1],
            ([0, b - a], [[3, 64, 0][r]]),
        )
        assert torch.equal(both[a:b], alone)
        assert torch.equal(new[r], state[0])


@pytest.mark.parametrize("ops", OPS, ids=IDS)
@pytest.mark.parametrize("size", [2, 4])
def test_the_convolution_equals_torch(ops: Ops, size: int) -> None:
    g = torch.Generator().manual_seed(1)
    x, weight = torch.randn(30, 10, generator=g), torch.randn(10, size, generator=g)
    states = torch.randn(3, size - 1, 10, generator=g)
    starts = [0, 1, 3, 30]
    out, new = ops.causal_conv(x, states, weight, starts)
    for r, (a, b) in enumerate(pairwise(starts)):
        row = torch.cat([states[r], x[a:b]])
        plain = torch.nn.functional.conv1d(row.T[None], weight[:, None], groups=10)[0].T
        expected = torch.nn.functional.silu(plain)
        assert float((out[a:b] - expected).abs().max()) <= 1e-5
        assert torch.equal(new[r], row[len(row) - (size - 1) :])


@pytest.mark.parametrize("ops", OPS, ids=IDS)
def test_pooled_windows_are_gated_means(ops: Ops) -> None:
    g = torch.Generator().manual_seed(2)
    values, gates = torch.randn(5, 8, 20, generator=g), torch.randn(5, 8, 20, generator=g)
    gates[0, :4] = float("-inf")
    expected = (values * gates.softmax(1)).sum(1)
    assert float((ops.pool_windows(values, gates) - expected).abs().max()) <= 1e-6
    assert ops.pool_windows(values[:0], gates[:0]).shape == (0, 20)


@pytest.mark.parametrize("ops", OPS, ids=IDS)
def test_normalised_matrices_are_doubly_stochastic(ops: Ops) -> None:
    raw = torch.randn(7, 4, 4, generator=torch.Generator().manual_seed(3))
    matrix = ops.sinkhorn(raw, 20, 1e-6)
    assert float((matrix.sum(1) - 1).abs().max()) <= 1e-4
    assert float((matrix.sum(2) - 1).abs().max()) <= 1e-4
    assert float((matrix - TorchOps().sinkhorn(raw, 20, 1e-6)).abs().max()) <= 1e-6
    assert ops.sinkhorn(raw.double(), 3, 1e-6).dtype == torch.float64


@needs_native
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_every_instruction_set_and_thread_count(instruction_set: str) -> None:
    g = torch.Generator().manual_seed(4)
    x, weight = torch.randn(40, 37, generator=g), torch.randn(37, 4, generator=g)
    before, starts = torch.randn(2, 3, 37, generator=g), [0, 39, 40]
    delta = inputs(40, 2)
    windows = torch.randn(6, 8, 37, generator=g)
    raw = torch.randn(9, 4, 4, generator=g)

    def run(ops: Ops) -> list[Tensor]:
        return [
            *ops.causal_conv(x, before, weight, starts),
            *ops.delta_rule(*delta, (starts, [5, 0])),
            ops.pool_windows(windows, windows.flip(1)),
            ops.sinkhorn(raw, 5, 1e-6),
        ]

    expected = run(TorchOps())
    native_ops = select_backend("cpu", torch.float32)[1]
    results = []
    for threads in (1, 3):
        with native_setting(instruction_set, threads):
            results.append(run(native_ops))
    for one, other, wanted in zip(*results, expected, strict=True):
        assert torch.equal(one, other)
        assert float((one - wanted).abs().max()) <= 3e-5


@needs_native
def test_the_native_delta_rule_may_stop_anywhere() -> None:
    ops = select_backend("cpu", torch.float32)[1]
    q, k, v, decay, beta, states = inputs(50, 1)
    whole, end = ops.delta_rule(q, k, v, decay, beta, states, ([0, 50], [0]))
    state, parts = states, []
    for a, b in ((0, 1), (1, 18), (18, 50)):
        part, state = ops.delta_rule(
            q[a:b], k[a:b], v[a:b], decay[a:b], beta[a:b], state, ([0, b - a], [a])
        )
        parts.append(part)
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(state, end)
