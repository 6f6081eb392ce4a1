"""Run many simulation seeds over several processes; report violations, totals and speed as JSON.

    python tools/simulate.py --seeds 10000 --jobs 2 --json results/simulation.json
    python tools/simulate.py --minutes 120 --jobs 2              a soak: seeds until the time is up
    python tools/simulate.py --seeds 1 --first 4711          one seed; a violation tells its story

Every seed is a whole world (docs/simulation.md). `--twice N` runs every N-th seed a second time and
compares journals. Exit status 1 if any law was broken; the seed alone repeats it.

This module does not know the laws: `support.simulation` does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support.simulation import Result, ViolationError, run_seed  # noqa: E402

CHUNK = 10  # seeds handed to a process at once
SUMS = (
    "num_requests", "num_steps", "num_events", "num_restarts", "preemptions",
    "matched_tokens", "reused_tokens", "repaired_tokens", "loaded_tokens", "lossy_tokens",
)  # fmt: skip


@dataclass
class Summary:
    """What all seeds did together."""

    seeds: int = 0
    cpu_s: float = 0.0
    violations: list[dict[str, object]] = field(default_factory=list)
    totals: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    levels: Counter[str] = field(default_factory=Counter)

    def add(self, other: Summary) -> None:
        """Take in what another process did."""
        self.seeds += other.seeds
        self.cpu_s += other.cpu_s
        self.violations += other.violations
        self.totals += other.totals
        self.faults += other.faults
        self.levels += other.levels

    def count(self, result: Result) -> None:
        """Add one seed."""
        self.totals.update({name: getattr(result, name) for name in SUMS})
        self.faults.update(result.faults)
        self.levels.update(result.levels)


def run_chunk(first: int, count: int, twice: int) -> Summary:
    """Run seeds [first, first + count) in this process."""
    summary, started = Summary(), time.process_time()
    for seed in range(first, first + count):
        summary.seeds += 1
        try:
            result = run_seed(seed)
            summary.count(result)
            if twice and seed % twice == 0 and run_seed(seed).journal != result.journal:
                raise ViolationError(f"seed {seed}: determinism: the second journal differs")
        except ViolationError as error:
            summary.violations.append({"seed": seed, "story": str(error)})
    summary.cpu_s = time.process_time() - started
    return summary


def chunks(args: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """(first seed, number of seeds), until the seeds or the minutes are used up."""
    at, end = args.first, args.first + args.seeds
    deadline = time.monotonic() + args.minutes * 60
    while time.monotonic() < deadline if args.minutes else at < end:
        size = CHUNK if args.minutes else min(CHUNK, end - at)
        yield at, size
        at += size


def run_all(args: argparse.Namespace) -> Summary:
    """Keep every process busy; print progress."""
    total = Summary()
    started = shown = time.monotonic()
    with ProcessPoolExecutor(args.jobs) as pool:
        running: set[Future[Summary]] = set()
        for first, count in chunks(args):
            running.add(pool.submit(run_chunk, first, count, args.twice))
            if len(running) < 2 * args.jobs:
                continue
            running = collect(running, total)
            if time.monotonic() - shown > 5:
                shown = time.monotonic()
                progress(total, shown - started)
        while running:
            running = collect(running, total)
    return total


def collect(running: set[Future[Summary]], total: Summary) -> set[Future[Summary]]:
    """Wait for one; returns those still running."""
    done, left = wait(running, return_when=FIRST_COMPLETED)
    for future in done:
        part = future.result()
        for violation in part.violations:
            print(str(violation["story"]).splitlines()[0], flush=True)
        total.add(part)
    return set(left)


def progress(total: Summary, seconds: float) -> None:
    print(
        f"{total.seeds} seeds, {len(total.violations)} violations, {seconds:.0f} s, "
        f"{total.cpu_s / max(total.seeds, 1) * 1e3:.0f} ms each",
        flush=True,
    )


def environment() -> dict[str, object]:
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=200, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--minutes", type=float, default=0.0, help="run for this long instead")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--twice", type=int, default=25, help="compare journals of every N-th seed")
    parser.add_argument("--json", type=Path, help="write the summary here")
    args = parser.parse_args()
    started = time.monotonic()
    total = run_all(args)
    seconds = time.monotonic() - started
    progress(total, seconds)
    if args.json:
        data = {"first": args.first, "seconds": seconds, **vars(total), **environment()}
        args.json.write_text(json.dumps(data, indent=1) + "\n")
    for violation in total.violations[:3]:
        print(violation["story"])
    return 1 if total.violations else 0


if __name__ == "__main__":
    sys.exit(main())
