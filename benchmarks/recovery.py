"""What each level of recovery costs: time to the first token of one long cached prompt, in one run.

The prompt is served once. Then, again and again, some of its cached state is lost on purpose and it
is served once more: nothing lost (direct), the last windows behind a near checkpoint or all windows
(repair), one early layer of the whole history (rebuild), everything (recompute). Every answer is
compared with the first. The plans are those the engine makes by what it measured at start.

Trust the order and the ratios, not the times: others share this machine.

    usage: python benchmarks/recovery.py [--model NAME] [--tokens N] [--repeats N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from statewise.radix import GroupKind, Match, Namespace, TokenKey
from statewise.runtime.clock import SystemClock
from statewise.runtime.config import ServerArgs
from statewise.runtime.engine.build import build_runtime
from statewise.runtime.messages import CacheOptions, CacheReport, TokenizedRequest, pack_ids
from statewise.runtime.sampling_params import SamplingParams

NEAR_TOKENS = 512  # from the checkpoint to the end, in the near repair
FIRST_ID, LAST_ID = 1000, 40_000
ORDER = ("direct", "repair near", "rebuild", "recompute")


@dataclass(frozen=True)
class Run:
    """One serving of the prompt."""

    ttft_s: float
    level: str
    limiting_group: str
    replayed_tokens: int
    recomputed_tokens: int
    is_exact: bool


class Bench:
    """One engine and one prompt whose state is damaged and served again."""

    def __init__(self, model: str, num_tokens: int, page_size: int = 16) -> None:
        self.page_size = page_size
        args = ServerArgs(
            model_path=model,
            skip_tokenizer_init=True,
            page_size=page_size,
            max_total_tokens=2 * num_tokens + 1024,
            checkpoint_interval=1 << 20,  # only the checkpoints that are asked for
        )
        self.clock = SystemClock()
        built = build_runtime(args)
        self.core = built.core(self.clock)
        self.schema = built.schema
        rng = random.Random(0)
        high = min(LAST_ID, built.model.vocab_size - 1)
        low = min(FIRST_ID, high // 2)
        self.prompt = [rng.randrange(low, high) for _ in range(num_tokens + 1)]
        self.num_pages = num_tokens // page_size
        self.near = (num_tokens - NEAR_TOKENS) // page_size
        self._num_served = 0
        self.expected = -1

    def serve(self, num_tokens: int) -> tuple[float, int, CacheReport]:
        """(time to the first token, the token, report) of a prefix of the prompt."""
        self._num_served += 1
        params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
        ids = pack_ids(self.prompt[:num_tokens])
        started = self.clock.monotonic()
        self.core.add_request(TokenizedRequest(f"r{self._num_served}", ids, params))
        token, first, report = -1, 0.0, CacheReport()
        while self.core.has_work():
            for delta in self.core.step():
                if delta.token_ids:
                    first, token = self.clock.monotonic() - started, delta.token_ids[0]
                report = delta.report or report
        return first, token, report

    def prepare(self) -> None:
        """Put the prompt into the cache, with a checkpoint a little before its end."""
        self.core.flush()
        self.serve(self.near * self.page_size)
        _, self.expected, _ = self.serve(len(self.prompt))

    def run(self, damage: Callable[[Bench], None]) -> Run:
        """Damage, then serve."""
        damage(self)
        replayed = self._planned_replays()
        seconds, token, report = self.serve(len(self.prompt))
        return Run(
            seconds,
            report.level,
            report.limiting_group,
            replayed,
            report.recomputed + report.computed - 1,
            token == self.expected,
        )

    def _planned_replays(self) -> int:
        ids = np.array(self.prompt, dtype=np.int32)
        return self.core.cache.lookup(CacheOptions(), ids, len(ids) - 1).plan.replayed_tokens

    # ---------------------------------------------------------------- damage

    def match(self) -> Match:
        """What the tree has of the prompt."""
        ids = np.array(self.prompt[:-1], dtype=np.int32)
        return self.core.cache.tree.match(Namespace(), TokenKey(ids))

    def groups(self, is_window: bool) -> list[int]:
        """Indices of the window groups, or of the full ones."""
        kind = GroupKind.WINDOW if is_window else GroupKind.FULL
        return [g for g, spec in enumerate(self.schema.groups) if spec.kind is kind]

    def lose_windows(self, first_page: int) -> None:
        """Drop window pages from `first_page` on."""
        for group in self.groups(is_window=True):
            freed = self.core.cache.tree.drop(
                self.match(), group, range(first_page, self.num_pages)
            )
            for pool, blocks in zip(self.core.cache.pools, freed.blocks, strict=True):
                pool.free(blocks)

    def spoil_first_layer(self) -> None:
        """Mark the first full-attention layer of every page as invalid."""
        for group in self.groups(is_window=False)[:1]:
            self.core.cache.tree.mark_invalid(
                self.match(), group, dict.fromkeys(range(self.num_pages), 1)
            )

    def lose_everything(self) -> None:
        """Empty the cache."""
        self.core.flush()


def scenarios(bench: Bench) -> dict[str, Callable[[Bench], None]]:
    """Name -> what is lost. All but the last two leave the cache as they found it, once served."""
    found: dict[str, Callable[[Bench], None]] = {"direct": lambda b: None}
    if bench.groups(is_window=True):
        found["repair near"] = lambda b: b.lose_windows(b.near)
    found["rebuild"] = Bench.spoil_first_layer
    if bench.groups(is_window=True):
        found["repair all"] = lambda b: b.lose_windows(0)
    found["recompute"] = Bench.lose_everything
    return found


def measure(bench: Bench, repeats: int) -> dict[str, list[Run]]:
    """Every scenario, in turn, so that the machine's moods hit all alike."""
    runs: dict[str, list[Run]] = {}
    for repeat in range(repeats):
        bench.prepare()
        for name, damage in scenarios(bench).items():
            runs.setdefault(name, []).append(bench.run(damage))
            print(f"  {repeat + 1}/{repeats} {name}: {runs[name][-1].ttft_s:.3f} s", flush=True)
    return runs


def table(runs: dict[str, list[Run]]) -> str:
    """Medians as text."""
    head = f"{'lost':<14}{'level':<11}{'limited by':<12}{'replayed':>9}{'computed':>9}{'TTFT s':>9}"
    cold = statistics.median(run.ttft_s for run in runs["recompute"])
    lines = [head + f"{'of cold':>9}"]
    for name, of_name in runs.items():
        one, median = of_name[-1], statistics.median(run.ttft_s for run in of_name)
        lines.append(
            f"{name:<14}{one.level:<11}{one.limiting_group or '-':<12}{one.replayed_tokens:>9}"
            f"{one.recomputed_tokens:>9}{median:>9.3f}{median / cold:>9.3f}"
        )
    return "\n".join(lines)


def is_ordered(runs: dict[str, list[Run]]) -> bool:
    """Whether the medians of `ORDER` ascend."""
    medians = [
        statistics.median(run.ttft_s for run in runs[name]) for name in ORDER if name in runs
    ]
    return medians == sorted(medians)


def main() -> int:
    """Measure and print; exit status 1 where an answer was not that of the first serving."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", default="gemma3-270m")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file to write the results to")
    args = parser.parse_args()
    load_before = os.getloadavg()
    bench = Bench(args.model, args.tokens)
    runs = measure(bench, args.repeats)
    result: dict[str, Any] = {
        "model": args.model,
        "tokens": args.tokens,
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "load_average": {"before": load_before, "after": os.getloadavg()},
        "cost_model": bench.core.stats()["cost_model"],
        "ordered": is_ordered(runs),
        "runs": {name: [asdict(run) for run in of_name] for name, of_name in runs.items()},
    }
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{args.model}, {args.tokens} cached tokens, load {load_before[0]:.1f}")
    print(table(runs))
    print("direct < repair < rebuild < recompute:", "yes" if result["ordered"] else "no")
    return 0 if all(run.is_exact for of_name in runs.values() for run in of_name) else 1


if __name__ == "__main__":
    raise SystemExit(main())
