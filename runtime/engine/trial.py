"""Steps on blocks that nobody owns yet: to warm up and to measure before the first request.

This module does not time anything and does not clean up: whoever runs trials poisons the blocks
again where that matters.
"""

from __future__ import annotations

import numpy as np

from statewise.radix.schema import CacheSchema
from statewise.runtime.scheduler.batch import BatchRow, RowKind, ScheduledBatch, Worker

TOKEN_KINDS = 64  # every vocabulary has as many


class Trials:
    """Runs rows of made-up tokens over blocks 0, 1, 2 ... of every pool.

    `longest` is the model's context, in tokens; 0: any.
    """

    def __init__(
        self, worker: Worker, schema: CacheSchema, num_blocks: tuple[int, ...], longest: int = 0
    ) -> None:
        self._worker = worker
        self._schema = schema
        paged = [
            count
            for count, spec in zip(num_blocks, schema.groups, strict=True)
            if not spec.kind.is_snapshot
        ]
        fits = min(paged, default=1 << 20) * schema.page_size
        self.room = min(fits, longest or fits)  # tokens
        self.num_pages_used = 0

    def run(self, start: int, count: int, num_layers: int = 0, *, decode: bool = False) -> None:
        """One step of `count` tokens at position `start`, `num_layers` deep (0: all)."""
        assert start + count <= self.room, "a trial fits into the pools"
        pages = -(-(start + count) // self._schema.page_size)
        self.num_pages_used = max(self.num_pages_used, pages)
        table = np.arange(pages, dtype=np.int32)
        row = BatchRow(
            request_id="trial",
            kind=RowKind.DECODE if decode else RowKind.PREFILL,
            start=start,
            tokens=np.arange(count, dtype=np.int32) % TOKEN_KINDS,
            page_tables=(table,) * self._schema.num_groups,
            context_starts=(0,) * self._schema.num_groups,
            write_groups=(1 << self._schema.num_groups) - 1,
            num_layers=num_layers or self._schema.num_layers,
        )
        self._worker.execute(ScheduledBatch(0, (row,)))
