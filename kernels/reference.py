"""Plain torch kernels: the meaning of every operation, written to be read.

Every other backend is compared with this one, and this one with float64. It works for any shape,
dtype and page size, on the CPU, and is also what runs where no compiler built the native library.
Accumulation is float32 (float64 for float64 input), results come back in the query's dtype.

Row r of a step sees, for the query at absolute position p, exactly the keys

    [ max(context_starts[r], p - window + 1), p ]          (no window: from context_starts[r])

and never touches a page outside the union of these ranges, so unused page-table entries may hold
anything and unused slots may hold NaN.

This module does not try to be fast, and does not choose between backends (`select` does).

Shapes: T packed tokens, R rows, Hq/Hkv heads, G = Hq/Hkv, D head dim, P page size, S keys read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from statewise.kernels import row_steps
from statewise.kernels.coded import Codes
from statewise.kernels.interface import (
    AttentionGeometry,
    BatchLayout,
    LayerStack,
    LayerWeights,
    StackShape,
)
from statewise.kernels.layout import block_layout_id, block_shape, check_layout, readable_start
from statewise.kernels.recurrent_reference import causal_conv, delta_rule

QUERY_BLOCK = 256  # queries of one row scored at once: bounds the score matrix


def accumulation_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any tensor is float64, else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


@dataclass(frozen=True)
class TorchPlan:
    """One step of one group: the layout plus where each written token goes."""

    geometry: AttentionGeometry
    layout: BatchLayout
    rows: tuple[tuple[int, int, int, int], ...]  # (first token, tokens, context, context start)
    written: Tensor  # [W] int64 packed token indices that `append` writes
    blocks: Tensor  # [W] int64 block of each
    slots: Tensor  # [W] int64 slot in the block


class TorchAttention:
    """Paged attention in plain torch."""

    name = "torch"

    def layout_id(self, geometry: AttentionGeometry) -> str:
        """Word for [2, Hkv, P, D] blocks of the geometry's dtype."""
        return block_layout_id(geometry)

    def block_alignment(self, geometry: AttentionGeometry) -> int:
        """The size of one number: wider loads are unaligned ones."""
        return geometry.dtype.itemsize

    def pool_shape(self, geometry: AttentionGeometry, num_blocks: int) -> tuple[int, ...]:
        """[B, 2, Hkv, P, D]."""
        return (num_blocks, *block_shape(geometry))

    def plan(self, geometry: AttentionGeometry, layout: BatchLayout) -> TorchPlan:
        """Check the layout and compute where every written token goes; ValueError if malformed."""
        check_layout(geometry, layout)
        starts = layout.query_starts.tolist()
        contexts = layout.context_lens.tolist()
        reads = layout.context_starts.tolist()
        rows = tuple(
            (starts[r], starts[r + 1] - starts[r], contexts[r], reads[r])
            for r in range(len(contexts))
        )
        written, blocks, slots = _write_targets(geometry.page_size, layout, rows)
        return TorchPlan(geometry, layout, rows, written, blocks, slots)

    def append(self, plan: TorchPlan, kv: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k, v [T, Hkv, D] at the plan's slots of `kv`; IndexError for a bad block."""
        if plan.written.numel() == 0:
            return
        _check_blocks(plan.blocks, kv.shape[0])
        kv[plan.blocks, 0, :, plan.slots] = k[plan.written].to(kv.dtype)
        kv[plan.blocks, 1, :, plan.slots] = v[plan.written].to(kv.dtype)

    def run(self, plan: TorchPlan, q: Tensor, kv: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Attend q [T, Hq, D] -> [T, Hq, D]; rows without tokens contribute nothing."""
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for row, (first, count, context, _) in enumerate(plan.rows):
            for begin in range(0, count, QUERY_BLOCK):
                end = min(begin + QUERY_BLOCK, count)
                position = context - count + begin
                part = slice(first + begin, first + end)
                out[part] = _attend(plan, row, position, q[part], kv, sinks)
        return out


def _write_targets(
    page_size: int, layout: BatchLayout, rows: tuple[tuple[int, int, int, int], ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Packed indices, blocks and slots of all tokens of rows whose write mask is set."""
    table: NDArray[np.int32] = layout.page_table.numpy()
    mask = layout.write_mask.tolist()
    tokens, blocks, slots = [], [], []
    for row, (first, count, context, _) in enumerate(rows):
        if not mask[row] or count == 0:
            continue
        positions = np.arange(context - count, context, dtype=np.int64)
        tokens.append(np.arange(first, first + count, dtype=np.int64))
        blocks.append(table[row, positions // page_size].astype(np.int64))
        slots.append(positions % page_size)
    if not tokens:
        empty = torch.empty(0, dtype=torch.int64)
        return empty, empty, empty
    parts = (np.concatenate(x) for x in (tokens, blocks, slots))
    written, block, slot = (torch.from_numpy(x) for x in parts)
    return written, block, slot


def _check_blocks(blocks: Tensor, num_blocks: int) -> None:
    bad = (blocks < 0) | (blocks >= num_blocks)
    if bool(bad.any()):
        raise IndexError(
            f"page table names block {int(blocks[bad][0])}, the pool has {num_blocks} blocks"
        )


def _gather(
    plan: TorchPlan, row: int, lo: int, hi: int, kv: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """K and V [Hkv, hi-lo, D] of positions lo..hi-1 of one row."""
    page_size = plan.geometry.page_size
    first_page = lo // page_size
    blocks = plan.layout.page_table[row, first_page : -(-hi // page_size)].to(torch.int64)
    _check_blocks(blocks, kv.shape[0])
    pages = kv[blocks]  # [n, 2, Hkv, P, D]
    flat = pages.permute(1, 2, 0, 3, 4).flatten(2, 3)  # [2, Hkv, n*P, D]
    both = flat[:, :, lo - first_page * page_size : hi - first_page * page_size].to(dtype)
    return both[0], both[1]


def _attend(
    plan: TorchPlan, row: int, position: int, q: Tensor, kv: Tensor, sinks: Tensor | None
) -> Tensor:
    """Attention of n consecutive queries [n, Hq, D] of one row, the first at `position`."""
    geometry = plan.geometry
    count, num_q_heads, head_dim = q.shape
    hi = position + count
    lo = readable_start(geometry, plan.rows[row][3], position)
    dtype = accumulation_dtype(q, kv)
    if lo >= hi:
        return torch.zeros_like(q)
    k, v = _gather(plan, row, lo, hi, kv, dtype)
    num_kv_heads = k.shape[0]
    grouped = q.to(dtype).view(count, num_kv_heads, num_q_heads // num_kv_heads, head_dim)
    grouped = grouped.permute(1, 2, 0, 3)  # [Hkv, G, n, D]
    logits = torch.matmul(grouped, k.unsqueeze(1).transpose(-1, -2)) * geometry.scale
    if geometry.soft_cap > 0:
        logits = geometry.soft_cap * torch.tanh(logits / geometry.soft_cap)
    logits = logits.masked_fill(_hidden(geometry, position, count, lo, hi), float("-inf"))
    weights = _softmax(logits, sinks if geometry.has_sinks else None)
    out = torch.matmul(weights, v.unsqueeze(1))  # [Hkv, G, n, D]
    return out.permute(2, 0, 1, 3).reshape(count, num_q_heads, head_dim).to(q.dtype)


def _hidden(geometry: AttentionGeometry, position: int, count: int, lo: int, hi: int) -> Tensor:
    """[n, S] true where the query may not see the key."""
    queries = torch.arange(position, position + count).unsqueeze(1)
    keys = torch.arange(lo, hi).unsqueeze(0)
    hidden = keys > queries
    if geometry.window > 0:
        hidden |= keys <= queries - geometry.window
    return hidden


def _softmax(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over keys of [Hkv, G, n, S]; a sink adds exp(sink) to its head's denominator."""
    top = logits.amax(-1, keepdim=True)
    if sinks is None:
        top = top.masked_fill(top == float("-inf"), 0.0)
        weights = torch.exp(logits - top)
        total = weights.sum(-1, keepdim=True)
        return weights / total.masked_fill(total == 0, 1.0)
    sink = sinks.to(logits.dtype).view(logits.shape[0], logits.shape[1], 1, 1)
    top = torch.maximum(top, sink)
    weights = torch.exp(logits - top)
    return weights / (weights.sum(-1, keepdim=True) + torch.exp(sink - top))


class TorchOps:
    """The small operations beside attention, in plain torch."""

    name = "torch"

    @property
    def packed_bytes(self) -> int:
        """No byte: weights stay the tensors that they were."""
        return 0

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """Return x * rsqrt(mean(x^2, -1) + eps) * (offset + weight)."""
        dtype = accumulation_dtype(x)
        wide = x.to(dtype)
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return (wide * scale * (weight.to(dtype) + offset)).to(x.dtype)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Return (norm of the sum, the sum rounded to x's dtype)."""
        total = x + residual
        return self.rms_norm(total, weight, eps, offset), total

    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
        """Rotate the first 2*cos.shape[-1] dimensions of q and k in place."""
        for x in (q, k):
            dtype = accumulation_dtype(x)
            half = cos.shape[-1]
            c = cos[positions].to(dtype).unsqueeze(1)  # [T, 1, half]
            s = sin[positions].to(dtype).unsqueeze(1)
            # Copies: x is overwritten half by half below.
            first = x[..., :half].to(dtype, copy=True)
            second = x[..., half : 2 * half].to(dtype, copy=True)
            x[..., :half] = (first * c - second * s).to(x.dtype)
            x[..., half : 2 * half] = (second * c + first * s).to(x.dtype)

    def gated_act(self, gate_up: Tensor, kind: str) -> Tensor:
        """Return act(gate) * up; ValueError for an unknown kind."""
        gate, up = gate_up.to(accumulation_dtype(gate_up)).chunk(2, dim=-1)
        if kind == "silu":
            return (functional.silu(gate) * up).to(gate_up.dtype)
        if kind == "gelu_tanh":
            return (functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)
        raise ValueError(f"unknown activation {kind!r}; known: silu, gelu_tanh")

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x [..., in] @ weight.T (+ bias)."""
        return row_steps.linear(x, weight, bias)

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """What `linear` returns, in float32 (float64 stays)."""
        logits = self.linear(x, weight)
        return logits if logits.dtype == torch.float64 else logits.float()

    def pack(self, weight: Tensor) -> Tensor:
        """Return the weight itself."""
        return weight

    @property
    def keeps_codes(self) -> bool:
        """No: nothing is gained by codes here."""
        return False

    def pack_codes(self, codes: Codes) -> Any | None:
        """None, always."""
        del codes
        return None

    def stack(
        self, shape: StackShape, layers: Sequence[LayerWeights], final_norm: Tensor
    ) -> LayerStack | None:
        """None: layers are computed one operation after the other."""
        del shape, layers, final_norm
        return None

    def rows(self, weight: Tensor, indices: Tensor) -> Tensor:
        """Return the rows."""
        return weight[indices]

    def pool_windows(self, values: Tensor, gates: Tensor) -> Tensor:
        """Sum of values under a softmax of gates over dimension 1."""
        return (gates.softmax(1) * values).sum(1)

    def sinkhorn(self, raw: Tensor, iterations: int, eps: float) -> Tensor:
        """Rows by softmax, then columns and rows in turn divided by their sums."""
        matrix = raw.softmax(-1) + eps
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
        for _ in range(iterations - 1):
            matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
            matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
        return matrix

    def causal_conv(
        self, x: Tensor, states: Tensor, weight: Tensor, starts: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Depthwise convolution, see `recurrent_reference`."""
        return causal_conv(x, states, weight, starts)

    def delta_rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        beta: Tensor,
        states: Tensor,
        rows: tuple[Sequence[int], Sequence[int]],
    ) -> tuple[Tensor, Tensor]:
        """Gated delta rule, see `recurrent_reference`."""
        return delta_rule(q, k, v, decay, beta, states, rows)
