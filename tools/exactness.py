"""The exactness law on real layers over many random scenarios: cache on against cache off.

    python tools/exactness.py --seeds 50 --json results/exactness.json      every architecture
    python tools/exactness.py --arch deepseek-v4 --first 300 --seeds 50
    python tools/exactness.py --arch deepseek-v4 --first 317 --seeds 1      one seed again

A scenario is what `support.model_scenarios` makes of its seed: requests that share prefixes, tiny
pools, preemption, aborts, any chunk size, state of single groups lost between requests. A
difference in one token, a block lost or a broken invariant ends the run with the seed's traceback.
Seeds repeat the scenario; what the planner chooses depends on costs measured at start as well.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support.model_scenarios import SHAPES, Case, scenario  # noqa: E402


def run(arch: str, seeds: range) -> dict[str, object]:
    """Run an architecture's scenarios; totals."""
    totals: Counter[str] = Counter()
    levels: Counter[str] = Counter()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        case = Case(arch, Path(directory) / arch)
        for seed in seeds:
            try:
                outcome = scenario(case, seed)
            except BaseException:
                print(f"{arch}: seed {seed}", file=sys.stderr)
                raise
            levels += outcome.levels
            totals["requests"] += outcome.requests
            totals["preemptions"] += outcome.preemptions
            totals["reused_tokens"] += outcome.reused
            totals["replayed_tokens"] += outcome.repaired
    return {
        "arch": arch,
        "first_seed": seeds.start,
        "seeds": len(seeds),
        **totals,
        "levels": dict(levels),
        "seconds": round(time.monotonic() - started, 1),
    }


def main() -> int:
    """Run; print one line of JSON for each architecture."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--arch", choices=sorted(SHAPES), action="append")
    parser.add_argument("--first", type=int, default=300, help="first seed")
    parser.add_argument("--seeds", type=int, default=50, help="scenarios of each architecture")
    parser.add_argument("--json", type=Path, help="file to write the totals to")
    args = parser.parse_args()
    seeds = range(args.first, args.first + args.seeds)
    results = []
    for arch in args.arch or SHAPES:
        results.append(run(arch, seeds))
        print(json.dumps(results[-1]), flush=True)
    if args.json:
        record = {"load_average": os.getloadavg(), "cores": os.cpu_count(), "results": results}
        args.json.write_text(json.dumps(record, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
