"""An engine around the digest model, driven by hand: for tests that set a scene."""

from __future__ import annotations

import numpy as np

from statewise.radix import Match, Namespace, TokenKey
from statewise.radix.results import Freed
from statewise.radix.schema import CacheSchema
from statewise.runtime.config import ServerArgs
from statewise.runtime.engine.core import EngineCore, EngineLimits
from statewise.runtime.messages import (
    CacheOptions,
    CacheReport,
    FinishReason,
    TokenDelta,
    TokenizedRequest,
    pack_ids,
)
from statewise.runtime.sampling_params import SamplingParams
from statewise.runtime.scheduler.batch import ScheduledBatch
from support.digest import owner_of
from support.digest_cold import cold_output
from support.sim_schema import make_schema
from support.sim_world import SimClock, SimWorker

__all__ = ["EOS", "VOCAB", "Driver", "Outcome", "make_schema"]

VOCAB = 97
EOS = 0


class Outcome:
    """What came back for one request."""

    def __init__(self, prompt: list[int], max_new: int, salt: str) -> None:
        self.prompt, self.max_new, self.salt = prompt, max_new, salt
        self.tokens: list[int] = []
        self.finish: FinishReason | None = None
        self.num_finishes = 0
        self.report: CacheReport | None = None


class Driver:
    """Feeds an EngineCore, collects its deltas, compares with cold runs."""

    def __init__(self, schema: CacheSchema, num_blocks: tuple[int, ...], **args: object) -> None:
        self.schema = schema
        self.clock = SimClock()
        self.worker = SimWorker(schema, num_blocks, VOCAB, self._owner, self.clock)
        self.worker.before_step = self._record
        settings: dict[str, object] = {
            "model_path": "digest", "page_size": schema.page_size, **args,
        }  # fmt: skip
        limits = EngineLimits(vocab_size=VOCAB, max_context_len=2048, eos_token_ids=(EOS,))
        self.core = EngineCore(
            ServerArgs(**settings),  # type: ignore[arg-type]
            schema,
            self.worker,
            num_blocks,
            limits,
            clock=self.clock,
        )
        self.cache = self.core.cache
        self.outcomes: dict[str, Outcome] = {}
        self.batches: list[ScheduledBatch] = []
        self.epoch = 0

    def _owner(self, rid: str) -> int:
        return owner_of(self.outcomes[rid].salt, self.epoch)

    def _record(self, batch: ScheduledBatch) -> None:
        self.batches.append(batch)

    # ---------------------------------------------------------------- requests

    def add(
        self, rid: str, prompt: list[int], max_new: int, *, salt: str = "", **options: object
    ) -> Outcome:
        """Queue a greedy request."""
        outcome = self.outcomes[rid] = Outcome(prompt, max_new, salt)
        params = SamplingParams(max_new_tokens=max_new, temperature=0.0, ignore_eos=True)
        cache = CacheOptions(salt=salt, **options)  # type: ignore[arg-type]
        self.core.add_request(TokenizedRequest(rid, pack_ids(prompt), params, cache=cache))
        return outcome

    def serve(self, rid: str, prompt: list[int], max_new: int = 4, **options: object) -> Outcome:
        """Run one request to its end and check its output."""
        outcome = self.add(rid, prompt, max_new, **options)  # type: ignore[arg-type]
        self.run()
        self.check(rid)
        return outcome

    def step(self) -> list[TokenDelta]:
        """One engine step, audited."""
        self.core.audit()
        deltas = self.core.step()
        for delta in deltas:
            outcome = self.outcomes[delta.rid]
            assert outcome.finish is None, f"{delta.rid}: a delta after its terminal one"
            outcome.tokens.extend(delta.token_ids)
            outcome.report = delta.report or outcome.report
            if delta.finish is not None:
                outcome.finish = delta.finish
                outcome.num_finishes += 1
        return deltas

    def run(self, max_steps: int = 2000) -> None:
        """Step until nothing is open."""
        for _ in range(max_steps):
            if not self.core.has_work():
                return
            self.step()
        raise AssertionError(f"still open after {max_steps} steps: {self.core.stats()}")

    def cold(self, rid: str) -> list[int]:
        """What a run without any cache generates."""
        outcome = self.outcomes[rid]
        owner = owner_of(outcome.salt, self.epoch)
        return cold_output(self.schema, outcome.prompt, outcome.max_new, VOCAB, owner=owner)

    def check(self, *rids: str) -> None:
        """These (by default all) ended once, with a cold run's output."""
        for rid in rids or tuple(self.outcomes):
            outcome = self.outcomes[rid]
            assert outcome.num_finishes == 1, rid
            assert outcome.finish is not None
            assert outcome.finish.kind in ("stop", "length"), (rid, outcome.finish)
            assert outcome.tokens == self.cold(rid), rid

    def quiesce(self) -> None:
        """After a flush every pool is at its initial count."""
        self.core.flush()
        self.core.audit()
        for pool in self.cache.pools:
            assert pool.num_free == pool.num_blocks, pool.group

    # ---------------------------------------------------------------- the tree

    def match(self, tokens: list[int], salt: str = "") -> Match:
        """What the tree has for these tokens."""
        return self.cache.tree.match(Namespace(salt), TokenKey(np.array(tokens, dtype=np.int32)))

    def lose(self, tokens: list[int], group: str, places: list[int] | None = None) -> int:
        """Drop pages (or snapshot positions) of one group on purpose; all by default."""
        match, index = self.match(tokens), self.schema.index_of(group)
        if places is None:
            is_snapshot = self.schema.groups[index].kind.is_snapshot
            places = (
                [s.position for s in match.snapshots]
                if is_snapshot
                else list(range(match.logical_pages))
            )
        freed = self.cache.tree.drop(match, index, places)
        self.free(freed)
        return freed.num(index)

    def free(self, freed: Freed) -> None:
        """Give blocks that left the tree back to their pools."""
        for pool, blocks in zip(self.cache.pools, freed.blocks, strict=True):
            pool.free(blocks)
