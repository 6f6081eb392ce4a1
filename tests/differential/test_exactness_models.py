"""The exactness law on real layers: the cache on, under any schedule, against the cache off.

Tiny random checkpoints in float32: one FULL-only model, two FULL+WINDOW, and one of each hybrid
architecture. The scenarios are those of support/model_scenarios.py.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest

from statewise.runtime.engine.core import EngineCore
from statewise.runtime.messages import LogprobOptions, TokenizedRequest, pack_ids
from statewise.runtime.sampling_params import SamplingParams
from support.model_scenarios import VOCAB, Case, request, scenario

ARCHITECTURES = ("llama", "gemma3", "gpt-oss")
# Seeds a block, of four blocks: with those of the other tests more than 200 scenarios.
NUM_SEEDS = {"llama": 20, "gemma3": 20, "gpt-oss": 12}
HYBRID = ("deepseek-v4", "deepseek-v32", "qwen3-next", "gpt-oss")


@cache
def case(arch: str, root: str) -> Case:
    return Case(arch, Path(root) / arch)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_few_scenarios(arch: str, root: str) -> None:
    for seed in range(2):
        scenario(case(arch, root), seed)


@pytest.mark.slow
@pytest.mark.parametrize("arch", HYBRID)
def test_hybrid_scenarios(arch: str, root: str) -> None:
    """A few; `tools/exactness.py` runs hundreds."""
    outcomes = [scenario(case(arch, root), seed) for seed in range(200, 204)]
    assert sum(o.reused for o in outcomes) > 0


@pytest.mark.slow
def test_whoever_shares_with_bounded_replays_is_exact(root: str) -> None:
    """Approximate requests among others, windows lost between them: the others equal a cold run."""
    outcomes = [scenario(case("gemma3", root), seed, bounded_replay=8) for seed in range(400, 412)]
    assert sum(o.approximate for o in outcomes) > 0
    assert sum(o.reused for o in outcomes) > 0


@pytest.mark.slow
@pytest.mark.parametrize("block", range(4))
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_random_scenarios(arch: str, block: int, root: str) -> None:
    first = 100 + NUM_SEEDS[arch] * block
    for seed in range(first, first + NUM_SEEDS[arch]):
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


@pytest.mark.slow
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
