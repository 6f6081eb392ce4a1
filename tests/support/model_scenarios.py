"""Random scenarios over tiny real models: the cache on, under any schedule, against the cache off.

The oracle runs each prompt alone, without a prefix cache, in one engine with ample pools.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from statewise.radix import CostModel, Namespace, TokenKey
from statewise.runtime.clock import SystemClock
from statewise.runtime.config import ServerArgs
from statewise.runtime.engine.build import build_runtime
from statewise.runtime.engine.core import EngineCore
from statewise.runtime.messages import (
    CacheOptions,
    TokenDelta,
    TokenizedRequest,
    pack_ids,
)
from statewise.runtime.models.tiny import TinySize, make_tiny_model
from statewise.runtime.sampling_params import SamplingParams
from support.model_recovery import drop_state
from support.simulation import NoReserve

WINDOW = 16
VOCAB = 256
# Layers and page size of the tiny models.
SHAPES = {
    "llama": (2, 8), "gemma3": (3, 8), "gpt-oss": (3, 8),
    "deepseek-v4": (4, 16), "deepseek-v32": (3, 8), "qwen3-next": (4, 8),
}  # fmt: skip


class Case:
    """One tiny model with an oracle that never reuses anything."""

    def __init__(self, arch: str, path: Path, seed: int = 0) -> None:
        layers, self.page_size = SHAPES[arch]
        make_tiny_model(arch, path, seed=seed, size=TinySize(layers=layers, window=WINDOW))
        self.path = path
        self.oracle = self.core(disable_radix_cache=True, max_total_tokens=4096)
        self.answers: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def core(self, **args: object) -> EngineCore:
        """An engine core over the model; `args` are server settings."""
        settings: dict[str, object] = {
            "model_path": str(self.path), "dtype": "float32", "skip_tokenizer_init": True,
            "page_size": self.page_size, "num_threads": 1, **args,
        }  # fmt: skip
        built = build_runtime(ServerArgs(**settings))  # type: ignore[arg-type]
        return built.core(SystemClock())

    def expected(self, prompt: list[int], max_new: int) -> list[int]:
        """What a cold run generates."""
        key = (tuple(prompt), max_new)
        if key not in self.answers:
            self.answers[key] = run(self.oracle, {"o": (prompt, max_new)})["o"]
        return self.answers[key]


def request(rid: str, prompt: list[int], max_new: int) -> TokenizedRequest:
    """A greedy request."""
    params = SamplingParams(max_new_tokens=max_new, temperature=0.0, ignore_eos=True)
    return TokenizedRequest(rid, pack_ids(prompt), params, cache=CacheOptions())


def collect(deltas: list[TokenDelta], out: dict[str, list[int]], done: set[str]) -> None:
    """Add a step's deltas to the outputs; nothing may come after a terminal one."""
    for delta in deltas:
        assert delta.rid not in done
        out.setdefault(delta.rid, []).extend(delta.token_ids)
        if delta.finish is not None:
            assert delta.finish.kind in ("length", "abort"), delta.finish
            done.add(delta.rid)


def run(core: EngineCore, requests: dict[str, tuple[list[int], int]]) -> dict[str, list[int]]:
    """Run requests to their ends."""
    for rid, (prompt, max_new) in requests.items():
        core.add_request(request(rid, prompt, max_new))
    out: dict[str, list[int]] = {rid: [] for rid in requests}
    done: set[str] = set()
    while core.has_work():
        collect(core.step(), out, done)
    assert done == set(requests)
    return out


@dataclass(frozen=True)
class Outcome:
    """What a scenario's engine counted."""

    requests: int
    preemptions: int
    reused: int  # tokens as they stood
    repaired: int  # tokens replayed
    levels: Counter[str]  # of recovery, by request
    approximate: int  # requests that went through a bounded replay


def lose_something(core: EngineCore, prompt: list[int], rng: random.Random) -> None:
    """Drop a run of pages, or of snapshots, of one group that the cache has of a prompt.

    Where replays may be bounded: all that is no history, which is what they are for.
    """
    match = core.cache.tree.match(Namespace(), TokenKey(np.array(prompt, dtype=np.int32)))
    if core.args.bounded_replay:
        for group, spec in enumerate(core.cache.schema.groups):
            if not spec.kind.is_history:
                drop_state(core, match, group, range(match.logical_pages))
    elif match.logical_pages:
        ends = sorted(rng.randrange(match.logical_pages + 1) for _ in range(2))
        group = rng.randrange(core.cache.schema.num_groups)
        drop_state(core, match, group, range(*ends))


def _core(case: Case, rng: random.Random, grows: bool, bounded_replay: int) -> EngineCore:
    """An engine with small pools; with bounded replay, one to which tokens are dear."""
    unit = case.page_size // 8
    core = case.core(
        max_total_tokens=160 if grows else rng.choice([160, 240, 480]),
        max_window_tokens=unit * rng.choice([104, 160, 480]),
        chunked_prefill_size=rng.choice([8, 24, 64]),
        max_running_requests=6 if grows else rng.choice([1, 3, 6]),
        checkpoint_interval=rng.choice([0, 32]),
        audit=True,
        bounded_replay=bounded_replay,
    )
    if grows:
        core.scheduler.admission.reserve = NoReserve()
    if bounded_replay:
        chunk = core.args.chunked_prefill_size
        core.use_cost(CostModel.uniform(core.cache.schema.num_layers, 1000.0, chunk=chunk))
    return core


def scenario(case: Case, seed: int, *, bounded_replay: int = 0) -> Outcome:
    """Shared prefixes, forks, tiny pools, preemption, aborts, chunk sizes and batch mixes.

    In half of the scenarios cached state of single groups is lost between the requests; in all of
    them with `bounded_replay`. Requests that it approximates are not compared: all others are.
    """
    rng, losses = random.Random(seed), random.Random(-1 - seed)
    is_lossy = losses.random() < 0.5 or bounded_replay > 0
    grows = rng.random() < 0.4  # short prompts, long outputs, admitted on hope: preemption
    core = _core(case, rng, grows, bounded_replay)
    stems = [[rng.randrange(VOCAB) for _ in range(rng.randrange(8, 80))] for _ in range(2)]
    wanted: dict[str, list[int]] = {}
    out: dict[str, list[int]] = {}
    done: set[str] = set()
    aborted: set[str] = set()
    approximate: set[str] = set()

    def step() -> None:
        collect(core.step(), out, done)
        for request in core.scheduler.running:
            if request.sequence is not None and request.sequence.is_private:
                approximate.add(request.rid)

    for i in range(8 if grows else rng.randrange(3, 9)):
        stem = rng.choice(stems)
        prompt = stem[: rng.randrange(1, len(stem) + 1)]
        prompt = prompt + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))]
        prompt = prompt[: 24 if grows else None]
        max_new = rng.choice([40, 60]) if grows else rng.choice([1, 4, 30])
        rid = f"r{i}"
        wanted[rid] = case.expected(prompt, max_new)
        if is_lossy:
            lose_something(core, prompt, losses)
        stems.append(prompt + wanted[rid])
        core.add_request(request(rid, prompt, max_new))
        for _ in range(rng.randrange(0, 6)):
            step()
        if rng.random() < 0.1 and rid not in done:
            core.abort(rid)
            aborted.add(rid)
    while core.has_work():
        step()
    assert done == set(wanted)
    for rid, tokens in wanted.items():
        if rid in approximate:
            continue
        got = out.get(rid, [])
        assert got == (tokens[: len(got)] if rid in aborted else tokens), (seed, rid)
    counters = core.counters
    outcome = Outcome(
        len(wanted),
        core.scheduler.num_preemptions,
        counters.effective_reuse_tokens,
        counters.repaired_tokens,
        counters.levels,
        len(approximate),
    )
    core.flush()
    core.audit()
    assert all(pool.num_free == pool.num_blocks for pool in core.cache.pools)
    return outcome
