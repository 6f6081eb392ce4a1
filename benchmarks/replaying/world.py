"""One trace through the real prefix cache: tree, validation, planner, pools, policies; no tensors.

Requests run one after the other, in the trace's order. Each does what the scheduler would do for
it: look up, begin, run the plan's replays, compute the rest in chunks that end at the positions of
the checkpoint policy, publish, finish. Blocks are numbers; what a kernel would write is not there.

    effective reuse   tokens used as they stood
    repaired          tokens below the resume position that replays computed
    recomputed        tokens that matched, and were computed all the same

A prompt larger than the pools is computed without the cache.

This module does not read traces and does not know bounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from replaying.trace import TraceRequest
from statewise.radix import CacheSchema, CheckpointPolicy, CostModel, Prefill, StaleMatchError
from statewise.runtime.cache.lookup import Lookup
from statewise.runtime.cache.prefix_cache import PrefixCache
from statewise.runtime.cache.sequence import Sequence as Run
from statewise.runtime.errors import OutOfBlocksError
from statewise.runtime.messages import CacheOptions

Int32 = NDArray[np.int32]
Progress = Callable[[int], None]
CHUNK = 2048  # tokens of one step
EVERYONE = CacheOptions()


@dataclass
class Outcome:
    """Sums over a whole trace, in tokens."""

    prompt: int = 0
    logical: int = 0
    reused: int = 0
    repaired: int = 0
    recomputed: int = 0
    too_large: int = 0  # requests
    reused_so_far: list[int] = field(default_factory=list)  # after each request
    levels: Counter[str] = field(default_factory=Counter)
    limited_by: Counter[str] = field(default_factory=Counter)

    def rate(self, tokens: int) -> float:
        """Share of all prompt tokens."""
        return tokens / self.prompt if self.prompt else 0.0


class World:
    """A cache with pools of `num_blocks` per group."""

    def __init__(
        self,
        schema: CacheSchema,
        num_blocks: tuple[int, ...],
        policy: str,
        checkpoints: CheckpointPolicy,
        tokens_per_s: float,
    ) -> None:
        cost = CostModel.uniform(schema.num_layers, tokens_per_s, chunk=CHUNK)
        self.schema = schema
        self.cache = PrefixCache(schema, num_blocks, cost, policy=policy)
        self.checkpoints = checkpoints
        self.outcome = Outcome()

    def replay(self, trace: Sequence[TraceRequest], progress: Progress) -> Outcome:
        """Run every request; returns the sums."""
        for index, request in enumerate(trace):
            self.outcome.prompt += request.prompt_len
            if request.blocks:
                self._serve(request)
            self.outcome.reused_so_far.append(self.outcome.reused)
            progress(index + 1)
        self.cache.audit()
        return self.outcome

    def _serve(self, request: TraceRequest) -> None:
        tokens = request.tokens()
        limit = min(len(tokens), request.prompt_len - 1)
        lookup = self.cache.lookup(EVERYONE, tokens, limit)
        try:
            self._run(tokens, lookup)
        except (OutOfBlocksError, StaleMatchError):
            self._without_replays(tokens, limit)
            return
        self._count(lookup)

    def _without_replays(self, tokens: Int32, limit: int) -> None:
        """Once more, as the scheduler does: the state that a replay counted on has gone."""
        lookup = self.cache.lookup(EVERYONE, tokens, limit, direct_only=True)
        try:
            self._run(tokens, lookup)
        except (OutOfBlocksError, StaleMatchError):
            self.outcome.too_large += 1
            return
        self._count(lookup)

    def _count(self, lookup: Lookup) -> None:
        report, sums = lookup.report(), self.outcome
        sums.logical += report.matched
        sums.reused += report.reused
        sums.repaired += report.repaired
        sums.recomputed += report.recomputed
        sums.levels[report.level] += 1
        if report.limiting_group:
            sums.limited_by[report.limiting_group] += report.recomputed + report.repaired

    # ---------------------------------------------------------------- one request

    def _run(self, tokens: Int32, lookup: Lookup) -> None:
        run = self.cache.begin(lookup, len(tokens))
        try:
            self._recover(run, tokens, lookup)
            self._compute(run, tokens, lookup)
        except (OutOfBlocksError, StaleMatchError):
            self.cache.cancel(run)
            raise
        self.cache.finish(run, tokens, len(tokens))
        self.cache.take_copies()

    def _recover(self, run: Run, tokens: Int32, lookup: Lookup) -> None:
        replays = lookup.plan.replays
        for index, replay in enumerate(replays):
            after = replays[index + 1] if index + 1 < len(replays) else None
            self.cache.enter_replay(run, replay)
            for start in range(replay.start, replay.end, CHUNK):
                end = min(start + CHUNK, replay.end)
                self.cache.reserve_replay(run, replay, start, end)
                self.cache.replayed(run, tokens, replay, end, after)

    def _compute(self, run: Run, tokens: Int32, lookup: Lookup) -> None:
        start, length = lookup.position, len(tokens)
        prefill = Prefill(start, length, lookup.branch_position)
        page = self.schema.page_size
        stops = {p - p % page for p in self.checkpoints.positions(prefill)} - {start}
        ends = sorted({*stops, *range(start + CHUNK, length, CHUNK), length} - {start})
        for end in ends:
            self.cache.reserve(run, end)
            if end in stops:
                self.cache.prepare_checkpoint(run, end)
            self.cache.take_copies()
            kept = [end] if end in stops else []
            self.cache.commit(run, tokens, end, end, kept)
