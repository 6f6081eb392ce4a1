"""Random paged-attention steps over poisoned pools, and a literal float64 oracle.

Everything that a kernel must not read is poisoned: slots outside the readable range hold NaN,
table entries outside it hold huge or negative numbers, and blocks of other rows surround each one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from statewise.kernels.interface import AttentionGeometry, BatchLayout

POISONED_ENTRIES = (-1, 2**31 - 1, -(2**31), 10**6)


@dataclass(frozen=True)
class Row:
    """One row: tokens computed, context with them, first readable position, whether it writes."""

    tokens: int
    context: int
    start: int = 0
    writes: bool = True


@dataclass(frozen=True)
class Case:
    """Geometry and rows of one step."""

    rows: tuple[Row, ...]
    num_q_heads: int = 2
    num_kv_heads: int = 1
    head_dim: int = 16
    page_size: int = 8
    dtype: torch.dtype = torch.float32
    q_dtype: torch.dtype | None = None
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    seed: int = 0

    def geometry(self) -> AttentionGeometry:
        return AttentionGeometry(
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=self.page_size,
            dtype=self.dtype,
            scale=1 / math.sqrt(self.head_dim),
            window=self.window,
            soft_cap=self.soft_cap,
            has_sinks=self.sinks,
        )

    def readable(self, row: Row, position: int) -> range:
        """Positions that the query at `position` reads."""
        first = row.start
        if self.window:
            first = max(first, position - self.window + 1)
        return range(first, position + 1)


@dataclass
class Step:
    """Tensors of one step; `keys[r]`/`values[r]` are [context, Hkv, D] in float64."""

    case: Case
    layout: BatchLayout
    pool: Tensor  # before append: new tokens of writing rows are still poisoned
    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    keys: list[np.ndarray] = field(default_factory=list)
    values: list[np.ndarray] = field(default_factory=list)


def make_step(case: Case) -> Step:
    """Fill pools, tables and queries for `case`."""
    rng = np.random.default_rng(case.seed)
    generator = torch.Generator().manual_seed(case.seed)
    page = case.page_size
    pages = [-(-r.context // page) for r in case.rows]
    num_blocks = sum(pages) + 3
    width = max(pages, default=0) + 2
    table = rng.choice(np.array(POISONED_ENTRIES, dtype=np.int64), (len(case.rows), width))
    free = rng.permutation(num_blocks)
    shape = (num_blocks, 2, case.num_kv_heads, page, case.head_dim)
    pool = torch.full(shape, float("nan"), dtype=case.dtype)
    tokens = sum(r.tokens for r in case.rows)
    kv_shape = (tokens, case.num_kv_heads, case.head_dim)
    k = torch.randn(kv_shape, generator=generator).to(case.dtype)
    v = torch.randn(kv_shape, generator=generator).to(case.dtype)
    q_dtype = case.q_dtype or case.dtype
    q = torch.randn((tokens, case.num_q_heads, case.head_dim), generator=generator).to(q_dtype)
    sinks = torch.randn(case.num_q_heads, generator=generator) if case.sinks else None
    step = Step(case, _layout(case, table), pool, q, k, v, sinks)
    token = taken = 0
    for r, row in enumerate(case.rows):
        first = row.context - row.tokens
        lo = case.readable(row, first)[0] if row.tokens else row.context
        keys = torch.randn((row.context, *kv_shape[1:]), generator=generator).to(case.dtype)
        values = torch.randn((row.context, *kv_shape[1:]), generator=generator).to(case.dtype)
        if row.writes:
            keys[first:] = k[token : token + row.tokens]
            values[first:] = v[token : token + row.tokens]
        for position in range(min(lo, first), row.context):
            if table[r, position // page] in POISONED_ENTRIES:
                table[r, position // page] = free[taken]
                taken += 1
            if position < lo or (row.writes and position >= first):
                continue  # stays poisoned
            block = int(table[r, position // page])
            pool[block, 0, :, position % page] = keys[position]
            pool[block, 1, :, position % page] = values[position]
        step.keys.append(keys.double().numpy())
        step.values.append(values.double().numpy())
        token += row.tokens
    step.layout = replace(step.layout, page_table=torch.from_numpy(table.astype(np.int32)))
    return step


def _layout(case: Case, table: np.ndarray) -> BatchLayout:
    starts = np.cumsum([0] + [r.tokens for r in case.rows])
    return BatchLayout(
        query_starts=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor([r.context for r in case.rows], dtype=torch.int32),
        context_starts=torch.tensor([r.start for r in case.rows], dtype=torch.int32),
        page_table=torch.from_numpy(table.astype(np.int32)),
        write_mask=torch.tensor([int(r.writes) for r in case.rows], dtype=torch.uint8),
    )


def expected_output(step: Step) -> np.ndarray:
    """[T, Hq, D] in float64, one query and head at a time: the definition, spelled out."""
    case, geometry = step.case, step.case.geometry()
    out = np.zeros(tuple(step.q.shape))
    group = case.num_q_heads // case.num_kv_heads
    token = 0
    for row, keys, values in zip(case.rows, step.keys, step.values, strict=True):
        for i in range(row.tokens):
            readable = case.readable(row, row.context - row.tokens + i)
            for head in range(case.num_q_heads):
                k = keys[readable.start : readable.stop, head // group]
                v = values[readable.start : readable.stop, head // group]
                logits = k @ step.q[token, head].double().numpy() * geometry.scale
                if case.soft_cap:
                    logits = case.soft_cap * np.tanh(logits / case.soft_cap)
                weights = np.exp(logits - logits.max())
                total = weights.sum()
                if step.sinks is not None:
                    total += math.exp(float(step.sinks[head]) - logits.max())
                out[token, head] = (weights / total) @ v
            token += 1
    return out
