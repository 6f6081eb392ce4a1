"""One trace through the real prefix cache: tree, validation, planner, pools, policies; no tensors.

Requests run one after the other, in the trace's order. Each does what the scheduler would do for
it: look up, load what slower tiers offer, begin, run the plan's replays, compute the rest in chunks
that end at the positions of the checkpoint policy, publish, finish. Blocks are numbers; what a
kernel would write is not there.

    effective reuse   tokens used as they stood
    repaired          tokens below the resume position that replays computed
    loaded            tokens that a slower tier gave back, by tier
    recomputed        tokens that matched, and were computed all the same

A prompt larger than the pools is computed without the cache.

This module does not read traces and does not know bounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from replaying.slower import SlowerTiers, SlowTier
from replaying.trace import TraceRequest
from statewise.radix import (
    CacheSchema,
    CheckpointPolicy,
    CostModel,
    Prefill,
    StaleMatchError,
    Tier,
    TierCost,
)
from statewise.runtime.cache.lookup import Lookup
from statewise.runtime.cache.prefix_cache import PrefixCache
from statewise.runtime.cache.promotion import Promotion
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
    loaded: Counter[str] = field(default_factory=Counter)  # by tier
    recomputed: int = 0
    too_large: int = 0  # requests
    used_so_far: list[int] = field(default_factory=list)  # after each request
    levels: Counter[str] = field(default_factory=Counter)
    limited_by: Counter[str] = field(default_factory=Counter)

    @property
    def used(self) -> int:
        """Tokens used as they stood or as they came back."""
        return self.reused + self.loaded.total()

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
        slow: Mapping[Tier, SlowTier] | None = None,
    ) -> None:
        """`slow`: the slower tiers, none by default."""
        cost = CostModel.uniform(schema.num_layers, tokens_per_s, chunk=CHUNK)
        if slow:
            rates = {tier: TierCost(one.bytes_per_s) for tier, one in slow.items()}
            cost = replace(cost, tiers=rates)
        self.schema = schema
        self.cache = PrefixCache(schema, num_blocks, cost, policy=policy)
        self.slower = SlowerTiers(self.cache, slow) if slow else None
        self.checkpoints = checkpoints
        self.outcome = Outcome()

    def replay(self, trace: Sequence[TraceRequest], progress: Progress) -> Outcome:
        """Run every request; returns the sums."""
        for index, request in enumerate(trace):
            self.outcome.prompt += request.prompt_len
            if request.blocks:
                self._serve(request)
            self.outcome.used_so_far.append(self.outcome.used)
            progress(index + 1)
        self.cache.audit()
        return self.outcome

    def _serve(self, request: TraceRequest) -> None:
        tokens = request.tokens()
        limit = min(len(tokens), request.prompt_len - 1)
        lookup = self.cache.lookup(EVERYONE, tokens, limit)
        promotion = self._load(lookup)
        loaded: Mapping[int, Tier] = {}
        if promotion is not None:
            loaded = promotion.loaded
            lookup = self.cache.lookup(EVERYONE, tokens, limit)
        try:
            self._run(tokens, lookup, promotion)
        except (OutOfBlocksError, StaleMatchError):
            self._without_replays(tokens, limit)
            return
        finally:
            if self.slower is not None:
                self.slower.settle()
        self._count(lookup, loaded)

    def _load(self, lookup: Lookup) -> Promotion | None:
        """Have what slower tiers offer copied back; None where there is nothing, or no room."""
        if self.slower is None or lookup.offer is None:
            return None
        try:
            promotion = self.cache.promote(lookup)
        except OutOfBlocksError:
            return None
        self.slower.settle()
        assert promotion.is_done, "copies end when the world waits for them"
        return promotion

    def _without_replays(self, tokens: Int32, limit: int) -> None:
        """Once more, as the scheduler does: the state that a replay counted on has gone."""
        lookup = self.cache.lookup(EVERYONE, tokens, limit, direct_only=True)
        try:
            self._run(tokens, lookup)
        except (OutOfBlocksError, StaleMatchError):
            self.outcome.too_large += 1
            return
        self._count(lookup, {})

    def _count(self, lookup: Lookup, loaded: Mapping[int, Tier]) -> None:
        report, sums = lookup.report(loaded), self.outcome
        sums.loaded.update(report.loaded_from)
        sums.logical += report.matched
        sums.reused += report.reused
        sums.repaired += report.repaired
        sums.recomputed += report.recomputed
        sums.levels[report.level] += 1
        if report.limiting_group:
            sums.limited_by[report.limiting_group] += report.recomputed + report.repaired

    # ---------------------------------------------------------------- one request

    def _run(self, tokens: Int32, lookup: Lookup, promotion: Promotion | None = None) -> None:
        try:
            run = self.cache.begin(lookup, len(tokens))
        finally:
            if promotion is not None and self.slower is not None:
                self.slower.tiering.promotions.release(promotion)
        try:
            self._recover(run, tokens, lookup)
            self._compute(run, tokens, lookup)
        except (OutOfBlocksError, StaleMatchError):
            self.cache.cancel(run)
            raise
        page = self.schema.page_size
        again = len(lookup.match.key) // page * page if lookup.match is not None else 0
        self.cache.finish(run, tokens, len(tokens), resume_at=again)
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
