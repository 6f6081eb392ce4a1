"""How long the planner takes for damage of every pattern along one long prompt.

A tree holds a prompt of full attention in some layers, other history in more, and windows in the
rest (or recurrent state). Pages are then lost on purpose, in every pattern that should be hard:
scattered, every other one, half of them; all of a page or a single layer of it; the same pages in
all groups or others in each; with and without the windows; copies on slower tiers here and there.

Times are of the process, the best of some runs. No model, no memory for blocks.

    usage: python benchmarks/planning.py [--tokens 131072] [--page 64] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from statewise.radix import (
    Budget,
    CacheSchema,
    CostModel,
    GroupKind,
    Match,
    Namespace,
    RadixTree,
    RecoveryPlan,
    StateGroupSpec,
    Tier,
    TokenKey,
    Written,
    plan,
)
from statewise.radix.overlay import Stored, overlay
from statewise.radix.pairs import pairs_of

LAYERS, WINDOW = 30, 512
TOKENS_PER_S, PAIR_S, CHUNK = 20_000.0, 2e-9, 512
SCATTERED = 222 / 2048  # of all pages
REPEATS = 5


def group(name: str, kind: GroupKind, layers: range | list[int], **more: Any) -> StateGroupSpec:
    """A state group; sizes do not matter here."""
    return StateGroupSpec(name, kind, tuple(layers), "bench", "v1", entry_bytes=1024, **more)


def schemas(page: int) -> dict[str, CacheSchema]:
    """Three groups each."""
    narrow = [layer for layer in range(LAYERS) if layer % 6 not in (0, 5)]
    windows = group("window", GroupKind.WINDOW, narrow, window=WINDOW)
    full = group("full", GroupKind.FULL, range(5, LAYERS, 6))
    more = group("more", GroupKind.FULL, range(0, LAYERS, 6))
    entries = group("entries", GroupKind.COMPRESSED, range(2, LAYERS), ratio=4)
    index = group(
        "index", GroupKind.INDEX, range(2, LAYERS), ratio=4, depends_on="entries", top_k=512
    )
    every = group("window", GroupKind.WINDOW, range(LAYERS), window=WINDOW // 4)
    return {
        "full, window, full": CacheSchema(page, LAYERS, (full, windows, more), "bench"),
        "compressed, window, index": CacheSchema(page, LAYERS, (entries, every, index), "bench"),
    }


@dataclass
class Bench:
    """One prompt in a tree."""

    schema: CacheSchema
    num_pages: int
    rng: random.Random

    def fresh(self) -> RadixTree:
        """A tree that has all of it."""
        tree = RadixTree(self.schema)
        key = self.key()
        lease = tree.lease(tree.match(Namespace(), key), 0)
        blocks = np.arange(self.num_pages, dtype=np.int32)
        tables = [blocks] * self.schema.num_groups
        written = Written(tree.stamps, 1)
        tree.publish(lease, key, self.num_pages, tables, written, len(key))
        tree.release(lease)
        return tree

    def key(self) -> TokenKey:
        """The prompt."""
        return TokenKey(np.arange(self.num_pages * self.schema.page_size, dtype=np.int32))

    def patterns(self) -> dict[str, list[int]]:
        """Pages that are hit."""
        every = range(self.num_pages)
        few = round(self.num_pages * SCATTERED)
        return {
            f"{few} pages": sorted(self.rng.sample(every, few)),
            "every other": list(range(0, self.num_pages, 2)),
            "half": sorted(self.rng.sample(every, self.num_pages // 2)),
        }

    def damages(self) -> Iterator[tuple[str, Match]]:
        """Everything that is tried."""
        for pattern, pages in self.patterns().items():
            yield f"{pattern}: a layer", self.hit({0: pages}, layers=1)
            yield f"{pattern}: a layer, no windows", self.hit({0: pages}, layers=1, windows=False)
            yield f"{pattern}: of one group", self.hit({0: pages})
            yield f"{pattern}: of all groups", self.hit(dict.fromkeys(range(3), pages))
            own = {g: self.rng.sample(range(self.num_pages), len(pages)) for g in range(3)}
            yield f"{pattern}: each group its own", self.hit(own)
            yield f"{pattern}: on tiers", self.on_tiers(self.hit({0: pages}))
        yield "windows", self.hit({}, windows=False)
        yield "all on tiers", self.on_tiers(self.hit({}), 1.0)

    def hit(self, pages: dict[int, list[int]], *, layers: int = 0, windows: bool = True) -> Match:
        """A match without these pages of these groups, or with marked layers."""
        tree = self.fresh()
        match = tree.match(Namespace(), self.key())
        for g, lost in pages.items():
            if layers:
                tree.mark_invalid(match, g, dict.fromkeys(lost, layers))
            else:
                tree.drop(match, g, lost)
        if not windows:
            tree.drop(match, 1, range(self.num_pages))
        return tree.match(Namespace(), self.key())

    def on_tiers(self, match: Match, share: float = 0.5) -> Match:
        """The same with copies of some pages on slower tiers instead."""
        tiers = [Tier.HOST, Tier.DISK]
        pages = {
            g: {
                page: (self.rng.choice(tiers), page)
                for page in range(self.num_pages)
                if self.rng.random() < share
            }
            for g in range(self.schema.num_groups)
        }
        return overlay(match, Stored(self.num_pages, pages))


def timed(run: Callable[[], RecoveryPlan]) -> tuple[float, RecoveryPlan]:
    """Least seconds of the process, and the plan."""
    best, made = float("inf"), run()
    for _ in range(REPEATS):
        began = time.process_time()
        made = run()
        best = min(best, time.process_time() - began)
    return best, made


def measure(schema: CacheSchema, num_tokens: int) -> Iterator[dict[str, Any]]:
    """One row for every damage."""
    bench = Bench(schema, num_tokens // schema.page_size, random.Random(0))
    more: dict[str, Any] = {"chunk": CHUNK, "pair_s": PAIR_S, "pairs": pairs_of(schema)}
    cost = CostModel.uniform(LAYERS, TOKENS_PER_S, **more)
    budget = Budget(num_tokens + 100)
    cold_s = cost.prefill_s(0, num_tokens + 100)
    for name, match in bench.damages():

        def run(known: Match = match) -> RecoveryPlan:
            return plan(known, (), schema, cost, budget)

        seconds, made = timed(run)
        yield {
            "damage": name, "ms": 1e3 * seconds, "level": made.level.value,
            "replays": len(made.replays), "of_cold": made.total_s / cold_s,
        }  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--page", type=int, default=64)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    report: dict[str, Any] = {
        "tokens": args.tokens, "page": args.page, "cores": os.cpu_count(),
        "load_average": os.getloadavg(), "rows": {},
    }  # fmt: skip
    for name, schema in schemas(args.page).items():
        print(f"\n{name}, {args.tokens} tokens\n{'damage':<34}{'ms':>7}{'of cold':>9}  plan")
        rows = report["rows"][name] = []
        for row in measure(schema, args.tokens):
            rows.append(row)
            what = f"{row['level']}, {row['replays']} replays"
            print(f"{row['damage']:<34}{row['ms']:>7.1f}{row['of_cold']:>9.3f}  {what}", flush=True)
    every = sorted(row["ms"] for rows in report["rows"].values() for row in rows)
    report |= {"median_ms": every[len(every) // 2], "worst_ms": every[-1]}
    print(f"\nmedian {report['median_ms']:.1f} ms, worst {report['worst_ms']:.1f} ms")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
