"""Random steps over entry pools, and what each query must compute, one query and key at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from statewise.kernels.interface import BatchLayout, EntryGeometry

NAN = float("nan")


@dataclass(frozen=True)
class EntryGroup:
    """One group of a step: its layout and a poisoned pool whose readable entries are filled."""

    geometry: EntryGeometry
    layout: BatchLayout
    pool: Tensor
    history: list[Tensor]  # entries of each row, in order, as far as the row's context goes


@dataclass(frozen=True)
class Rows:
    """Rows of a step: (first position, tokens) of each, and where reading may begin."""

    spans: list[tuple[int, int]]
    starts: list[int]

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(count for _, count in self.spans)

    def queries(self) -> list[tuple[int, int]]:
        """(row, position) of every packed token."""
        return [(r, first + i) for r, (first, count) in enumerate(self.spans) for i in range(count)]


def make_group(
    geometry: EntryGeometry, rows: Rows, generator: torch.Generator, write_mask: list[int]
) -> EntryGroup:
    """A group whose pool holds every row's entries up to the end of its context."""
    ends = [first + count for first, count in rows.spans]
    pages = -(-max(ends) // geometry.page_size)
    order = torch.randperm(len(ends) * pages + 3, generator=generator)
    table = order[: len(ends) * pages].view(len(ends), pages).to(torch.int32)
    shape = (len(order), geometry.entries_per_page, geometry.dim)
    pool = torch.full(shape, NAN, dtype=geometry.dtype)
    history = []
    for r, end in enumerate(ends):
        count = end // geometry.ratio
        values = torch.randn(count, geometry.dim, generator=generator).to(geometry.dtype)
        history.append(values)
        lo = 0
        if geometry.window:
            lo = max(rows.starts[r], rows.spans[r][0] - geometry.window + 1)
        for i in range(lo, count):
            block = table[r, i // geometry.entries_per_page]
            pool[block, i % geometry.entries_per_page] = values[i]
    counts = torch.tensor([0] + [count for _, count in rows.spans])
    layout = BatchLayout(
        query_starts=counts.cumsum(0).to(torch.int32),
        context_lens=torch.tensor(ends, dtype=torch.int32),
        context_starts=torch.tensor(rows.starts, dtype=torch.int32),
        page_table=table,
        write_mask=torch.tensor(write_mask, dtype=torch.uint8),
    )
    return EntryGroup(geometry, layout, pool, history)


def expected_scores(group: EntryGroup, rows: Rows, q: Tensor, weights: Tensor) -> list[Tensor]:
    """Scores of the entries that each query sees, in float64."""
    out = []
    for t, (r, position) in enumerate(rows.queries()):
        keys = group.history[r][: (position + 1) // group.geometry.ratio].double()
        dots = (keys @ q[t].double().T).clamp(min=0)
        out.append(dots @ weights[t].double())
    return out


def expected_attention(
    rows: Rows,
    q: Tensor,
    window: EntryGroup | None,
    entries: EntryGroup | None,
    selected: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    value_dim: int,
) -> Tensor:
    """Attention of every query, in float64."""
    out = torch.zeros(*q.shape[:2], value_dim, dtype=torch.float64)
    for t, (r, position) in enumerate(rows.queries()):
        keys = []
        if window is not None:
            lo = rows.starts[r]
            if window.geometry.window:
                lo = max(lo, position - window.geometry.window + 1)
            keys.append(window.history[r][lo : position + 1])
        if entries is not None:
            visible = entries.history[r][: (position + 1) // entries.geometry.ratio]
            if selected is not None:
                visible = visible[[i for i in selected[t].tolist() if i >= 0]]
            keys.append(visible)
        every = torch.cat(keys).double()
        for h in range(q.shape[1]):
            logits = (every @ q[t, h].double()) * scale
            terms = [math.exp(x) for x in logits.tolist()]
            total = sum(terms) + (0.0 if sinks is None else math.exp(float(sinks[h])))
            for weight, key in zip(terms, every, strict=True):
                out[t, h] += weight / total * key[:value_dim]
    return out
