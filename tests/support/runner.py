"""Builds runners over toy models, and rows with page tables scattered over the pools."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from statewise.kernels.reference import TorchAttention
from statewise.runtime.memory.block_store import DeviceStore
from statewise.runtime.sampling_params import SamplingParams
from statewise.runtime.scheduler.batch import (
    BatchRow,
    Int32,
    RowKind,
    RowResult,
    SampleSpec,
    ScheduledBatch,
)
from statewise.runtime.worker.grammar import GrammarCache
from statewise.runtime.worker.model_runner import ModelRunner
from support.toy_model import ToyModel

GREEDY = SamplingParams(temperature=0.0)


def spec(params: SamplingParams = GREEDY, **fields: object) -> SampleSpec:
    """A `SampleSpec` with defaults for what a test does not care about."""
    base: dict[str, object] = {
        "seed": 1,
        "draw_index": 0,
        "prompt_ids": np.array([1, 2, 3], dtype=np.int32),
        "output_ids": [],
    }
    return SampleSpec(params=params, **(base | fields))  # type: ignore[arg-type]


class Driver:
    """A runner, its poisoned pools, and block tables handed out from a shuffled free list."""

    def __init__(
        self,
        model: ToyModel,
        *,
        num_blocks: int = 64,
        seed: int = 0,
        grammars: GrammarCache | None = None,
    ) -> None:
        backend = TorchAttention()
        counts = [num_blocks] * model.schema.num_groups
        self.model = model
        self.store = DeviceStore(model.schema, model.geometries(), backend, counts, poison=True)
        self.runner = ModelRunner(model, self.store, backend, grammars)
        rng = np.random.default_rng(seed)
        self._free = [list(rng.permutation(num_blocks)) for _ in counts]
        self.num_steps = 0

    def tables(self, num_tokens: int) -> list[Int32]:
        """Fresh page tables for a sequence of `num_tokens`, one per group."""
        pages = -(-num_tokens // self.model.schema.page_size)
        return [np.array([free.pop() for _ in range(pages)], dtype=np.int32) for free in self._free]

    def row(
        self, rid: str, tables: Sequence[Int32], tokens: Sequence[int], start: int, **fields: object
    ) -> BatchRow:
        """A row that computes `tokens` from position `start`, writing all groups by default."""
        groups = self.model.schema.num_groups
        base: dict[str, object] = {
            "kind": RowKind.PREFILL,
            "context_starts": (0,) * groups,
            "write_groups": (1 << groups) - 1,
            "num_layers": self.model.schema.num_layers,
        }
        return BatchRow(
            request_id=rid,
            start=start,
            tokens=np.array(tokens, dtype=np.int32),
            page_tables=tuple(tables),
            **(base | fields),  # type: ignore[arg-type]
        )

    def step(self, *rows: BatchRow, **fields: object) -> tuple[RowResult, ...]:
        """Run rows as one step."""
        self.num_steps += 1
        batch = ScheduledBatch(self.num_steps, rows, **fields)  # type: ignore[arg-type]
        result = self.runner.execute(batch)
        assert result.step_id == self.num_steps
        assert [r.request_id for r in result.rows] == [r.request_id for r in rows]
        return result.rows
