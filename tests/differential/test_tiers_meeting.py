"""Loading from the end while computing from the front, over real models, a real disk, a slow store.

Against runs without any cache. A delay in front of the disk decides where the two meet.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from statewise.radix import CostModel, Tier
from statewise.radix.cost import TierCost
from statewise.runtime.engine.core import EngineCore
from statewise.runtime.tiers.store import Fetched, Outcome
from support.model_scenarios import VOCAB, Case, collect, request, run
from support.tier_engine import forget_device, settle, tiered_core

PROMPT = [(11 * i * i + 5 * i) % VOCAB for i in range(200)]
ARCHS = [
    "llama", "gemma3",
    *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("deepseek-v4", "qwen3-next")),
]  # fmt: skip


@cache
def case(arch: str, root: str) -> Case:
    return Case(arch, Path(root) / arch)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("models"))


def core_of(one: Case, directory: Path, delay_s: float, *, lost: float = 0.0) -> EngineCore:
    """An engine to which a page seems as dear to load as half of computing it; slow, it is.

    `lost`: share of reads that find nothing.
    """
    core = tiered_core(
        one, directory=directory, max_total_tokens=960, chunked_prefill_size=16,
        max_window_tokens=960,
    )  # fmt: skip
    assert core.cache.tiering is not None
    core.cache.tiering.meetings.batch_bytes = 1
    core.cache.tiering.meeting_share = 1.0
    page = one.page_size
    groups = [g for g in core.schema.groups if g.kind.is_history]
    rate = (4 if page == 16 else 2) * sum(g.block_bytes(page) for g in groups) / page * 10.0
    model = CostModel.uniform(core.schema.num_layers, 10.0, chunk=16)
    core.use_cost(replace(model, tiers=dict.fromkeys(model.tiers, TierCost(rate))))
    store, rng = core.cache.tiering.tiers.stores[Tier.DISK], random.Random(0)
    real = store.fetch

    def fetch(handles: Sequence[int]) -> list[Fetched]:
        time.sleep(delay_s)
        if rng.random() < lost:
            return [Fetched(handle, Outcome.MISSING) for handle in handles]
        return real(handles)

    store.fetch = fetch  # type: ignore[method-assign]
    return core


def write(one: Case, directory: Path) -> None:
    core = tiered_core(one, directory=directory, max_total_tokens=960, max_window_tokens=960)
    assert run(core, {"a": (PROMPT, 6)})["a"] == one.expected(PROMPT, 6)
    settle(core)
    core.close()


def outcomes(core: EngineCore) -> dict[str, int]:
    shown = core.stats()["labelled"]["meetings"]["values"]
    return {labels[0]: count for labels, count in shown}


def end(core: EngineCore) -> None:
    settle(core)
    core.flush()
    core.audit()
    assert all(pool.num_free == pool.num_blocks for pool in core.cache.pools)
    core.close()


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_both_at_once_give_a_cold_runs_output(arch: str, root: str, tmp_path: Path) -> None:
    one = case(arch, root)
    write(one, tmp_path / "c")
    begun: set[str] = set()
    for delay_s in (0.0, 0.003, 0.02):
        core = core_of(one, tmp_path / "c", delay_s)
        assert run(core, {"b": (PROMPT, 6)})["b"] == one.expected(PROMPT, 6)
        report = outcomes(core)
        begun.update(report)
        if "met" in report:
            assert core.counters.loaded_tokens + core.counters.recomputed_tokens == 192
            assert core.counters.effective_reuse_tokens == 0
        end(core)
    assert "met" in begun, begun


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_reads_that_fail_cost_no_output(arch: str, root: str, tmp_path: Path) -> None:
    one = case(arch, root)
    for lost in (1.0, 0.2):
        directory = tmp_path / str(lost)
        write(one, directory)
        core = core_of(one, directory, 0.002, lost=lost)
        assert run(core, {"b": (PROMPT, 6)})["b"] == one.expected(PROMPT, 6)
        assert outcomes(core), "it was tried"
        end(core)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gemma3", "qwen3-next"])
def test_aborts_and_others_beside_it(arch: str, root: str, tmp_path: Path) -> None:
    one, rng = case(arch, root), random.Random(1)
    write(one, tmp_path / "c")
    core = core_of(one, tmp_path / "c", 0.003)
    out: dict[str, list[int]] = {}
    done: set[str] = set()
    wanted: dict[str, list[int]] = {}
    for i in range(6):
        prompt = [*PROMPT[: rng.choice([200, 180, 120])], *range(i)]
        wanted[f"r{i}"] = one.expected(prompt, 4)
        core.add_request(request(f"r{i}", prompt, 4))
        for _ in range(rng.randrange(1, 9)):
            collect(core.step(), out, done)
        if i % 3 == 0 and f"r{i}" not in done:
            core.abort(f"r{i}")
        if i % 2:
            settle(core)
            forget_device(core)
    while core.has_work():
        collect(core.step(), out, done)
    for rid, tokens in wanted.items():
        got = out.get(rid, [])
        assert got == tokens[: len(got)], rid
        assert rid in ("r0", "r3") or got == tokens, rid
    end(core)
