"""Exactness on real tensors: whatever cache, batch and pools do, the answer is the same.

The simulation proves this over digests; here the model runner, the kernels and paged pools are in
the loop. Pools start as NaN and so small that requests evict and preempt each other. The oracle is
the same engine core with no cache, one request at a time, in one chunk.
"""

from __future__ import annotations

import functools
import random

import msgspec
import pytest

from statewise.kernels import cpu_backend
from statewise.runtime.clock import SystemClock
from statewise.runtime.config import ServerArgs
from statewise.runtime.engine.build import BuiltRuntime, build_runtime
from statewise.runtime.engine.core import EngineCore
from statewise.runtime.messages import (
    CacheOptions,
    LogprobOptions,
    TokenDelta,
    TokenizedRequest,
    pack_ids,
)
from statewise.runtime.models.tiny import TinySize
from statewise.runtime.sampling_params import SamplingParams
from support.tiny import tiny_model

PAGE = 4
LONGEST = 150
VOCAB = 256

SEEDS = [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 4))]

Answer = tuple[list[int], list[float]]


@functools.cache
def built(arch: str, backend: str, dtype: str, pages: int, head_dim: int = 16) -> BuiltRuntime:
    """A runtime whose pools hold `pages` pages of each group."""
    args = ServerArgs(
        model_path=str(tiny_model(arch, TinySize(head_dim=head_dim))),
        dtype=dtype,
        attention_backend=backend,
        page_size=PAGE,
        max_total_tokens=pages * PAGE,
        max_window_tokens=pages * PAGE,
        chunked_prefill_size=32,
        num_threads=1,
        audit=True,
        skip_tokenizer_init=True,
    )
    return build_runtime(args)


def core_of(parts: BuiltRuntime, **settings: object) -> EngineCore:
    """A fresh core over the parts' pools, every block poisoned."""
    for group, pool in enumerate(parts.worker.store.groups):
        parts.worker.store.fill_blocks(group, range(pool.num_blocks), float("nan"))
    args = msgspec.structs.replace(parts.args, **settings)
    return EngineCore(
        args, parts.schema, parts.worker, parts.pools.num_blocks, parts.limits, clock=SystemClock()
    )


def request(rid: str, prompt: list[int], max_new: int, salt: str = "") -> TokenizedRequest:
    params = SamplingParams(max_new_tokens=max_new, temperature=0.0, ignore_eos=True)
    return TokenizedRequest(
        rid, pack_ids(prompt), params, LogprobOptions(True, top=1), CacheOptions(salt=salt)
    )


class Collected:
    """Tokens and log probabilities by request, from a core's deltas."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.ended: dict[str, str] = {}

    def take(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            assert delta.rid not in self.ended
            ids, logprobs = self.answers.setdefault(delta.rid, ([], []))
            ids.extend(delta.token_ids)
            logprobs.extend(e.logprob or 0.0 for e in delta.logprobs)
            if delta.finish is not None:
                assert delta.finish.kind != "error", delta.finish
                self.ended[delta.rid] = delta.finish.kind

    def drain(self, core: EngineCore) -> None:
        for _ in range(5000):
            if not core.has_work():
                return
            self.take(core.step())
        raise AssertionError(f"still open: {core.stats()}")


def cold(parts: BuiltRuntime, prompt: list[int], max_new: int, **settings: object) -> Answer:
    """The answer with no cache and nobody else in the batch."""
    core = core_of(parts, disable_radix_cache=True, **settings)
    out = Collected()
    core.add_request(request("cold", prompt, max_new))
    out.drain(core)
    return out.answers["cold"]


def scenario(
    parts: BuiltRuntime, seed: int, **settings: object
) -> dict[str, tuple[list[int], int, Answer]]:
    """Random requests over shared stems, some aborted; {rid: (prompt, max_new, answer)}."""
    rng = random.Random(seed)
    core = core_of(parts, **settings)
    out = Collected()
    stems = [[rng.randrange(VOCAB) for _ in range(rng.randrange(30, 90))] for _ in range(2)]
    asked: dict[str, tuple[list[int], int]] = {}
    aborted = set()
    for i in range(rng.randrange(5, 12)):
        stem = rng.choice(stems)
        cut = rng.choice([len(stem), len(stem), rng.randrange(1, len(stem) + 1)])
        prompt = stem[:cut] + [rng.randrange(VOCAB) for _ in range(rng.randrange(12))]
        prompt = prompt[:100]
        rid, max_new = f"r{i}", rng.choice([0, 4, 16, 40])
        asked[rid] = (prompt, max_new)
        core.add_request(request(rid, prompt, max_new, rng.choice(["", "", "", "salt"])))
        for _ in range(rng.choice([0, 2, 30])):
            out.take(core.step())
        stems.append(prompt + out.answers.get(rid, ([], []))[0])
        if rng.random() < 0.15:
            victim = rng.choice(sorted(asked))
            if victim not in out.ended:
                core.abort(victim)
                aborted.add(victim)
        if rng.random() < 0.05:
            core.flush()
    out.drain(core)
    assert core.counters.effective_reuse_tokens > 0, "the scenario shared nothing"
    core.flush()
    core.audit()
    assert all(pool.num_free == pool.num_blocks for pool in core.cache.pools)
    assert set(out.ended) == set(asked)
    return {r: (*asked[r], out.answers[r]) for r in asked if r not in aborted}


@pytest.mark.parametrize("backend", [pytest.param("torch", marks=pytest.mark.slow), "cpu"])
@pytest.mark.parametrize("arch", ["llama", "gemma3", "mistral"])
@pytest.mark.parametrize("seed", SEEDS)
def test_answers_equal_a_cold_run(arch, backend, seed):
    rng = random.Random(seed)
    small = built(arch, backend, "float32", rng.choice([-(-LONGEST // PAGE) + 4, 90]))
    settings = {
        "chunked_prefill_size": rng.choice([PAGE, 3, 17, 32]),
        "max_running_requests": rng.choice([1, 3, 6]),
        "schedule_policy": rng.choice(["lpm", "fcfs"]),
        "checkpoint_interval": rng.choice([0, 16, 64]),
    }
    answers = scenario(small, seed, **settings)
    oracle = built(arch, "torch", "float32", 90)
    for rid, (prompt, max_new, (ids, logprobs)) in answers.items():
        expected_ids, expected_logprobs = cold(oracle, prompt, max_new)
        assert ids == expected_ids, (seed, rid)
        assert logprobs == pytest.approx(expected_logprobs, abs=2e-4), (seed, rid)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
@pytest.mark.parametrize("seed", SEEDS)
def test_answers_are_bit_equal_to_a_cold_run(arch, dtype, seed, monkeypatch):
    """Tokens and log probabilities, in any batch, in any chunks, after a hit as after a miss."""
    monkeypatch.setattr(cpu_backend, "MIN_PACKED_BYTES", 0)  # tiny matrices as tiles too
    parts = built(arch, "cpu", dtype, 90, 32)
    rng = random.Random(seed)
    settings = {
        "chunked_prefill_size": rng.choice([PAGE, 3, 17, 32]),
        "max_running_requests": rng.choice([3, 8]),
    }
    answers = scenario(parts, 100 + seed, **settings)
    for rid, (prompt, max_new, answer) in answers.items():
        assert answer == cold(parts, prompt, max_new), (seed, rid)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
@pytest.mark.parametrize("seed", SEEDS[:2])
def test_deterministic_answers_are_bit_equal_to_a_cold_run(arch, dtype, seed):
    parts = built(arch, "cpu", dtype, 90)
    settings = {"deterministic": True, "chunked_prefill_size": 16}
    answers = scenario(parts, 100 + seed, **settings)
    for rid, (prompt, max_new, answer) in answers.items():
        assert answer == cold(parts, prompt, max_new, **settings), (seed, rid)


@functools.cache
def real() -> BuiltRuntime:
    """SmolLM2 as it is served: bfloat16, pages of 16 tokens."""
    args = ServerArgs(
        model_path="smollm2-135m",
        dtype="bfloat16",
        attention_backend="cpu",
        page_size=16,
        max_total_tokens=8192,
        num_threads=2,
        skip_tokenizer_init=True,
    )
    return build_runtime(args)


def seeded(rid: str, prompt: list[int], seed: int | None) -> TokenizedRequest:
    """Sixteen tokens: greedy, or drawn with a seed."""
    temperature = 0.0 if seed is None else 1.0
    params = SamplingParams(
        max_new_tokens=16, temperature=temperature, sampling_seed=seed, ignore_eos=True
    )
    return TokenizedRequest(
        rid, pack_ids(prompt), params, LogprobOptions(True, top=1), CacheOptions()
    )


@pytest.mark.slow
def test_a_real_model_repeats_bit_for_bit_in_any_company():
    """Eight requests, greedy and seeded, over one stem: alone and cold, then together, twice."""
    rng = random.Random(3)
    stem = [rng.randrange(1000, 40000) for _ in range(700)]
    prompts = [[*stem[: 100 * i + 33], 500 + i] for i in range(8)]
    asked = {f"r{i}": (prompt, i if i % 2 else None) for i, prompt in enumerate(prompts)}
    expected = {}
    for i, (rid, (prompt, seed)) in enumerate(asked.items()):
        core = core_of(real(), disable_radix_cache=True, chunked_prefill_size=(2048, 96)[i // 4])
        out = Collected()
        core.add_request(seeded(rid, prompt, seed))
        out.drain(core)
        expected[rid] = out.answers[rid]
    core = core_of(real(), chunked_prefill_size=160)
    for attempt in range(2):
        out = Collected()
        for rid, (prompt, seed) in asked.items():
            core.add_request(seeded(rid, prompt, seed))
        out.drain(core)
        assert out.answers == expected, attempt
    assert core.counters.effective_reuse_tokens > 2000
