"""Lossy copies end to end: what comes back, who may see it, what is said about it.

The law: whoever did not agree to approximate state never gets any. A server without the flag finds
nothing of one with it, in the same directory; a request that insists on exact state on a server
with the flag gets what a cold run gives; a request whose report says that nothing it used rests on
lossy copies does as well.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from statewise.radix import Cause
from statewise.radix.lossy import KINDS
from statewise.radix.validation import ALL_OPERATORS
from statewise.runtime.clock import SystemClock
from statewise.runtime.engine.core import EngineCore
from statewise.runtime.engine.slower import LossyIO
from statewise.runtime.errors import InvalidRequestError
from statewise.runtime.messages import (
    CacheOptions,
    CacheReport,
    LogprobOptions,
    TokenizedRequest,
    pack_ids,
)
from statewise.runtime.sampling_params import SamplingParams
from statewise.runtime.tiers.admin import opened
from statewise.runtime.tiers.record import RecordError
from support.model_scenarios import VOCAB, Case
from support.tier_engine import forget_device, settle, tiered_core

PROMPT = [(11 * i) % VOCAB for i in range(100)]
SAME = 2e-5  # of log probabilities in float32


@dataclass
class Answer:
    """One request's tokens, their log probabilities, and its report."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    report: CacheReport = field(default_factory=CacheReport)

    def differs(self, other: Answer) -> float:
        """Largest difference of log probabilities; infinite where tokens differ."""
        if self.tokens != other.tokens:
            return float("inf")
        return float(np.abs(np.array(self.logprobs) - np.array(other.logprobs)).max())


def ask(core: EngineCore, rid: str, prompt: list[int], max_new: int, exact: bool = False) -> Answer:
    """Run one greedy request to its end."""
    params = SamplingParams(max_new_tokens=max_new, temperature=0.0, ignore_eos=True)
    logprob, cache = LogprobOptions(enabled=True), CacheOptions(exact=exact)
    core.add_request(TokenizedRequest(rid, pack_ids(prompt), params, logprob=logprob, cache=cache))
    out = Answer()
    while core.has_work():
        for delta in core.step():
            out.tokens += delta.token_ids
            out.logprobs += [e.logprob for e in delta.logprobs if e.logprob is not None]
            out.report = delta.report or out.report
    return out


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def gemma(root: Path) -> Case:
    return Case("gemma3", root / "gemma3")


def lossy_core(case: Case, kind: str = "int8", **more: object) -> EngineCore:
    settings: dict[str, object] = {
        "lossy_tiers": kind, "max_total_tokens": 480, "audit_rate": 1.0,
        **more,
    }  # fmt: skip
    if "directory" not in more:
        settings |= {"host_cache_gb": 0.001}
    return tiered_core(case, **settings)  # type: ignore[arg-type]


def test_what_rests_on_lossy_copies_is_said_and_the_exact_get_none_of_it(gemma: Case) -> None:
    cold = ask(gemma.oracle, "cold", PROMPT, 6)
    core = lossy_core(gemma)
    first = ask(core, "a", PROMPT, 6)
    assert (first.differs(cold), first.report.lossy) == (0.0, 0)
    settle(core)
    forget_device(core)
    loaded = ask(core, "b", PROMPT, 6)
    assert (loaded.report.loaded, loaded.report.lossy) == (96, 96)
    assert "approximate: 96" in loaded.report.reason
    assert loaded.differs(cold) > SAME, "nothing was lost: nothing is tested"
    assert core.cache.tree.ledger.total(0, Cause.DEQUANTISE) == 96 // gemma.page_size
    assert not core.cache.tree.ledger.total(0, Cause.LOAD)
    # On the device now: the next one reads it there, and what it computes is marked as well.
    longer = PROMPT + loaded.tokens + [5] * 30
    hit = ask(core, "c", longer, 2)
    assert hit.report.loaded == 0
    assert hit.report.lossy == hit.report.reused == 104
    again = ask(core, "d", longer, 2)
    assert again.report.lossy == again.report.reused == 128
    # Who insists on exact state shares only with those who do.
    for turn, reused in (("e", 0), ("f", 96)):
        exact = ask(core, turn, PROMPT, 6, exact=True)
        assert (exact.report.reused, exact.report.loaded, exact.report.lossy) == (reused, 0, 0)
        assert exact.differs(cold) <= SAME
    settle(core)
    forget_device(core)
    exact = ask(core, "g", PROMPT, 6, exact=True)
    assert (exact.report.matched, exact.report.loaded, exact.report.lossy) == (0, 0, 0)
    assert core.counters.lossy_tokens == 96 + 104 + 128
    core.close()


@pytest.mark.slow
def test_a_directory_is_read_by_servers_of_the_same_kind_only(gemma: Case, tmp_path: Path) -> None:
    cold = ask(gemma.oracle, "cold", PROMPT, 6)
    directory = tmp_path / "c"
    stored: dict[str, int] = {}
    for kind in ("int8", "none", "fp8"):  # each finds nothing of those before
        core = lossy_core(gemma, kind, directory=directory)
        answer = ask(core, "a", PROMPT, 6)
        assert (answer.report.loaded, answer.report.lossy) == (0, 0)
        assert answer.differs(cold) <= SAME
        settle(core)
        core.close()
    for kind in ("int8", "none", "fp8"):
        core = lossy_core(gemma, kind, directory=directory)
        answer = ask(core, "b", PROMPT, 6)
        assert answer.report.loaded == 96
        assert answer.report.lossy == (0 if kind == "none" else 96)
        assert (answer.differs(cold) <= SAME) == (kind == "none")
        core.close()
    with opened(directory, SystemClock()) as disk:
        for handle in disk.all_handles():
            record = disk.read_record(handle)
            assert not isinstance(record, RecordError | OSError)
            layout = record[0].stamp.layout_id
            kind = layout.partition("~")[2] or "none"
            stored[kind] = stored.get(kind, 0) + record[0].payload_bytes
    assert set(stored) == {"int8", "none", "fp8"}
    assert max(stored["int8"], stored["fp8"]) < 0.4 * stored["none"]  # of float32


def test_a_server_without_the_dequantiser_says_so_and_does_not_start(
    gemma: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LossyIO, "operators", staticmethod(lambda _kind: frozenset()))
    with pytest.raises(ValueError, match="the backend lacks dequantise_int8"):
        lossy_core(gemma)
    assert "dequantise_int8" not in ALL_OPERATORS


def test_a_torch_without_the_numbers_is_an_operating_error(
    gemma: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch, "float8_e4m3fn")
    with pytest.raises(InvalidRequestError, match="int8 works with any"):
        lossy_core(gemma, "fp8")


def scenario(case: Case, seed: int) -> Counter[str]:
    """Prompts that share prefixes, one at a time, some of them exact, in pools that keep losing."""
    rng = random.Random(seed)
    core = lossy_core(
        case,
        rng.choice(KINDS),
        max_total_tokens=rng.choice([240, 480]),
        chunked_prefill_size=rng.choice([24, 64]),
        checkpoint_interval=32,
    )
    stems = [[rng.randrange(VOCAB) for _ in range(rng.randrange(40, 80))] for _ in range(2)]
    seen: Counter[str] = Counter()
    for i in range(12):
        stem = rng.choice(stems)
        prompt = stem[: rng.randrange(20, len(stem) + 1)]
        prompt = prompt + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))]
        exact = rng.random() < 0.3
        cold = ask(case.oracle, f"cold{seed}.{i}", prompt, 4)
        answer = ask(core, f"r{i}", prompt, 4, exact)
        stems.append(prompt + cold.tokens)
        if exact:
            assert (answer.report.lossy, answer.report.loaded) == (0, 0)
            seen["exact"] += answer.report.reused
        if answer.report.lossy:
            seen["lossy"] += answer.report.lossy
            seen["different"] += answer.differs(cold) > SAME
        else:
            assert answer.differs(cold) <= SAME, (seed, i, answer.report)
            seen["clean"] += answer.report.reused
        if rng.random() < 0.5:
            settle(core)
        if rng.random() < 0.25:
            forget_device(core)
    core.flush()
    core.audit()
    assert all(pool.num_free == pool.num_blocks for pool in core.cache.pools)
    core.close()
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gemma3", "llama"])
def test_who_used_nothing_lossy_got_what_a_cold_run_gives(arch: str, root: Path) -> None:
    case = Case(arch, root / f"few-{arch}")
    seen = sum((scenario(case, seed) for seed in range(3)), Counter[str]())
    assert min(seen["lossy"], seen["clean"], seen["different"]) > 0, seen


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gemma3", "llama", "deepseek-v4", "deepseek-v32", "qwen3-next"])
def test_who_used_nothing_lossy_got_what_a_cold_run_gives_for_long(arch: str, root: Path) -> None:
    case = Case(arch, root / f"many-{arch}")
    seen = sum((scenario(case, seed) for seed in range(10, 18)), Counter[str]())
    assert min(seen["lossy"], seen["clean"], seen["exact"], seen["different"]) > 0, seen
