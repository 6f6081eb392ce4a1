"""The exactness law on real layers: the cache on, under any schedule, against the cache off.

Tiny random checkpoints in float32, one FULL-only model and two FULL+WINDOW. The oracle runs each
prompt alone, without a prefix cache, in one engine with ample pools.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest

from statewise.runtime.clock import SystemClock
from statewise.runtime.config import ServerArgs
from statewise.runtime.engine.build import build_runtime
from statewise.runtime.engine.core import EngineCore
from statewise.runtime.messages import (
    CacheOptions,
    LogprobOptions,
    TokenDelta,
    TokenizedRequest,
    pack_ids,
)
from statewise.runtime.models.tiny import TinySize, make_tiny_model
from statewise.runtime.sampling_params import SamplingParams
from support.simulation import NoReserve

WINDOW = 16
ARCHITECTURES = ("llama", "gemma3", "gpt-oss")
VOCAB = 256


class Case:
    """One tiny model with an oracle that never reuses anything."""

    def __init__(self, arch: str, path: Path) -> None:
        make_tiny_model(arch, path, size=TinySize(layers=6, window=WINDOW))
        self.path = path
        self.oracle = self.core(disable_radix_cache=True, max_total_tokens=4096)
        self.answers: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def core(self, **args: object) -> EngineCore:
        settings: dict[str, object] = {
            "model_path": str(self.path), "dtype": "float32", "skip_tokenizer_init": True,
            "page_size": 8, "num_threads": 1, **args,
        }  # fmt: skip
        built = build_runtime(ServerArgs(**settings))  # type: ignore[arg-type]
        return built.core(SystemClock())

    def expected(self, prompt: list[int], max_new: int) -> list[int]:
        key = (tuple(prompt), max_new)
        if key not in self.answers:
            self.answers[key] = run(self.oracle, {"o": (prompt, max_new)})["o"]
        return self.answers[key]


def request(rid: str, prompt: list[int], max_new: int) -> TokenizedRequest:
    params = SamplingParams(max_new_tokens=max_new, temperature=0.0, ignore_eos=True)
    return TokenizedRequest(rid, pack_ids(prompt), params, cache=CacheOptions())


def collect(deltas: list[TokenDelta], out: dict[str, list[int]], done: set[str]) -> None:
    for delta in deltas:
        assert delta.rid not in done
        out.setdefault(delta.rid, []).extend(delta.token_ids)
        if delta.finish is not None:
            assert delta.finish.kind in ("length", "abort"), delta.finish
            done.add(delta.rid)


def run(core: EngineCore, requests: dict[str, tuple[list[int], int]]) -> dict[str, list[int]]:
    for rid, (prompt, max_new) in requests.items():
        core.add_request(request(rid, prompt, max_new))
    out: dict[str, list[int]] = {rid: [] for rid in requests}
    done: set[str] = set()
    while core.has_work():
        collect(core.step(), out, done)
    assert done == set(requests)
    return out


@cache
def case(arch: str, root: str) -> Case:
    return Case(arch, Path(root) / arch)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("models"))


def scenario(case: Case, seed: int) -> None:
    """Shared prefixes, forks, tiny pools, preemption, aborts, chunk sizes and batch mixes."""
    rng = random.Random(seed)
    grows = rng.random() < 0.4  # short prompts, long outputs, admitted on hope: preemption
    core = case.core(
        max_total_tokens=160 if grows else rng.choice([160, 240, 480]),
        max_window_tokens=rng.choice([104, 160, 480]),
        chunked_prefill_size=rng.choice([8, 24, 64]),
        max_running_requests=6 if grows else rng.choice([1, 3, 6]),
        checkpoint_interval=rng.choice([0, 32]),
        audit=True,
    )
    if grows:
        core.scheduler.admission.reserve = NoReserve()
    stems = [[rng.randrange(VOCAB) for _ in range(rng.randrange(8, 80))] for _ in range(2)]
    wanted: dict[str, list[int]] = {}
    out: dict[str, list[int]] = {}
    done: set[str] = set()
    aborted: set[str] = set()
    for i in range(8 if grows else rng.randrange(3, 9)):
        stem = rng.choice(stems)
        prompt = stem[: rng.randrange(1, len(stem) + 1)]
        prompt = prompt + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))]
        prompt = prompt[: 24 if grows else None]
        max_new = rng.choice([40, 60]) if grows else rng.choice([1, 4, 30])
        rid = f"r{i}"
        wanted[rid] = case.expected(prompt, max_new)
        stems.append(prompt + wanted[rid])
        core.add_request(request(rid, prompt, max_new))
        for _ in range(rng.randrange(0, 6)):
            collect(core.step(), out, done)
        if rng.random() < 0.1 and rid not in done:
            core.abort(rid)
            aborted.add(rid)
    while core.has_work():
        collect(core.step(), out, done)
    assert done == set(wanted)
    for rid, tokens in wanted.items():
        got = out.get(rid, [])
        assert got == (tokens[: len(got)] if rid in aborted else tokens), (seed, rid)
    core.flush()
    core.audit()
    assert all(pool.num_free == pool.num_blocks for pool in core.cache.pools)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_few_scenarios(arch: str, root: str) -> None:
    for seed in range(6):
        scenario(case(arch, root), seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(4))
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_random_scenarios(arch: str, block: int, root: str) -> None:
    for seed in range(100 + 30 * block, 130 + 30 * block):
        scenario(case(arch, root), seed)


def logprobs_of(core: EngineCore, rid: str, prompt: list[int], max_new: int) -> list[float | None]:
    """Log probabilities of the generated tokens, run among whatever else is open."""
    params = SamplingParams(max_new_tokens=max_new, temperature=0.0, ignore_eos=True)
    core.add_request(
        TokenizedRequest(rid, pack_ids(prompt), params, logprob=LogprobOptions(enabled=True))
    )
    out: list[float | None] = []
    while core.has_work():
        for delta in core.step():
            if delta.rid == rid:
                out += [entry.logprob for entry in delta.logprobs]
    return out


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_deterministic_mode_is_bit_equal(arch: str, root: str) -> None:
    """Aligned chunks: a hit runs the very kernel calls of a miss, whatever else is running."""
    rng = random.Random(5)
    settings = {"deterministic": True, "chunked_prefill_size": 16, "max_total_tokens": 2048}
    one = case(arch, root)
    cold = one.core(disable_radix_cache=True, **settings)
    warm = one.core(audit=True, **settings)
    stem = [rng.randrange(VOCAB) for _ in range(75)]
    reused = 0
    for i in range(6):
        prompt = stem[: rng.randrange(40, 75)] + [rng.randrange(VOCAB) for _ in range(i)]
        warm.add_request(request(f"other{i}", prompt[: 20 + i], 10))
        got = logprobs_of(warm, f"w{i}", prompt, 12)
        assert got == logprobs_of(cold, f"c{i}", prompt, 12), i
        reused += warm.counters.effective_reuse_tokens
    assert reused > 0
