"""Engines over tiny models with slower tiers, in which loading is always worth it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from statewise.radix import CostModel
from statewise.runtime.engine.core import EngineCore
from support.model_scenarios import VOCAB, Case, collect, request

SLOW_TOKENS_PER_S = 10.0  # of computing, as the planner is made to believe


def tiered_core(case: Case, *, directory: Path | None = None, **args: object) -> EngineCore:
    """An engine with a host tier, or with a disk tier in `directory`, or with both."""
    settings: dict[str, object] = {"calibrate": False, "audit": True, **args}
    if directory is not None:
        settings |= {"disk_cache_dir": str(directory), "disk_cache_gb": 0.05}
    core = case.core(**settings)
    model = core.cache.cost.model
    slow = CostModel.uniform(model.num_layers, SLOW_TOKENS_PER_S, chunk=model.chunk)
    core.use_cost(replace(slow, tiers=model.tiers))
    return core


def settle(core: EngineCore) -> None:
    """Let every copy end that is queued or will be: what an idle server does."""
    tiering = core.cache.tiering
    assert tiering is not None
    for _ in range(1000):
        core.idle()
        if not tiering.is_busy:
            return
        tiering.tiers.engine.drain(5.0)
    raise AssertionError("copies never end")


def forget_device(core: EngineCore) -> None:
    """Evict whatever no lease protects; slower tiers keep what they have."""
    core.cache.free_all()


def tier_scenario(case: Case, seed: int, directory: Path) -> dict[str, int]:
    """Shared prefixes in tiny pools whose state keeps leaving the device; tokens loaded by tier."""
    rng = random.Random(seed)
    unit = case.page_size // 8
    tiers = rng.choice(["host", "disk", "both", "both"])
    core = tiered_core(
        case,
        directory=directory if tiers != "host" else None,
        host_cache_gb=0.0 if tiers == "disk" else rng.choice([0.001, 0.01]),
        max_total_tokens=rng.choice([160, 240, 480]),
        max_window_tokens=unit * rng.choice([104, 160, 480]),
        chunked_prefill_size=rng.choice([8, 24, 64]),
        max_running_requests=rng.choice([1, 3, 6]),
        checkpoint_interval=rng.choice([0, 32]),
    )
    stems = [[rng.randrange(VOCAB) for _ in range(rng.randrange(30, 80))] for _ in range(2)]
    wanted: dict[str, list[int]] = {}
    out: dict[str, list[int]] = {}
    done: set[str] = set()
    aborted: set[str] = set()
    for i in range(10):
        stem = rng.choice(stems)
        prompt = stem[: rng.randrange(1, len(stem) + 1)]
        prompt = prompt + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))]
        max_new = rng.choice([1, 4, 20])
        rid = f"r{i}"
        wanted[rid] = case.expected(prompt, max_new)
        stems.append(prompt + wanted[rid])
        core.add_request(request(rid, prompt, max_new))
        for _ in range(rng.randrange(0, 30)):
            collect(core.step(), out, done)
        if rng.random() < 0.1 and rid not in done:
            core.abort(rid)
            aborted.add(rid)
        if rng.random() < 0.5:
            settle(core)
        if rng.random() < 0.5:
            forget_device(core)
    while core.has_work():
        collect(core.step(), out, done)
    assert done == set(wanted)
    for rid, tokens in wanted.items():
        got = out.get(rid, [])
        assert got == (tokens[: len(got)] if rid in aborted else tokens), (seed, rid)
    loaded = core.counters.loaded_tokens
    core.flush()
    core.audit()
    assert all(pool.num_free == pool.num_blocks for pool in core.cache.pools)
    core.close()
    return {tiers: loaded}
