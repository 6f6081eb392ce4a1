"""Plant known bugs, one at a time, and see that the suite notices each.

    python tools/mutants.py                     all of them
    python tools/mutants.py --only stale,f17    those whose name contains one of these
    python tools/mutants.py --jobs 2 --json FILE

A mutant is an exact replacement in one source file (tools/planted*.py), applied to a temporary
copy of the tree; its targeted tests must then fail. A test that errs while it is collected, or that
runs out of time, proves nothing and counts as *broken*, as does a mutant whose text is no longer
there. First the same tests
run on the unchanged copy: they must pass.

This module does not touch the working tree.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT / "tools") not in sys.path:  # `python -P` leaves a script's own folder out
    sys.path.insert(0, str(ROOT / "tools"))

from mutant import Mutant  # noqa: E402
from planted import MUTANTS  # noqa: E402
from planted_tiers import TIER_MUTANTS  # noqa: E402

COPIED = ("radix", "runtime", "kernels", "frontend", "src", "tests", "tools", "pyproject.toml")
ALL = (*MUTANTS, *TIER_MUTANTS)
TIMEOUT_S = 180
PASSED, FAILED = 0, 1  # of pytest
TIMED_OUT = -1


@dataclass(frozen=True)
class Verdict:
    """What became of one mutant: killed, survived, or broken."""

    name: str
    outcome: str
    seconds: float
    detail: str = ""


def copy_tree(target: Path) -> None:
    """Copy what the tests need; compiled caches stay behind."""
    skip = shutil.ignore_patterns("__pycache__", ".*", "*.json.gz")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, symlinks=True, ignore=skip)
        else:
            shutil.copy2(source, target / name)


def _all_but_slow(tests: Sequence[str]) -> list[str]:
    """Options that leave slow tests of whole files out; those that are named themselves run."""
    return [] if all("::" in test for test in tests) else ["-m", "not slow"]


def run_tests(tree: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Exit status of pytest in the copy, and the last lines it printed."""
    command = [
        sys.executable, "-P", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
        "--no-header", "--tb=line", *_all_but_slow(tests), *tests,
    ]  # fmt: skip
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    try:
        done = subprocess.run(
            command,
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return TIMED_OUT, f"still running after {TIMEOUT_S} s"
    return done.returncode, "\n".join(done.stdout.splitlines()[-4:])


def try_mutant(tree: Path, mutant: Mutant) -> Verdict:
    """Plant one bug in `tree`, run its tests, take it out again."""
    started = time.monotonic()
    path = tree / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        return Verdict(mutant.name, "broken", 0.0, f"text found {text.count(mutant.old)} times")
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        status, tail = run_tests(tree, mutant.tests)
    finally:
        path.write_text(text)
    outcome = {PASSED: "survived", FAILED: "killed"}.get(status, "broken")
    return Verdict(mutant.name, outcome, time.monotonic() - started, tail)


def run_all(mutants: Sequence[Mutant], jobs: int) -> list[Verdict]:
    """Try them all, each process on a copy of its own."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        trees: SimpleQueue[Path] = SimpleQueue()
        for i in range(jobs):
            tree = Path(directory) / str(i)
            tree.mkdir()
            copy_tree(tree)
            trees.put(tree)
        every_test = sorted({test for mutant in mutants for test in mutant.tests})
        status, tail = run_tests(Path(directory) / "0", every_test)
        if status != PASSED:
            sys.exit(f"the tests do not pass without any mutant:\n{tail}")

        def one(mutant: Mutant) -> Verdict:
            tree = trees.get()
            try:
                verdict = try_mutant(tree, mutant)
            finally:
                trees.put(tree)
            print(f"{verdict.outcome:9}{verdict.seconds:6.1f} s  {verdict.name}", flush=True)
            return verdict

        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(one, mutants))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", default="", help="parts of names, separated by commas")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    wanted = [m for m in ALL if any(part in m.name for part in args.only.split(","))]
    started = time.monotonic()
    verdicts = run_all(wanted, args.jobs)
    seconds = time.monotonic() - started
    killed = sum(v.outcome == "killed" for v in verdicts)
    print(f"{killed} of {len(verdicts)} killed, {seconds:.0f} s")
    for verdict in verdicts:
        if verdict.outcome != "killed":
            print(f"{verdict.outcome}: {verdict.name}\n{verdict.detail}")
    if args.json:
        data = {"seconds": seconds, "mutants": [asdict(v) for v in verdicts]}
        args.json.write_text(json.dumps(data, indent=1) + "\n")
    return 0 if killed == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
