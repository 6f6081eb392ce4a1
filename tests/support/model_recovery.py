"""A real model whose cached state is damaged on purpose, and what serving did about it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from statewise.radix import CostModel, Match, Namespace, TokenKey
from statewise.radix.plan import RecoveryPlan
from statewise.runtime.clock import SystemClock
from statewise.runtime.config import ServerArgs
from statewise.runtime.engine.build import build_runtime
from statewise.runtime.engine.core import EngineCore
from statewise.runtime.messages import (
    CacheOptions,
    CacheReport,
    LogprobOptions,
    TokenizedRequest,
    pack_ids,
)
from statewise.runtime.sampling_params import SamplingParams
from statewise.runtime.scheduler.batch import BatchRow, RowKind, ScheduledBatch, StepResult
from statewise.runtime.worker.model_runner import ModelRunner


@dataclass
class Served:
    """One request's outcome, and the rows that ran for it."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    report: CacheReport = field(default_factory=CacheReport)
    rows: list[BatchRow] = field(default_factory=list)

    @property
    def replayed(self) -> int:
        """Tokens that replay rows computed."""
        return sum(len(r.tokens) for r in self.rows if r.kind is RowKind.REPLAY)

    @property
    def prefilled(self) -> int:
        """Tokens that ordinary prefill rows computed."""
        return sum(len(r.tokens) for r in self.rows if r.kind is RowKind.PREFILL)

    @property
    def depths(self) -> set[int]:
        """Layers that replay rows ran through."""
        return {r.num_layers for r in self.rows if r.kind is RowKind.REPLAY}


class Scene:
    """One engine core over a model, planning with made-up costs so that plans repeat."""

    def __init__(self, **settings: object) -> None:
        settings = {
            "dtype": "float32", "skip_tokenizer_init": True, "num_threads": 1,
            "calibrate": False, **settings,
        }  # fmt: skip
        built = build_runtime(ServerArgs(**settings))  # type: ignore[arg-type]
        self.core: EngineCore = built.core(SystemClock())
        self.worker: ModelRunner = built.worker
        self.schema = built.schema
        chunk = self.core.args.chunked_prefill_size
        self.core.use_cost(CostModel.uniform(self.schema.num_layers, 1000.0, chunk=chunk))
        # What steps take is not learned from: a fast machine would choose other plans.
        self.core._learn_cost = lambda batch, seconds: None  # type: ignore[method-assign]
        self._rows: list[BatchRow] = []
        execute = self.worker.execute

        def recorded(batch: ScheduledBatch) -> StepResult:
            self._rows += batch.rows
            return execute(batch)

        self.worker.execute = recorded  # type: ignore[method-assign]
        self._num_served = 0

    def serve(
        self,
        prompt: list[int],
        max_new: int = 8,
        *,
        checkpoint: bool = False,
        exact: bool = False,
        salt: str = "",
    ) -> Served:
        """Run one greedy request to its end."""
        self._num_served += 1
        self._rows = []
        params = SamplingParams(max_new_tokens=max_new, temperature=0.0, ignore_eos=True)
        request = TokenizedRequest(
            f"r{self._num_served}",
            pack_ids(prompt),
            params,
            logprob=LogprobOptions(enabled=True),
            cache=CacheOptions(salt=salt, checkpoint=checkpoint, exact=exact),
        )
        self.core.add_request(request)
        out = Served()
        while self.core.has_work():
            for delta in self.core.step():
                out.tokens += delta.token_ids
                out.logprobs += [e.logprob for e in delta.logprobs if e.logprob is not None]
                out.report = delta.report or out.report
        out.rows = self._rows
        return out

    def plan(self, prompt: list[int]) -> RecoveryPlan:
        """What serving `prompt` would do now."""
        ids = np.array(prompt, dtype=np.int32)
        return self.core.cache.lookup(CacheOptions(), ids, len(ids) - 1).plan

    # ---------------------------------------------------------------- damage

    def match(self, prompt: list[int]) -> Match:
        """What the tree has of a prompt."""
        return self.core.cache.tree.match(Namespace(), TokenKey(np.array(prompt, dtype=np.int32)))

    def lose(self, prompt: list[int], group: str, pages: range | None = None) -> None:
        """Drop pages of one group, or the snapshots at their ends (all by default)."""
        match = self.match(prompt)
        wanted = pages if pages is not None else range(match.logical_pages)
        drop_state(self.core, match, self.schema.index_of(group), wanted)

    def blank(self, prompt: list[int], group: str) -> None:
        """Zero a group's state behind the cache's back; it goes on being reused."""
        match, index = self.match(prompt), self.schema.index_of(group)
        if self.schema.groups[index].kind.is_snapshot:
            found = [s.block_of(index) for s in match.snapshots]
            blocks = [held.block for held in found if held is not None]
        else:
            blocks = [b for b in match.blocks(index).tolist() if b >= 0]
        assert blocks, group
        self.worker.store.fill_blocks(index, blocks, 0.0)

    def spoil(self, prompt: list[int], group: str, layers: int, pages: range) -> None:
        """Mark single layers (bit mask within the group) of pages as invalid."""
        index = self.schema.index_of(group)
        self.core.cache.tree.mark_invalid(self.match(prompt), index, dict.fromkeys(pages, layers))

    def flip(self, prompt: list[int], place: tuple[str, int, int], bit: int) -> int:
        """Flip one bit of (group, layer within it, page); returns the block."""
        group, layer, page = place
        index = self.schema.index_of(group)
        block = int(self.match(prompt).blocks(index)[page])
        tensor = self.worker.store.groups[index].layers[layer][block]
        data = tensor.view(torch.uint8).view(-1)
        byte, in_byte = divmod(bit % (8 * data.numel()), 8)
        data[byte] ^= 1 << in_byte
        return block


def drop_state(core: EngineCore, match: Match, group: int, pages: range) -> None:
    """Drop pages of one group, or the snapshots at their ends, and free the blocks."""
    tree, schema = core.cache.tree, core.cache.schema
    is_snapshot = schema.groups[group].kind.is_snapshot
    places = [(page + 1) * schema.page_size for page in pages] if is_snapshot else pages
    freed = tree.drop(match, group, places)
    for pool, blocks in zip(core.cache.pools, freed.blocks, strict=True):
        pool.free(blocks)
