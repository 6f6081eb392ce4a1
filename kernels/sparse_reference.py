"""Sparse attention over entries in plain torch: the meaning of `SparseKernels`.

Keys and values are one vector for all heads: a latent, a compressed entry, or the shared K/V of a
window. A query sees its window and the visible entries, chosen ones or all, under one softmax:

    keys of the query at p    [ max(context_start, p - window + 1), p ]  of the window group
                              i < (p + 1) // ratio                       of the entry group

Pages outside these ranges are never touched. Accumulation is float32 (float64 for float64 input).

This module does not try to be fast.

Shapes: T packed tokens, R rows, H query heads, D entry dim, E entries per page, S keys of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from statewise.kernels.interface import BatchLayout, EntryGeometry
from statewise.kernels.layout import check_entry_layout
from statewise.kernels.reference import accumulation_dtype

QUERY_BLOCK = 64  # queries of one row scored at once: bounds the score matrix


@dataclass(frozen=True)
class RowSpan:
    """One row of a step: packed tokens first .. first+count-1 at positions start .. start+count-1.

    `readable` is the first position that the row may read.
    """

    first: int
    count: int
    start: int
    readable: int


@dataclass(frozen=True)
class EntryPlan:
    """One step of one entry group, and where every completed entry goes."""

    geometry: EntryGeometry
    layout: BatchLayout
    rows: tuple[RowSpan, ...]
    num_completed: int  # entries that the step's tokens complete, written or not
    written: Tensor  # [W] int64 which of them are written
    blocks: Tensor  # [W] int64
    slots: Tensor  # [W] int64


def row_spans(layout: BatchLayout) -> tuple[RowSpan, ...]:
    """Rows of a layout as plain numbers."""
    starts = layout.query_starts.tolist()
    contexts = layout.context_lens.tolist()
    reads = layout.context_starts.tolist()
    return tuple(
        RowSpan(a, b - a, context - (b - a), read)
        for a, b, context, read in zip(starts[:-1], starts[1:], contexts, reads, strict=True)
    )


def plan_entries(geometry: EntryGeometry, layout: BatchLayout) -> EntryPlan:
    """Check a layout and place the entries that its tokens complete."""
    check_entry_layout(geometry, layout)
    rows = row_spans(layout)
    table = layout.page_table.numpy()
    mask = layout.write_mask.tolist()
    per_page, ratio = geometry.entries_per_page, geometry.ratio
    written, blocks, slots = [], [], []
    done = 0
    for r, row in enumerate(rows):
        entries = np.arange(row.start // ratio, (row.start + row.count) // ratio, dtype=np.int64)
        if mask[r] and len(entries):
            written.append(np.arange(done, done + len(entries), dtype=np.int64))
            blocks.append(table[r, entries // per_page].astype(np.int64))
            slots.append(entries % per_page)
        done += len(entries)
    parts = (np.concatenate(x) if x else np.empty(0, np.int64) for x in (written, blocks, slots))
    places = [torch.from_numpy(part) for part in parts]
    return EntryPlan(geometry, layout, rows, done, *places)


class TorchSparse:
    """`SparseKernels` in plain torch."""

    name = "torch"

    def plan(self, geometry: EntryGeometry, layout: BatchLayout) -> EntryPlan:
        """Place the step's entries; ValueError if the layout is malformed."""
        return plan_entries(geometry, layout)

    def append(self, plan: EntryPlan, pool: Tensor, entries: Tensor) -> None:
        """Write completed entries [N, D] to their slots; IndexError for a bad block."""
        check_completed(plan, entries)
        if plan.written.numel():
            _check_blocks(plan.blocks, pool.shape[0])
            pool[plan.blocks, plan.slots] = entries[plan.written].to(pool.dtype)

    def select(
        self, plan: EntryPlan, pool: Tensor, q: Tensor, weights: Tensor, top_k: int
    ) -> Tensor | None:
        """Choose entries by score; see `SparseKernels`."""
        if not needs_selection(plan, top_k):
            return None
        chosen = torch.full((q.shape[0], top_k), -1, dtype=torch.int32)
        dtype = accumulation_dtype(q, pool)
        for r, row in enumerate(plan.rows):
            for begin in range(0, row.count, QUERY_BLOCK):
                end = min(begin + QUERY_BLOCK, row.count)
                part = slice(row.first + begin, row.first + end)
                visible = _visible(plan, row, begin, end)
                keys = _entries(plan, r, pool, int(visible[-1])).to(dtype)
                scores = torch.einsum("thd,sd->ths", q[part].to(dtype), keys).relu()
                scores = torch.einsum("ths,th->ts", scores, weights[part].to(dtype))
                chosen[part] = _top(scores, visible, top_k)
        return chosen

    def attend(
        self,
        q: Tensor,
        window: tuple[EntryPlan, Tensor] | None,
        entries: tuple[EntryPlan, Tensor] | None,
        selected: Tensor | None,
        sinks: Tensor | None,
        *,
        scale: float,
        value_dim: int,
    ) -> Tensor:
        """Attend over window and entries; see `SparseKernels`."""
        parts = [part for part in (window, entries) if part is not None]
        if not parts:
            raise ValueError("nothing to attend over")
        out = torch.empty(*q.shape[:2], value_dim, dtype=q.dtype)
        dtype = accumulation_dtype(q, *(pool for _, pool in parts))
        for r, row in enumerate(parts[0][0].rows):
            for begin in range(0, row.count, QUERY_BLOCK):
                end = min(begin + QUERY_BLOCK, row.count)
                part = slice(row.first + begin, row.first + end)
                keys, hidden = [], []
                if window is not None:
                    keys.append(_window_keys(*window, r, begin, end))
                    hidden.append(_outside_window(window[0], row, begin, end))
                if entries is not None:
                    visible = _visible(entries[0], row, begin, end)
                    keys.append(_entries(entries[0], r, entries[1], int(visible[-1])))
                    chosen = None if selected is None else selected[part]
                    hidden.append(_not_chosen(visible, chosen))
                all_keys = torch.cat([k.to(dtype) for k in keys])
                logits = torch.einsum("thd,sd->ths", q[part].to(dtype), all_keys) * scale
                logits = logits.masked_fill(torch.cat(hidden, 1).unsqueeze(1), float("-inf"))
                weights = _softmax(logits, sinks)
                out[part] = (weights @ all_keys[:, :value_dim]).to(q.dtype)
        return out


def needs_selection(plan: EntryPlan, top_k: int) -> bool:
    """Whether any query of the step sees more than `top_k` entries."""
    ratio = plan.geometry.ratio
    return any((row.start + row.count) // ratio > top_k for row in plan.rows)


def check_completed(plan: EntryPlan, entries: Tensor) -> None:
    """ValueError unless there is one vector for each entry that the step completes."""
    expected = (plan.num_completed, plan.geometry.dim)
    if tuple(entries.shape) != expected:
        raise ValueError(f"entries have shape {list(entries.shape)}, expected {list(expected)}")


def _check_blocks(blocks: Tensor, num_blocks: int) -> None:
    bad = (blocks < 0) | (blocks >= num_blocks)
    if bool(bad.any()):
        raise IndexError(
            f"page table names block {int(blocks[bad][0])}, the pool has {num_blocks} blocks"
        )


def _gather(plan: EntryPlan, row: int, pool: Tensor, lo: int, hi: int) -> Tensor:
    """Entries lo .. hi-1 of one row: [hi - lo, D]."""
    per_page = plan.geometry.entries_per_page
    first = lo // per_page
    blocks = plan.layout.page_table[row, first : -(-hi // per_page)].to(torch.int64)
    _check_blocks(blocks, pool.shape[0])
    flat = pool[blocks].flatten(0, 1)
    return flat[lo - first * per_page : hi - first * per_page]


def _entries(plan: EntryPlan, row: int, pool: Tensor, count: int) -> Tensor:
    return _gather(plan, row, pool, 0, count)


def _visible(plan: EntryPlan, row: RowSpan, begin: int, end: int) -> Tensor:
    """[n] how many entries the row's queries begin .. end-1 see."""
    positions = torch.arange(row.start + begin, row.start + end)
    return (positions + 1) // plan.geometry.ratio


def _window_start(plan: EntryPlan, row: RowSpan, position: int) -> int:
    window = plan.geometry.window
    return max(row.readable, position - window + 1) if window else row.readable


def _window_keys(plan: EntryPlan, pool: Tensor, r: int, begin: int, end: int) -> Tensor:
    row = plan.rows[r]
    lo = _window_start(plan, row, row.start + begin)
    return _gather(plan, r, pool, lo, row.start + end)


def _outside_window(plan: EntryPlan, row: RowSpan, begin: int, end: int) -> Tensor:
    """[n, S] true where the query may not see the window's key."""
    queries = torch.arange(row.start + begin, row.start + end).unsqueeze(1)
    lo = _window_start(plan, row, row.start + begin)
    keys = torch.arange(lo, row.start + end).unsqueeze(0)
    hidden = keys > queries
    if plan.geometry.window:
        hidden |= keys <= queries - plan.geometry.window
    return hidden


def _not_chosen(visible: Tensor, chosen: Tensor | None) -> Tensor:
    """[n, S] true where the query does not attend to the entry."""
    count = int(visible[-1])
    if chosen is None:
        return torch.arange(count).unsqueeze(0) >= visible.unsqueeze(1)
    hidden = torch.ones(len(visible), count + 1, dtype=torch.bool)
    places = torch.where(chosen < 0, count, chosen.to(torch.int64))
    return hidden.scatter_(1, places, False)[:, :count]


def _top(scores: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """[n, top_k] int32 highest scores among the visible, ascending by entry, -1 at the end."""
    count = scores.shape[1]
    places = torch.arange(count).unsqueeze(0)
    scores = scores.masked_fill(places >= visible.unsqueeze(1), float("-inf"))
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    if count < top_k:
        order = torch.nn.functional.pad(order, (0, top_k - count), value=count)
    order = torch.where(order < visible.unsqueeze(1), order, count).sort(dim=1).values
    return torch.where(order < count, order, -1).to(torch.int32)


def _softmax(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last dimension of [n, H, S]; a sink adds to its head's denominator."""
    if logits.shape[-1] == 0:
        return logits
    top = logits.amax(-1, keepdim=True)
    if sinks is None:
        top = top.masked_fill(top == float("-inf"), 0.0)
        weights = torch.exp(logits - top)
        total = weights.sum(-1, keepdim=True)
        return weights / total.masked_fill(total == 0, 1.0)
    sink = sinks.to(logits.dtype).view(1, -1, 1)
    top = torch.maximum(top, sink)
    weights = torch.exp(logits - top)
    return weights / (weights.sum(-1, keepdim=True) + torch.exp(sink - top))
