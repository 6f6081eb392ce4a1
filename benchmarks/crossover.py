"""Where loading a prefix from a slow disk begins to beat computing it: measured, and as planned.

The cache's directory is read as from a slow medium: every read of its files really happens, and
then waits as a medium of the given bandwidth and latency would make it (the only thing made up
here). Prompts of several lengths are stored there. Each is then served again and again, in turn,
once by loading it and once by computing it, whatever the planner would do: two curves, and the
length at which they cross. Beside them the planner's own two curves, under the rates that it
measured at each start (one before each round) and learned from the last round's very runs, and what
it would choose at every length.

All or nothing: computing from the front while the rest is loaded is left out, since with it there
is no crossover. `--meet` measures it as a third way, where the planner finds one. Greedy; a first
token that differs ends the run.

    usage: python benchmarks/crossover.py [--model NAME] [--lengths 512,1024,2048,4096]
               [--mb-per-s N] [--rounds 3] [--meet] [--json FILE]

Without --mb-per-s the medium is as fast as makes the curves cross near the middle length.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from medium import MB, Medium
from numpy.typing import NDArray

import statewise.runtime.cache.tiering as tiering
from statewise.radix import Budget, CacheSchema, CostModel, Match, RecoveryPlan, Tier, Verdict, plan
from statewise.runtime.clock import SystemClock
from statewise.runtime.config import checked
from statewise.runtime.engine.build import BuiltRuntime, build_runtime
from statewise.runtime.engine.core import EngineCore
from statewise.runtime.messages import CacheOptions, TokenizedRequest, pack_ids
from statewise.runtime.sampling_params import SamplingParams

WAIT_S = 0.001  # between two looks at a load
NAMES = {"load": "loading_s", "compute": "computing_s", "meet": "meeting_s"}
Int32 = NDArray[np.int32]
Float = NDArray[np.float64]


@dataclass
class Chooser:
    """Stands before the planner of loads: its own choice, always to load, never, or to meet."""

    mode: str = "own"
    made: RecoveryPlan | None = None  # the plan with loads, as the planner prices it
    both: RecoveryPlan | None = None  # the one that loads and computes at once

    def turn(self, mode: str) -> None:
        """Choose so from now on."""
        self.mode, self.both = mode, None

    def __call__(
        self,
        match: Match,
        verdicts: Iterable[Verdict],
        schema: CacheSchema,
        cost: CostModel,
        budget: Budget,
    ) -> RecoveryPlan:
        """Plan as `statewise.radix.plan`."""
        if self.mode == "meet" and budget.front:
            self.both = plan(match, verdicts, schema, cost, budget)
            return replace(self.both, total_s=0.0) if self.both.concurrent else self.both
        asked = replace(budget, front=False, load=self.mode != "compute")
        if self.mode != "load":
            return plan(match, verdicts, schema, cost, asked)
        # Computing is priced out of question, the plan's price is then the true one.
        slow = tuple(tuple(rate * 1e-6 for rate in row) for row in cost.tokens_per_s)
        made = plan(match, verdicts, schema, replace(cost, tokens_per_s=slow), asked)
        loads: dict[Tier, float] = {
            tier: float(
                sum(
                    load.num_pages * schema.groups[load.group].block_bytes(schema.page_size)
                    for load in made.loads
                    if load.tier is tier
                )
            )
            for tier in Tier
            if tier is not Tier.DEVICE
        }
        seconds = cost.load_s(loads) + cost.prefill_s(made.position, budget.prompt_len)
        self.made = replace(made, total_s=seconds)
        return replace(made, total_s=0.0)


@dataclass
class Length:
    """What was seen at one length."""

    tokens: int
    prompt: list[int]
    token: int = -1
    seconds: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in NAMES})
    num_met: float = 0.0
    stored_bytes: float = 0.0


class Bench:
    """One engine over one directory."""

    def __init__(self, model: str, directory: Path, lengths: list[int]) -> None:
        self.medium, self.chooser = Medium(), Chooser()
        self.medium.mount()
        tiering.plan = self.chooser  # type: ignore[attr-defined]
        tiering.MIN_PATIENCE_S = float("inf")  # loads that computing would beat end as well
        self.settings = {
            "model_path": model, "skip_tokenizer_init": True, "disk_cache_dir": str(directory),
            "disk_cache_gb": 4.0, "max_total_tokens": 2 * max(lengths) + 4096,
        }  # fmt: skip
        self.core: EngineCore = self._built().core(SystemClock())
        rng = np.random.default_rng(0)
        self.lengths = [Length(n, rng.integers(5, 30_000, n).tolist()) for n in lengths]
        self._num = 0

    def _built(self) -> BuiltRuntime:
        return build_runtime(checked(self.settings))

    def restart(self) -> None:
        """Close and start again over the same directory: rates are measured anew."""
        self.core.close(10.0)
        self.core = self._built().core(SystemClock())

    def serve(self, length: Length, mode: str) -> float:
        """Seconds to the first token, the device being empty."""
        self.chooser.turn(mode)
        self.core.cache.free_all()
        self._num += 1
        met = self._num_met()
        params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
        began = time.perf_counter()
        self.core.add_request(
            TokenizedRequest(f"r{self._num}", pack_ids(length.prompt), params, stream=True)
        )
        while self.core.has_work():
            deltas = self.core.step()
            if self.core.is_stalled:
                time.sleep(WAIT_S)
            for delta in deltas:
                if delta.finish is not None:
                    seconds = time.perf_counter() - began
                    assert length.token in (-1, delta.token_ids[0]), "first tokens differ"
                    assert delta.report is not None
                    assert mode == "meet" or bool(delta.report.loaded) == (mode == "load")
                    length.token = delta.token_ids[0]
                    length.num_met += self._num_met() - met
                    self._settle()
                    return seconds
        raise AssertionError("it never ended")

    def _num_met(self) -> float:
        """Meetings that came about so far."""
        assert self.core.cache.tiering is not None
        return self.core.cache.tiering.meetings.meetings.of(outcome="met")

    def _settle(self) -> None:
        """Let all copies end."""
        while self.core.idle():
            assert self.core.cache.tiering is not None
            self.core.cache.tiering.tiers.engine.drain(10.0)

    def planned(self, length: Length) -> dict[str, Any]:
        """The planner's two estimates, and its choice."""
        self.core.cache.free_all()
        ids = np.array(length.prompt, dtype=np.int32)
        cost = self.core.cache.cost.model
        chosen = {}
        for mode in ("load", "own"):
            self.chooser.turn(mode)
            chosen[mode] = self.core.cache.lookup(CacheOptions(), ids, len(ids) - 1).offer
        assert self.chooser.made is not None
        length.stored_bytes = sum(
            load.num_pages * cost_bytes(self.core.schema, load.group)
            for load in self.chooser.made.loads
        )
        return {
            "tokens": length.tokens,
            "computing_s": cost.prefill_s(0, length.tokens),
            "loading_s": self.chooser.made.total_s,
            "loads": chosen["own"] is not None,
            "meeting_s": self._planned_meeting(ids),
        }

    def _planned_meeting(self, ids: Int32) -> float | None:
        """The planner's estimate of loading and computing at once; None where it would not."""
        self.chooser.turn("meet")
        self.core.cache.free_all()
        self.core.cache.lookup(CacheOptions(), ids, len(ids) - 1)
        both = self.chooser.both
        return both.total_s if both is not None and both.concurrent else None


def cost_bytes(schema: CacheSchema, group: int) -> int:
    """Bytes of one block."""
    return schema.groups[group].block_bytes(schema.page_size)


def ratios(lengths: list[int], loading: list[float], computing: list[float]) -> tuple[Float, Float]:
    """Logarithms of the lengths, and of loading to computing at them."""
    x = np.log(np.array(lengths, dtype=np.float64))
    return x, np.log(np.array(loading) / np.array(computing))


def crossing(lengths: list[int], loading: list[float], computing: list[float]) -> float | None:
    """Length at which loading becomes the cheaper one; None where the curves do not cross.

    Between two lengths the ratio is taken for a power of the length.
    """
    x, y = ratios(lengths, loading, computing)
    for i in range(len(x) - 1):
        if y[i] > 0 >= y[i + 1]:
            return float(np.exp(x[i] + (x[i + 1] - x[i]) * y[i] / (y[i] - y[i + 1])))
    return None


def choose_medium(bench: Bench, middle: Length) -> float:
    """Bandwidth at which loading the middle length takes as long as computing it."""
    computing = min(bench.serve(middle, "compute") for _ in range(3))
    bench.planned(middle)
    return middle.stored_bytes / computing


def estimates(bench: Bench) -> dict[str, Any]:
    """What the planner thinks now, and where its curves cross."""
    rows = [bench.planned(length) for length in bench.lengths]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    where = crossing(columns["tokens"], columns["loading_s"], columns["computing_s"])
    return {"rows": rows, "crossing": where}


def measure(bench: Bench, rounds: int, mb_per_s: float, ways: Sequence[str]) -> dict[str, Any]:
    """All curves, and the planner's at each start and in the end."""
    for length in bench.lengths:
        bench.serve(length, "compute")
    middle = bench.lengths[len(bench.lengths) // 2]
    bench.medium.bytes_per_s = mb_per_s * MB if mb_per_s else choose_medium(bench, middle)
    report: dict[str, Any] = {"mb_per_s": bench.medium.bytes_per_s / MB, "planner_at_start": []}
    for _ in range(rounds):
        bench.restart()
        report["planner_at_start"].append(estimates(bench))
        for length in bench.lengths:
            for way in ways:
                length.seconds[way].append(bench.serve(length, way))
            last = ", ".join(f"{way} {length.seconds[way][-1]:.2f} s" for way in ways)
            print(f"  {length.tokens}: {last}", flush=True)
    report["planner"] = estimates(bench)
    report["measured"] = [
        {
            "tokens": length.tokens,
            "mb": length.stored_bytes / MB,
            "met": length.num_met,
            **{NAMES[way]: statistics.median(length.seconds[way]) for way in ways},
        }
        for length in bench.lengths
    ]
    columns = {name: [row[name] for row in report["measured"]] for name in report["measured"][0]}
    curves = columns["tokens"], columns["loading_s"], columns["computing_s"]
    report["crossing"] = crossing(*curves)
    for found in (*report["planner_at_start"], report["planner"]):
        if found["crossing"] is not None:
            x, y = ratios(*curves)
            found["wrong_costs"] = (
                float(np.exp(abs(np.interp(np.log(found["crossing"]), x, y)))) - 1
            )
    return report


def show(report: dict[str, Any]) -> str:
    """The report as a table."""
    lines = [
        f"{report['model']}, a medium of {report['mb_per_s']:.1f} MB/s, load "
        f"{report['load_average']['before'][0]:.1f} to {report['load_average']['after'][0]:.1f}; "
        "seconds, as planned at start (medians) > in the end",
        f"{'tokens':>7}{'MB':>7}{'loading':>9}{'planned':>16}{'computing':>11}{'planned':>16}"
        f"{'meeting':>9}{'planned':>16}  choice",
    ]
    starts = report["planner_at_start"]
    for i, (real, planned) in enumerate(
        zip(report["measured"], report["planner"]["rows"], strict=True)
    ):
        line = f"{real['tokens']:>7}{real['mb']:>7.1f}"
        for name in NAMES.values():
            first = _median([start["rows"][i][name] for start in starts])
            both = f"{_seconds(first)} > {_seconds(planned[name])}"
            line += f"{_seconds(real.get(name)):>9}{both:>16}  "
        lines.append(f"{line}{'load' if planned['loads'] else 'compute'}; met {real['met']:.0f}")
    lines.append(f"curves cross at, in tokens: {_tokens(report['crossing'])}, as measured")
    lines.append(f"  {', '.join(map(_crossing, starts))}: the planner's at each start")
    lines.append(f"  {_crossing(report['planner'])}: the planner's in the end")
    return "\n".join(lines)


def _median(values: list[float | None]) -> float | None:
    """The middle one; None where one is missing."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if len(known) == len(values) else None


def _crossing(found: dict[str, Any]) -> str:
    if "wrong_costs" not in found:
        return "-"
    wrong = f"{100 * found['wrong_costs']:.0f} %"
    return f"{_tokens(found['crossing'])} (there the other choice costs {wrong})"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _tokens(value: float | None) -> str:
    return "-" if value is None else str(round(value))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", default="gemma3-270m")
    parser.add_argument("--lengths", default="512,1024,2048,4096")
    parser.add_argument("--mb-per-s", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--meet", action="store_true", help="also load and compute at once")
    parser.add_argument("--directory", type=Path, help="on the disk to use")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    before = os.getloadavg()
    lengths = [int(word) for word in args.lengths.split(",")]
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        bench = Bench(args.model, Path(folder) / "cache", lengths)
        ways = tuple(NAMES) if args.meet else ("load", "compute")
        report = measure(bench, args.rounds, args.mb_per_s, ways)
        bench.core.close()
    report |= {
        "model": args.model, "cores": os.cpu_count(),
        "load_average": {"before": before, "after": os.getloadavg()},
    }  # fmt: skip
    print(show(report))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
