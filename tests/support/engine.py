"""Random engine scenarios over the digest model: one seed decides everything."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from statewise.radix.schema import CacheSchema, GroupKind, StateGroupSpec
from statewise.runtime.config import ServerArgs
from statewise.runtime.engine.core import EngineCore, EngineLimits
from statewise.runtime.messages import (
    CacheOptions,
    FinishReason,
    TokenDelta,
    TokenizedRequest,
    pack_ids,
)
from statewise.runtime.sampling_params import SamplingParams
from statewise.runtime.scheduler.admission import OutputReserve
from support.digest import DigestWorker, cold_output

VOCAB = 97
EOS = 0
EOS_IDS = frozenset({EOS})


class NoReserve(OutputReserve):
    """Reserves nothing for output, whatever happens."""

    def __init__(self) -> None:
        self.share = 0.0

    def preempted(self) -> None:
        """Stay hopeful."""

    def step(self) -> None:
        """Stay hopeful."""


class StepClock:
    """Advances only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        """Simulated seconds."""
        return self.now

    def wall(self) -> float:
        """Simulated seconds."""
        return self.now


def group(name: str, kind: GroupKind, layers: tuple[int, ...], window: int = 0) -> StateGroupSpec:
    """A group with small made-up geometry."""
    return StateGroupSpec(name, kind, layers, "digest", "v1", entry_bytes=8, window=window)


def make_schema(shape: str, page_size: int, window: int) -> CacheSchema:
    """`shape` is one letter per layer: F full, W window, V a window twice as long."""
    groups = []
    for letter, name, kind, width in (
        ("F", "full", GroupKind.FULL, 0),
        ("W", "window", GroupKind.WINDOW, window),
        ("V", "wide", GroupKind.WINDOW, 2 * window),
    ):
        layers = tuple(i for i, c in enumerate(shape) if c == letter)
        if layers:
            groups.append(group(name, kind, layers, width))
    return CacheSchema(page_size, len(shape), tuple(groups), f"digest-{shape}")


@dataclass
class Outcome:
    """What came back for one request."""

    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    num_finishes: int = 0
    delta: TokenDelta | None = None


class Driver:
    """Feeds an EngineCore and collects its deltas."""

    def __init__(self, schema: CacheSchema, num_blocks: tuple[int, ...], **args: object) -> None:
        self.schema = schema
        self.worker = DigestWorker(schema, num_blocks, VOCAB)
        self.clock = StepClock()
        settings: dict[str, object] = {
            "model_path": "digest", "page_size": schema.page_size, **args,
        }  # fmt: skip
        self.audit_every = 1  # steps
        limits = EngineLimits(vocab_size=VOCAB, max_context_len=4096, eos_token_ids=(EOS,))
        self.core = EngineCore(
            ServerArgs(**settings),  # type: ignore[arg-type]
            schema,
            self.worker,
            num_blocks,
            limits,
            clock=self.clock,
        )
        self.outcomes: dict[str, Outcome] = {}
        self.num_steps = 0

    def add(
        self, rid: str, prompt: list[int], max_new: int, *, salt: str = "", **sampling: object
    ) -> None:
        """Queue a greedy request."""
        self.outcomes[rid] = Outcome()
        params = SamplingParams(max_new_tokens=max_new, temperature=0.0, **sampling)  # type: ignore[arg-type]
        self.core.add_request(
            TokenizedRequest(rid, pack_ids(prompt), params, cache=CacheOptions(salt=salt))
        )

    def step(self) -> None:
        """One engine step, 10 ms."""
        self.clock.now += 0.01
        self.num_steps += 1
        if self.num_steps % self.audit_every == 0:
            self.core.audit()
        for delta in self.core.step():
            outcome = self.outcomes[delta.rid]
            assert outcome.finish is None, f"{delta.rid}: a delta after its terminal one"
            outcome.tokens.extend(delta.token_ids)
            outcome.delta = delta
            if delta.finish is not None:
                outcome.finish = delta.finish
                outcome.num_finishes += 1

    def run(self, max_steps: int = 20_000) -> None:
        """Step until nothing is open."""
        for _ in range(max_steps):
            if not self.core.has_work():
                return
            self.step()
        raise AssertionError(f"still open after {max_steps} steps: {self.core.stats()}")

    def quiesce(self) -> None:
        """After flush every pool is at its initial count."""
        self.core.flush()
        self.core.audit()
        for pool in self.core.cache.pools:
            assert pool.num_free == pool.num_blocks, pool.group


def random_scenario(seed: int) -> None:
    """Run one scenario and check: exact output, one terminal delta, conservation, quiescence."""
    rng = random.Random(seed)
    page = rng.choice([1, 2, 4, 8])
    window = rng.choice([1, 3, 4, 7, 12, 20])
    schema = make_schema(rng.choice(["FF", "FWF", "WFW", "WW", "FWV", "WWWF"]), page, window)
    longest = 120
    pages = -(-longest // page) + 2
    num_blocks = tuple(
        pages * rng.choice([1, 1, 2, 4]) + rng.randrange(8) for _ in range(schema.num_groups)
    )
    driver = Driver(
        schema,
        num_blocks,
        chunked_prefill_size=rng.choice([page, 2 * page, 16, 64]),
        max_running_requests=rng.choice([1, 3, 8]),
        schedule_policy=rng.choice(["lpm", "fcfs"]),
        max_wait_s=rng.choice([0.05, 1.0]),
        checkpoint_interval=rng.choice([0, 16, 64]),
        disable_radix_cache=rng.random() < 0.1,
        deterministic=rng.random() < 0.2,
    )
    driver.audit_every = rng.choice([1, 20, 20])
    grows = rng.random() < 0.4  # short prompts, long outputs, admitted on hope: preemption
    if grows:
        driver.core.scheduler.admission.reserve = NoReserve()
    stems = [[rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, 70))] for _ in range(3)]
    expected: dict[str, list[int]] = {}
    aborted: set[str] = set()
    history: list[list[int]] = list(stems)
    for i in range(rng.randrange(4, 24)):
        stem = rng.choice(history)
        prompt = stem[: rng.randrange(1, len(stem) + 1)]
        prompt = prompt + [rng.randrange(1, VOCAB) for _ in range(rng.randrange(0, 20))]
        prompt = prompt[: 30 if grows else 90]
        max_new = rng.choice([40, 60, 80]) if grows else rng.choice([0, 1, 5, 25])
        rid = f"r{i}"
        driver.add(rid, prompt, max_new, salt=rng.choice(["", "", "other"]))
        expected[rid] = cold_output(schema, np.array(prompt, np.int32), max_new, VOCAB, EOS_IDS)
        history.append(prompt + expected[rid])
        for _ in range(rng.randrange(0, 12)):
            driver.step()
        if rng.random() < 0.1:
            victim = rng.choice(sorted(expected))
            if driver.outcomes[victim].finish is None:
                driver.core.abort(victim)
                aborted.add(victim)
        if rng.random() < 0.05:
            driver.core.flush()
    driver.run()
    for rid, tokens in expected.items():
        outcome = driver.outcomes[rid]
        assert outcome.num_finishes == 1, rid
        assert outcome.finish is not None
        if rid in aborted:
            assert tokens[: len(outcome.tokens)] == outcome.tokens, rid
        else:
            assert outcome.finish.kind in ("stop", "length"), (rid, outcome.finish)
            assert outcome.tokens == tokens, (seed, rid)
    driver.quiesce()
