"""What a seed decides before anything runs: model, sizes, policies, and which operations exist.

Swarm testing: each kind of operation and fault is absent in half of the seeds, so that what one
of them would hide shows in the others.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from statewise.radix.lossy import is_lossy, lossy_schema
from statewise.radix.schema import CacheSchema
from statewise.runtime.memory.sizing import window_blocks_per_request
from support.sim_schema import make_schema

# Every model shape, equally often.
SHAPES = (
    "FF", "FWF", "WFW", "WW", "FWV", "WWWF", "FWfw", "SFS", "KFK", "FK",
    "C", "WCH", "CC", "HFC", "WHC", "FRR", "RF", "RWF", "CR", "FS",
)  # fmt: skip

LONGEST_PROMPT = 90
LOSSY_SHARE = 0.2  # of the worlds with slower tiers

OPERATIONS = (
    "abort",
    "flush",
    "stop_matched",
    "salts",
    "bad_requests",
    "long_outputs",
    "marks",
    "priorities",
    "bursts",
    "clock_jumps",
    "evict_at_seams",
    "drop_at_seams",
    "failing_allocations",
    "worker_death",
    "weight_updates",
    "poison_free",
    "bit_flips",
    "questions",
)


@dataclass(frozen=True)
class TierKnobs:
    """Slower tiers of a world: pages per group in each (0: no such tier), and how fast they are."""

    host_pages: int
    disk_pages: int
    bytes_per_s: float
    max_queued_bytes: int
    steps_between: int  # of I/O, at most, between two steps of the engine
    faults: bool
    remote_pages: int = 0  # of a store that must be asked what it has
    tokens_per_s: float = 0.0  # of computing, as the planner is made to believe; 0: as it learns
    batch_bytes: int = 0  # of loads from the end; 0: as many as there are
    step_s: float = 1e-3  # of I/O
    settles: bool = False  # what is due is copied out before the device loses it
    lossy: bool = False  # they keep half of each word; some requests insist on exact state


@dataclass(frozen=True)
class Knobs:
    """One seed's world."""

    schema: CacheSchema
    num_blocks: tuple[int, ...]
    settings: dict[str, object]  # of the server
    operations: frozenset[str]
    num_requests: int
    audit_every: int  # steps
    hopeful: bool  # admit without reserving output: preemption
    tiers: TierKnobs | None  # slower tiers


def draw_knobs(rng: random.Random) -> Knobs:
    """Choose everything from `rng`."""
    page = rng.choice([4, 8]) if rng.random() < 0.7 else rng.choice([1, 2, 16])
    shape = rng.choice(SHAPES)
    ratios = [r for r in (1, 2, 4, 8) if page % r == 0]
    schema = make_schema(
        shape,
        page,
        rng.choice([1, 3, 4, 7, 12, 20]),
        ratio=rng.choice(ratios),
        long_ratio=rng.choice(ratios),
        sinks=rng.choice([1, 2, 5]),
    )
    operations = frozenset(name for name in OPERATIONS if rng.random() < 0.5)
    settings: dict[str, object] = {
        "model_path": "digest",
        "page_size": page,
        "chunked_prefill_size": rng.choice([page, 2 * page, 16, 64]),
        "max_running_requests": rng.choice([1, 3, 8]),
        "schedule_policy": rng.choice(["lpm", "fcfs"]),
        "max_wait_s": rng.choice([0.05, 1.0]),
        "checkpoint_interval": rng.choice([1, 8, 16, 64]),
        "disable_radix_cache": rng.random() < 0.05,
        "deterministic": rng.random() < 0.15,
        "watermark": rng.choice([0.0, 0.02, 0.2]),
        "audit_rate": 1.0 if "bit_flips" in operations or rng.random() < 0.1 else 0.0,
        "eviction_policy": rng.choice(["value", "value", "recency", "lru"]),
        "checkpoint_policy": rng.choice(["spaced", "spaced", "branches", "ends"]),
    }
    knobs = Knobs(
        schema=schema,
        num_blocks=_draw_pools(rng, schema, int(str(settings["chunked_prefill_size"]))),
        settings=settings,
        operations=operations,
        num_requests=rng.randrange(4, 14),
        audit_every=rng.choice([1, 7, 25]),
        hopeful=rng.random() < 0.4,
        tiers=_draw_tiers(rng) if rng.random() < 0.5 else None,
    )
    return _maybe_lossy(rng, knobs)


def _maybe_lossy(rng: random.Random, knobs: Knobs) -> Knobs:
    """Some worlds with tiers keep lossy copies there. Draws nothing: the other worlds stay."""
    apart = random.Random(f"lossy copies 0 {rng.getstate()}")
    if knobs.tiers is None or apart.random() >= LOSSY_SHARE:
        return knobs
    tiers = replace(knobs.tiers, lossy=True)
    if apart.random() < 0.7:  # loading is worth it, and what is evicted has a copy
        tiers = replace(tiers, bytes_per_s=1e9, tokens_per_s=50.0, settles=True)
    return replace(knobs, tiers=tiers, schema=lossy_schema(knobs.schema, "int8"))


def _draw_tiers(rng: random.Random) -> TierKnobs:
    """From a host tier of a few pages to both tiers with room for everything."""
    host, disk = rng.choice([(4, 0), (200, 0), (0, 200), (6, 200), (40, 40)])
    return TierKnobs(
        host,
        disk,
        rng.choice([1e4, 1e9, 1e9]),
        rng.choice([512, 1 << 20]),
        rng.choice([1, 4, 40]),
        rng.random() < 0.5,
    )


def meeting_knobs(rng: random.Random) -> Knobs:
    """A world whose tiers are about as quick as computing: both are done at once."""
    knobs = draw_knobs(rng)
    while knobs.schema.page_size > 8 or not any(g.kind.is_history for g in knobs.schema.groups):
        knobs = draw_knobs(rng)
    page = knobs.schema.page_size
    history = [spec.block_bytes(page) for spec in knobs.schema.groups if spec.kind.is_history]
    tokens_per_s = 100.0
    rate = max(sum(history), 8) / page * tokens_per_s * rng.choice([0.3, 1.0, 1.0, 3.0])
    host, disk, remote = rng.choice([(200, 0, 0), (0, 200, 0), (0, 0, 200), (6, 0, 200)])
    tiers = TierKnobs(
        host, disk, rate, 1 << 20, rng.choice([2, 4, 8]), rng.random() < 0.5,
        remote, tokens_per_s, rng.choice([1, 1, 2 * sum(history) + 1, 1 << 20]),
        rng.choice([1, 4]) * sum(history) / rate, True,
    )  # fmt: skip
    settings = {
        **knobs.settings,
        "disable_radix_cache": False,
        "chunked_prefill_size": rng.choice([page, page, 2 * page, 16]),
        "max_running_requests": rng.choice([1, 3, 8]),
        "checkpoint_interval": rng.choice([1, 8, 16]),
    }
    chunk = int(str(settings["chunked_prefill_size"]))
    pools = knobs.num_blocks if rng.random() < 0.7 else _draw_pools(rng, knobs.schema, chunk)
    count = rng.randrange(8, 20)
    tiers = replace(tiers, lossy=is_lossy(knobs.schema))
    return replace(knobs, tiers=tiers, settings=settings, num_requests=count, num_blocks=pools)


def _draw_pools(rng: random.Random, schema: CacheSchema, chunk: int) -> tuple[int, ...]:
    """Blocks per group: from barely enough for one request to plenty."""
    if rng.random() < 0.25:
        return _least_pools(rng, schema, chunk)
    pages = -(-120 // schema.page_size) + 2
    out = []
    for spec in schema.groups:
        if spec.kind.is_snapshot:
            out.append(rng.choice([2, 4, 12, 40]))
        else:
            out.append(pages * rng.choice([1, 1, 2, 4]) + rng.randrange(8))
    return tuple(out)


def _least_pools(rng: random.Random, schema: CacheSchema, chunk: int) -> tuple[int, ...]:
    """As small as a start allows, or a little more: whatever is held for nothing is missed."""
    page = schema.page_size
    out = []
    for spec in schema.groups:
        if spec.kind.is_snapshot:
            least, more = 1, rng.choice([0, 1, 2, 4])
        elif spec.kind.is_window:
            least = window_blocks_per_request(spec, page) + -(-chunk // page) + 1
            more = rng.choice([0, 0, 1, 3, 8])
        else:
            least = -(-LONGEST_PROMPT // page) + 2
            more = rng.choice([0, 0, 0, 1, 3, 10])
        out.append(least + more)
    return tuple(out)
