"""Drive a model through the worker's own parts: pools, page tables, working blocks, rows.

Sequences hold shuffled blocks of every group's poisoned pool. Snapshot groups have one working
block for each sequence, kept from step to step; `save` and `restore` copy it as the control plane
does for checkpoints. A step computes spans of several sequences at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from statewise.kernels.interface import AttentionBackend
from statewise.kernels.reference import TorchAttention
from statewise.runtime.memory.block_store import DeviceStore
from statewise.runtime.models.base import CausalLM
from statewise.runtime.scheduler.batch import BatchRow, Int32, RowKind
from statewise.runtime.worker.forward import LayerRouter, PagedForwardContext
from statewise.runtime.worker.packing import pack_rows


@dataclass
class Sequence:
    """One request: its page tables (per group) and how many tokens it has computed."""

    tables: list[Int32]
    length: int = 0
    dropped: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Span:
    """Tokens that one sequence computes in a step."""

    sequence: Sequence
    tokens: Tensor
    start: int = -1  # -1: where the sequence stands
    write_groups: int = -1  # bits; -1: all
    context_starts: tuple[int, ...] | None = None


class HybridDriver:
    """A model with pools for a few sequences of at most `max_len` tokens."""

    def __init__(
        self,
        model: CausalLM,
        max_len: int = 320,
        num_sequences: int = 3,
        backend: AttentionBackend | None = None,
    ) -> None:
        self.model, self.schema = model, model.schema
        self.backend = backend or TorchAttention()
        self.pages = -(-max_len // self.schema.page_size)
        counts = [
            4 * num_sequences if g.kind.is_snapshot else num_sequences * self.pages
            for g in self.schema.groups
        ]
        self.store = DeviceStore(self.schema, model.geometries(), self.backend, counts, poison=True)
        self.router = LayerRouter(self.store)
        rng = np.random.default_rng(0)
        self.free = [list(rng.permutation(n)) for n in counts]

    def new(self) -> Sequence:
        """A sequence with blocks of its own."""
        tables = []
        for group, free in zip(self.schema.groups, self.free, strict=True):
            count = 1 if group.kind.is_snapshot else self.pages
            tables.append(np.array([free.pop() for _ in range(count)], dtype=np.int32))
        return Sequence(tables)

    def release(self, sequence: Sequence) -> None:
        """Give the blocks back, poisoned."""
        for g, table in enumerate(sequence.tables):
            self.store.fill_blocks(g, table.tolist(), float("nan"))
            self.free[g].extend(table.tolist())

    def fork(self, source: Sequence, *, without: tuple[str, ...] = ()) -> Sequence:
        """A copy of a sequence's state in blocks of its own; groups `without` stay poisoned."""
        target = self.new()
        target.length = source.length
        for g, group in enumerate(self.schema.groups):
            if group.name not in without:
                self.store.copy_blocks(g, source.tables[g].tolist(), target.tables[g].tolist())
        return target

    def save(self, sequence: Sequence) -> dict[int, int]:
        """Copy every working block to a free one; returns group -> block."""
        out = {}
        for g, group in enumerate(self.schema.groups):
            if group.kind.is_snapshot:
                block = int(self.free[g].pop())
                self.store.copy_blocks(g, [int(sequence.tables[g][0])], [block])
                out[g] = block
        return out

    def restore(self, sequence: Sequence, saved: dict[int, int], length: int) -> None:
        """Put saved snapshots back: the sequence stands at `length` again."""
        for g, block in saved.items():
            self.store.copy_blocks(g, [block], [int(sequence.tables[g][0])])
        sequence.length = length

    def mask(self, *names: str) -> int:
        """Write mask of the named groups."""
        return sum(1 << self.schema.index_of(name) for name in names)

    def poison(self, sequence: Sequence, *names: str) -> None:
        """Overwrite groups of a sequence with NaN."""
        for name in names:
            g = self.schema.index_of(name)
            self.store.fill_blocks(g, sequence.tables[g].tolist(), float("nan"))

    def row(self, span: Span) -> BatchRow:
        """The span as a scheduler would send it."""
        count = self.schema.num_groups
        start = span.sequence.length if span.start < 0 else span.start
        return BatchRow(
            request_id="r",
            kind=RowKind.PREFILL,
            start=start,
            tokens=span.tokens.numpy().astype(np.int32),
            page_tables=tuple(span.sequence.tables),
            context_starts=span.context_starts or (0,) * count,
            write_groups=(1 << count) - 1 if span.write_groups < 0 else span.write_groups,
            num_layers=self.schema.num_layers,
        )

    def step(self, *spans: Span, num_layers: int = -1) -> list[Tensor]:
        """Logits [n, V] of each span's tokens; sequences stand after them."""
        rows = [self.row(span) for span in spans]
        packed = pack_rows(rows)
        context = PagedForwardContext(packed, self.store, self.router, self.backend)
        depth = self.schema.num_layers if num_layers < 0 else num_layers
        with torch.no_grad():
            hidden = self.model.forward(packed.token_ids, context, depth)
            logits = self.model.logits(hidden)
        for span, row in zip(spans, rows, strict=True):
            span.sequence.length = row.end
        return list(logits.split([len(row.tokens) for row in rows]))

    def run(self, sequence: Sequence, tokens: Tensor) -> Tensor:
        """Logits of one sequence's next tokens."""
        return self.step(Span(sequence, tokens))[0]
