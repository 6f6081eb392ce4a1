"""One seed, one run: the real control plane in a simulated world, and the laws it must keep.

    seed -> knobs -> arrivals, operations and faults between steps and at every seam
         -> EngineCore, Scheduler, PrefixCache, RadixTree, planner, executor: all real
         -> deltas -> laws

    exactness      every token is the one that a run with no cache computes
    one end        every request gets exactly one terminal event, and nothing after it
    conservation   every block is in exactly one place, recounted from first principles
    quiescence     when all have ended, a flush returns every pool to its initial count
    progress       whatever was admitted ends within a bounded number of steps
    lossy copies   whoever insists on exact state gets a cold run's tokens and has none of it; of
                   the others, so does everybody who is told that nothing rests on lossy copies
    determinism    the same seed writes the same journal (checked by whoever runs a seed twice)

A broken law raises `ViolationError`, which names seed, law and the last events.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from statewise.radix.validation import GroupEnv, operators_of
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
from statewise.runtime.scheduler.admission import OutputReserve
from support.digest import next_token, owner_of
from support.digest_cold import ColdRun
from support.sim_faults import Faults
from support.sim_knobs import LONGEST_PROMPT, Knobs, draw_knobs
from support.sim_tiers import SimTiers
from support.sim_world import Journal, SimClock, SimWorker, WorkerDiedError

VOCAB = 97
EOS = 0
MAX_CONTEXT = 4096
MAX_STEPS = 4000


class ViolationError(AssertionError):
    """A law was broken."""


class NoReserve(OutputReserve):
    """Reserves nothing for output, whatever happens."""

    def __init__(self) -> None:
        self.share = 0.0

    def preempted(self) -> None:
        """Stay hopeful."""

    def step(self) -> None:
        """Stay hopeful."""


@dataclass
class Client:
    """One request as its client sees it."""

    rid: str
    prompt: list[int]
    max_new: int
    salt: str
    exact: bool = False  # insists on state that rests on no lossy copy
    differs: bool = False  # from a cold run, which a request in a lossy world may
    incarnation: int = 0  # of the engine it was sent to
    expects_error: str = ""  # code of the terminal error, for requests that can never run
    may_end: frozenset[str] = frozenset({"stop", "length"})
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    report: CacheReport | None = None
    cold: ColdRun | None = None
    cold_last: int = 0


@dataclass(frozen=True)
class Result:
    """What one seed did."""

    seed: int
    journal: str
    num_events: int
    num_steps: int
    num_requests: int
    num_restarts: int
    matched_tokens: int
    reused_tokens: int
    repaired_tokens: int
    loaded_tokens: int
    meetings: dict[str, int]
    met_tokens: int  # loaded from the end, and not computed
    preemptions: int
    faults: dict[str, int]
    levels: dict[str, int]
    lossy_tokens: int  # used by requests that have ended


class Simulation:
    """Runs one seed."""

    def __init__(self, seed: int, knobs: Knobs | None = None) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.knobs = knobs if knobs is not None else draw_knobs(self.rng)
        self.schema = self.knobs.schema
        self.clock = SimClock()
        self.journal = Journal()
        self.clients: dict[str, Client] = {}
        self.insistence = random.Random(f"exact {seed}")
        self.epoch = 0
        self.num_steps = 0
        self.num_restarts = 0
        self.preemptions = 0
        self.meetings: Counter[str] = Counter()
        self.met_tokens = 0
        self.tiers: SimTiers | None = None
        self.history: list[list[int]] = [
            [self.rng.randrange(1, VOCAB) for _ in range(self.rng.randrange(1, 70))]
            for _ in range(3)
        ]
        self.start()

    # ---------------------------------------------------------------- the engine

    def start(self) -> None:
        """Start an engine with empty device memory."""
        knobs = self.knobs
        self.worker = SimWorker(
            self.schema, knobs.num_blocks, VOCAB, self.owner_of_request, self.clock
        )
        self.core = EngineCore(
            ServerArgs(**knobs.settings),  # type: ignore[arg-type]
            self.schema,
            self.worker,
            knobs.num_blocks,
            EngineLimits(vocab_size=VOCAB, max_context_len=MAX_CONTEXT, eos_token_ids=(EOS,)),
            clock=self.clock,
        )
        if self.is_lossy:  # the machine has what reads such copies
            self.core.use_device([GroupEnv(operators=operators_of(s)) for s in self.schema.groups])
        self._use_tiers()
        if knobs.tiers is not None and knobs.tiers.tokens_per_s:
            self.worker.step_s, self.worker.token_s = 1e-3, 1.0 / knobs.tiers.tokens_per_s
        if knobs.hopeful:
            self.core.scheduler.admission.reserve = NoReserve()
        self.faults = Faults(self)
        self.worker.before_step = self.journal.batch

    def _use_tiers(self) -> None:
        """Give a new engine its slower tiers; what was on disk outlives the old one."""
        if self.knobs.tiers is None or not self.core.cache.enabled:
            return
        if self.tiers is None:
            self.tiers = SimTiers(self.schema, self.knobs.tiers, self.rng, self.clock)
        tiers = self.tiers
        self.core.use_tiers(
            tiers.open(self.worker, self.epoch), lambda _schema: tiers.shapes(self.epoch)
        )
        tiers.set_cost(self.core)

    def owner_of_request(self, rid: str) -> int:
        """Whose state a request computes."""
        return owner_of(self.clients[rid].salt, self.epoch)

    def run(self) -> Result:
        """Everything, to quiescence."""
        try:
            return self._run()
        except ViolationError:
            raise
        except Exception as error:
            raise ViolationError(self._story(f"{type(error).__name__}: {error}")) from error

    def _run(self) -> Result:
        for i in range(self.knobs.num_requests):
            self._arrive(f"r{i}")
            steps = self.rng.randrange(0, 8)
            if "bursts" in self.knobs.operations and self.rng.random() < 0.5:
                steps = 0
            self._storm(steps)
        self._storm(self.rng.randrange(0, 15))
        self.faults.calm()
        for _ in range(MAX_STEPS):
            if not self.core.has_work():
                break
            self.step()
        else:
            raise ViolationError(self._story(f"progress: still open: {self.core.stats()}"))
        self._check_ends()
        self._check_quiescence()
        return self._result()

    def _storm(self, num_steps: int) -> None:
        """Steps with faults and operations between them."""
        for _ in range(num_steps):
            self.step()
            self._between_steps()

    # ---------------------------------------------------------------- steps

    def step(self) -> None:
        """One step of the engine, its deltas checked."""
        self.num_steps += 1
        self.clock.pass_time(0.001)
        if self.tiers is not None:
            self.journal.add("I/O", self.tiers.run_some(must=not self.faults.active))
        if self.num_steps % self.knobs.audit_every == 0:
            self.core.audit()
        try:
            deltas = self.core.step()
        except WorkerDiedError:
            self._restart()
            return
        for delta in deltas:
            self._receive(delta)

    def _restart(self) -> None:
        """What a supervisor does: end what was open, start with an empty device cache."""
        self.journal.add("restart")
        self.num_restarts += 1
        self.preemptions += self.core.scheduler.num_preemptions
        self._note_meetings()
        for client in self.clients.values():
            if client.finish is None:
                self._end(client, FinishReason("error", code="worker_died", http_status=503))
        self.start()

    def _receive(self, delta: TokenDelta) -> None:
        client = self.clients[delta.rid]
        finish = delta.finish
        self.journal.add("delta", delta.rid, delta.token_ids, finish and (finish.kind, finish.code))
        self.require(client.finish is None, f"one end: {delta.rid} got a delta after its end")
        for token in delta.token_ids:
            expected = self._expected(client)
            client.differs = client.differs or token != expected
            self.require(
                token == expected or (self.is_lossy and not client.exact),
                f"exactness: {delta.rid} token {len(client.tokens)} is {token}, cold {expected}; "
                f"report {delta.report or client.report}",
            )
            client.tokens.append(token)
            assert client.cold is not None
            client.cold_last = client.cold.feed(token)
        if delta.report is not None:
            client.report = delta.report
        if finish is not None:
            self._end(client, finish)

    def _end(self, client: Client, finish: FinishReason) -> None:
        self.require(client.finish is None, f"one end: {client.rid} ended twice")
        client.finish = finish
        if client.report is not None and finish.code != "worker_died":
            lossy = client.report.lossy
            self.require(
                lossy > 0 or not client.differs,
                f"lossy copies: {client.rid} is told of none and differs from a cold run",
            )
            self.require(
                not (client.exact and (lossy or client.report.loaded)),
                f"lossy copies: {client.rid} insists on exact state and has {client.report}",
            )

    @property
    def is_lossy(self) -> bool:
        """Whether slower tiers keep lossy copies."""
        return self.knobs.tiers is not None and self.knobs.tiers.lossy

    def _expected(self, client: Client) -> int:
        """The next token of a cold run under the weights of this step."""
        owner = owner_of(client.salt, self.epoch)
        if client.cold is None or client.cold.owner != owner:
            client.cold = ColdRun(self.schema, owner)
            for token in (*client.prompt, *client.tokens):
                client.cold_last = client.cold.feed(token)
        return next_token(client.cold_last, VOCAB)

    # ---------------------------------------------------------------- arrivals

    def _arrive(self, rid: str) -> None:
        rng, operations = self.rng, self.knobs.operations
        if self.tiers is not None and self.tiers.knobs.tokens_per_s:
            self.tiers.set_cost(self.core)  # whatever was learnt
        stem = rng.choice(self.history[-6:])
        shared = len(stem) if rng.random() < 0.5 else rng.randrange(1, len(stem) + 1)
        prompt = stem[:shared]
        prompt = prompt + [rng.randrange(1, VOCAB) for _ in range(rng.choice([0, 0, 1, 3, 20]))]
        grows = "long_outputs" in operations and rng.random() < 0.5
        prompt = prompt[: 30 if grows else LONGEST_PROMPT]
        max_new = rng.choice([15, 30, 45]) if grows else rng.choice([0, 1, 3, 8])
        salt = rng.choice(["", "", "", "other"]) if "salts" in operations else ""
        exact = self.is_lossy and self.insistence.random() < 0.3
        client = Client(rid, prompt, max_new, salt, exact, incarnation=self.num_restarts)
        if "bad_requests" in operations and rng.random() < 0.1:
            self._spoil(client)
        self.clients[rid] = client
        priority = rng.randrange(3) if "priorities" in operations else 0
        marked = "marks" in operations and rng.random() < 0.3
        self.journal.add("add", rid, client.prompt, max_new, salt, priority, marked)
        self.core.add_request(
            TokenizedRequest(
                rid,
                pack_ids(client.prompt),
                SamplingParams(max_new_tokens=max_new, temperature=0.0),
                cache=CacheOptions(salt=salt, checkpoint=marked, exact=exact),
                priority=priority,
                # With new weights the oracle must know which tokens the old ones had made.
                stream="weight_updates" in operations or len(self.clients) % 2 == 0,
            )
        )
        if not client.expects_error:
            self.history.append(prompt)

    def _spoil(self, client: Client) -> None:
        """Make it a request that can never run (F25: it is answered all the same)."""
        kind = self.rng.choice(["empty", "vocabulary", "long"])
        client.expects_error = "invalid_request"
        if kind == "empty":
            client.prompt = []
        elif kind == "vocabulary":
            client.prompt = [*client.prompt, VOCAB]
        else:
            client.prompt = [1] * (MAX_CONTEXT + 1)
            client.expects_error = "prompt_too_long"

    # ---------------------------------------------------------------- between steps

    def _between_steps(self) -> None:
        rng, operations = self.rng, self.knobs.operations
        open_clients = [c for c in self.clients.values() if c.finish is None]
        for name, chance in (
            ("abort", 0.03), ("flush", 0.01), ("stop_matched", 0.02), ("clock_jumps", 0.03),
            ("worker_death", 0.01), ("weight_updates", 0.015), ("questions", 0.05),
        ):  # fmt: skip
            if name in operations and rng.random() < chance:
                getattr(self, f"_{name}")(rng.choice(open_clients) if open_clients else None)
        if self.knobs.tiers is not None and rng.random() < 0.1:
            if self.knobs.tiers.settles:
                self._settle()
            self.faults.evict_all("between steps")
            if self.knobs.tiers.settles:
                self._arrive(f"e{len(self.clients)}")  # and wants it back
        self.faults.between_steps()
        self.history += [
            c.prompt + c.tokens
            for c in self.clients.values()
            if c.finish is not None and c.tokens and rng.random() < 0.02
        ]

    def _settle(self) -> None:
        """Much of what is due is copied out."""
        tiering = self.core.cache.tiering
        for _ in range(40 if self.tiers is not None and tiering is not None else 0):
            self.tiers.run_some(must=False)  # type: ignore[union-attr]
            tiering.poll()  # type: ignore[union-attr]

    def _abort(self, client: Client | None) -> None:
        if client is not None:
            self.journal.add("abort", client.rid)
            client.may_end = frozenset({"abort"})
            self.core.abort(client.rid)

    def _stop_matched(self, client: Client | None) -> None:
        """The detokenizer found a stop string in what it has received."""
        if client is not None and client.tokens:
            kept = self.rng.randrange(1, len(client.tokens) + 1)
            self.journal.add("stop", client.rid, kept)
            self.core.stop_matched(client.rid, "stop", kept)

    def _flush(self, client: Client | None) -> None:
        self.journal.add("flush")
        self.core.flush()

    def _clock_jumps(self, client: Client | None) -> None:
        seconds = self.rng.choice([0.5, 60.0, 1e6])
        self.journal.add("clock", seconds)
        self.clock.pass_time(seconds)
        self.clock.wall_offset -= self.rng.choice([0.0, 2 * seconds])

    def _worker_death(self, client: Client | None) -> None:
        self.worker.dies_at_step = 0

    def _weight_updates(self, client: Client | None) -> None:
        self.epoch += 1
        self.journal.add("weights", self.epoch)
        self.core.update_weights()

    def _questions(self, client: Client | None) -> None:
        """Ask what changes nothing."""
        prompt = self.rng.choice(self.history)
        options = CacheOptions(salt=self.rng.choice(["", "other"]))
        self.core.match(np.array(prompt, dtype=np.int32), options)
        self.core.stats()
        self.core.cache_dump()

    # ---------------------------------------------------------------- laws

    def require(self, holds: bool, law: str) -> None:
        """Raise unless the law holds."""
        if not holds:
            raise ViolationError(self._story(law))

    def _story(self, law: str) -> str:
        events = "\n  ".join(repr(event) for event in self.journal.tail[-30:])
        shape = self.schema.model_fingerprint
        operations = ", ".join(sorted(self.knobs.operations))
        return f"seed {self.seed} ({shape}; {operations}): {law}\n  {events}"

    def _note_meetings(self) -> None:
        """Count what an engine that ends has loaded from the end of prefixes."""
        tiering = self.core.cache.tiering
        if tiering is not None:
            for labels, count in tiering.meetings.meetings.as_dict()["values"]:
                self.meetings[labels[0]] += count
            self.met_tokens += int(tiering.meetings.met_tokens.of(part="loaded"))

    def _check_ends(self) -> None:
        for client in self.clients.values():
            finish = client.finish
            self.require(finish is not None, f"one end: {client.rid} never ended")
            assert finish is not None
            if finish.code == "worker_died":
                continue
            if client.expects_error:
                self.require(
                    (finish.kind, finish.code) == ("error", client.expects_error),
                    f"one end: {client.rid} was refused with {finish}",
                )
                continue
            self.require(finish.kind in client.may_end, f"one end: {client.rid} with {finish}")
            if finish.kind == "length":
                wanted = min(client.max_new, self.core.max_sequence_len - len(client.prompt))
                self.require(len(client.tokens) == wanted, f"one end: {client.rid} is too short")

    def _check_quiescence(self) -> None:
        self.core.audit()
        self.core.flush()
        self.core.audit()
        for pool in self.core.cache.pools:
            self.require(
                pool.num_free == pool.num_blocks,
                f"quiescence: group {pool.group} has {pool.num_free} of {pool.num_blocks} free",
            )
        self.require(not self.core.scheduler.running, "quiescence: something still runs")
        ran = {
            c.rid
            for c in self.clients.values()
            if c.incarnation == self.num_restarts and not c.expects_error
        }
        self.require(self.worker.released == ran, "one end: the worker released other requests")

    def _result(self) -> Result:
        self._note_meetings()
        reports = [c.report for c in self.clients.values() if c.report is not None]
        levels: dict[str, int] = {}
        for report in reports:
            levels[report.level] = levels.get(report.level, 0) + 1
        return Result(
            seed=self.seed,
            journal=self.journal.digest,
            num_events=self.journal.num_events,
            num_steps=self.num_steps,
            num_requests=len(self.clients),
            num_restarts=self.num_restarts,
            matched_tokens=sum(r.matched for r in reports),
            reused_tokens=sum(r.reused for r in reports),
            repaired_tokens=sum(r.repaired for r in reports),
            loaded_tokens=sum(r.loaded for r in reports),
            meetings=dict(sorted(self.meetings.items())),
            met_tokens=self.met_tokens,
            preemptions=self.preemptions + self.core.scheduler.num_preemptions,
            faults=dict(sorted((self.faults.counts + self._tier_faults()).items())),
            levels=levels,
            lossy_tokens=sum(r.lossy for r in reports),
        )

    def _tier_faults(self) -> Counter[str]:
        return Counter() if self.tiers is None else self.tiers.faults


def run_seed(seed: int) -> Result:
    """Run one seed; raises `ViolationError`."""
    return Simulation(seed).run()
