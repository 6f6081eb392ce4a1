"""Replay a request trace through the real tree, planner and policies, for one model's groups.

    python benchmarks/replay.py TRACE --schema gemma3-270m --budget 0.1 --policy value
                                      --json FILE --plot FILE

The trace is in the Mooncake format (benchmarks/replaying/trace.py); without a TRACE a small one is
made from a seed. The budget is a share of the bytes that a cache would hold which nothing ever
leaves. Beside the chosen policy the least-recently-used baseline runs, and what no cache of that
budget could exceed is computed (benchmarks/replaying/bound.py). Rates are shares of all prompt
tokens of the trace. docs/replay.md explains the figures and has those of a public trace.

With --host-budget or --disk-budget what is evicted from the device can come back from slower tiers
(benchmarks/replaying/slower.py); the device alone is replayed beside it.

No model runs and no time is simulated: requests come one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from replaying.bound import best_hits, infinite_cache
from replaying.plot import Curve, PlotError, write_plot
from replaying.pools import Pools, infinite_bytes, split
from replaying.sample import write_sample
from replaying.schemas import SCHEMAS
from replaying.slower import SlowTier
from replaying.trace import TraceError, TraceRequest, read_trace
from replaying.world import CHUNK, Outcome, World

from statewise.radix import CacheSchema, Tier, checkpoint_policy
from statewise.radix.policy import EVICTION_POLICIES

WINDOW_SHARE = 0.125  # window tokens kept for each history token
BASELINE = "lru"
SAMPLE = (200, 0)  # conversations, seed


@dataclass(frozen=True)
class Settings:
    """What one replay is made with."""

    schema: CacheSchema
    budget_bytes: int
    window_share: float
    checkpoints: str
    interval: int
    tokens_per_s: float
    slow: Mapping[Tier, SlowTier] = field(default_factory=dict)

    def pools(self, policy: str) -> Pools:
        """Pools of a policy: one that drops all groups together has as many pages of each."""
        whole = EVICTION_POLICIES[policy].whole_leaves
        return split(self.schema, self.budget_bytes, 1.0 if whole else self.window_share, CHUNK)

    def replay(
        self, policy: str, trace: Sequence[TraceRequest], *, tiers: bool = False
    ) -> tuple[Outcome, float]:
        """Run the trace, with slower tiers or without; returns the sums and the seconds it took."""
        placed = checkpoint_policy(self.checkpoints, self.interval)
        pools = self.pools(policy)
        slow = self.slow if tiers else {}
        world = World(self.schema, pools.num_blocks, policy, placed, self.tokens_per_s, slow)
        shown = Progress(f"{policy} with slower tiers" if slow else policy, len(trace))
        started = time.perf_counter()
        outcome = world.replay(trace, shown)
        return outcome, time.perf_counter() - started


class Progress:
    """A line on standard error now and then."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total = what, total
        self._every = max(1, total // 20)

    def __call__(self, done: int) -> None:
        """Called after each request."""
        if done % self._every == 0 or done == self._total:
            share = 100 * done // self._total
            print(f"{self._what}: {done}/{self._total} requests, {share} %", file=sys.stderr)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="See docs/replay.md.", allow_abbrev=False
    )
    add = parser.add_argument
    add("trace", type=Path, nargs="?", help="trace file; none: a small made one")
    add("--schema", choices=SCHEMAS, default="gemma3-270m", help="whose groups")
    add("--budget", type=float, default=0.1, help="share of the endless cache's bytes")
    add("--policy", choices=EVICTION_POLICIES, default="value", help="order of eviction")
    add("--checkpoint-policy", default="branches", help="spaced, branches or ends")
    add("--checkpoint-interval", type=int, default=4096, help="tokens, for spaced")
    add("--window-share", type=float, default=WINDOW_SHARE, help="window tokens a history token")
    add("--tokens-per-s", type=float, default=10_000.0, help="prefill rate the planner assumes")
    add("--host-budget", type=float, default=0.0, help="the same share for host memory")
    add("--disk-budget", type=float, default=0.0, help="the same share for a disk")
    add("--host-gb-per-s", type=float, default=8.0, help="what the planner assumes of host memory")
    add("--disk-gb-per-s", type=float, default=2.0, help="what the planner assumes of the disk")
    add("--requests", type=int, default=0, help="only the first N")
    add("--json", type=Path, help="where figures go")
    add("--plot", type=Path, help="where curves go; .svg needs nothing, else matplotlib")
    args = parser.parse_args(argv)
    if not 0.0 < args.budget <= 1.0:
        parser.error(f"--budget {args.budget} is no share in (0, 1]")
    for name in ("host", "disk"):
        share, rate = getattr(args, f"{name}_budget"), getattr(args, f"{name}_gb_per_s")
        if share < 0.0:
            parser.error(f"--{name}-budget {share} is less than nothing")
        if rate <= 0.0:
            parser.error(f"--{name}-gb-per-s {rate} is no rate")
    return args


def slower_tiers(args: argparse.Namespace, whole_bytes: int) -> dict[Tier, SlowTier]:
    """The slower tiers asked for."""
    schema = SCHEMAS[args.schema]()
    found = {}
    for tier, share, rate in (
        (Tier.HOST, args.host_budget, args.host_gb_per_s),
        (Tier.DISK, args.disk_budget, args.disk_gb_per_s),
    ):
        if share:
            pools = split(schema, int(whole_bytes * share), args.window_share, CHUNK)
            found[tier] = SlowTier(pools.num_blocks, rate * 1e9)
    return found


def load(args: argparse.Namespace) -> list[TraceRequest]:
    """The trace named, or a made one."""
    if args.trace is not None:
        return read_trace(args.trace, args.requests)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sample.jsonl"
        write_sample(path, *SAMPLE)
        return read_trace(path, args.requests)


def measure(
    args: argparse.Namespace, trace: list[TraceRequest]
) -> tuple[dict[str, Any], list[Curve]]:
    """Figures by name, and the curves."""
    schema = SCHEMAS[args.schema]()
    infinite = infinite_cache(trace, schema.page_size)
    whole_bytes = infinite_bytes(schema, infinite)
    settings = Settings(
        schema,
        int(whole_bytes * args.budget),
        args.window_share,
        args.checkpoint_policy,
        args.checkpoint_interval,
        args.tokens_per_s,
        slower_tiers(args, whole_bytes),
    )
    pools = settings.pools(args.policy)
    bound = best_hits(trace, pools.history_blocks)
    outcome, seconds = settings.replay(args.policy, trace, tiers=True)
    device_only = outcome
    if settings.slow:
        device_only, _ = settings.replay(args.policy, trace)
    baseline = device_only
    if args.policy != BASELINE:
        baseline, _ = settings.replay(BASELINE, trace)
    names = [spec.name for spec in schema.groups]
    figures = {
        "schema": args.schema,
        "policy": args.policy,
        "budget": args.budget,
        "budget_bytes": settings.budget_bytes,
        "infinite_bytes": whole_bytes,
        "requests": len(trace),
        "prompt_tokens": outcome.prompt,
        "logical_hit_rate": outcome.rate(outcome.logical),
        "effective_reuse_rate": outcome.rate(outcome.reused),
        "repaired_rate": outcome.rate(outcome.repaired),
        "lru_effective_reuse_rate": baseline.rate(baseline.reused),
        "optimal_effective_reuse_rate": outcome.rate(min(bound[-1], infinite.hit_tokens)),
        "infinite_hit_rate": outcome.rate(infinite.hit_tokens),
        "recomputed_tokens": outcome.recomputed,
        "repaired_tokens": outcome.repaired,
        "levels": dict(outcome.levels),
        "tokens_lost_by_group": dict(outcome.limited_by),
        "bytes_by_group": dict(zip(names, pools.group_bytes, strict=True)),
        "blocks_by_group": dict(zip(names, pools.num_blocks, strict=True)),
        "too_large": outcome.too_large,
        "seconds": seconds,
        "environment": environment(),
    }
    lines = {
        "optimal bound": bound,
        args.policy: device_only.used_so_far,
        "lru": baseline.used_so_far,
    }
    if settings.slow:
        figures["tiers"] = {
            "budgets": {"device": args.budget, "host": args.host_budget, "disk": args.disk_budget},
            "reuse_rate_by_tier": {
                "device": outcome.rate(outcome.reused),
                **{
                    t.name.lower(): outcome.rate(outcome.loaded[t.name.lower()])
                    for t in settings.slow
                },
            },
            "reuse_rate": outcome.rate(outcome.used),
            "device_only_reuse_rate": device_only.rate(device_only.reused),
        }
        lines = {"with slower tiers": outcome.used_so_far, **lines}
    return figures, curves(trace, lines)


def curves(trace: list[TraceRequest], lines: Mapping[str, list[int]]) -> list[Curve]:
    """Cumulative rates of cumulative tokens."""
    prompt, so_far = 0, []
    for request in trace:
        prompt += request.prompt_len
        so_far.append(prompt)
    return [
        Curve(name, [hit / total for hit, total in zip(hits, so_far, strict=True)])
        for name, hits in lines.items()
    ]


def environment() -> dict[str, Any]:
    """Where this ran."""
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load_average": list(os.getloadavg()),
    }


def show(figures: dict[str, Any]) -> None:
    """The figures that matter, on standard output."""
    print(f"{figures['schema']}, budget {figures['budget']}, {figures['requests']} requests")
    for name in (
        "logical_hit_rate",
        "effective_reuse_rate",
        "lru_effective_reuse_rate",
        "optimal_effective_reuse_rate",
        "infinite_hit_rate",
    ):
        print(f"  {name:30} {figures[name]:.4f}")
    for name in ("recomputed_tokens", "repaired_tokens", "seconds"):
        print(f"  {name:30} {figures[name]:,.0f}")
    tiers = figures.get("tiers")
    if tiers is not None:
        print("with slower tiers, effective reuse by tier")
        for name, rate in tiers["reuse_rate_by_tier"].items():
            print(f"  {name:30} {rate:.4f}")
        print(f"  {'all':30} {tiers['reuse_rate']:.4f}")
        print(f"  {'device only':30} {tiers['device_only_reuse_rate']:.4f}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run; 2 for a malformed trace, an impossible budget or a plot that cannot be made."""
    args = parse(argv)
    try:
        trace = load(args)
        figures, lines = measure(args, trace)
        show(figures)
        if args.json is not None:
            args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        if args.plot is not None:
            title = f"{args.schema}, {args.budget:.0%} of the endless cache's bytes"
            write_plot(args.plot, title, lines)
    except (TraceError, PlotError, ValueError, OSError) as error:
        print(f"replay: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
