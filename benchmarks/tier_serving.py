"""Slower tiers through the serving engine: time to the first token.

One prompt of each length: cold, from host memory, from disk, from the device; beside the planner's
estimates of computing and of loading it.
What copies cost a request that decodes is measured by `tier_decoding.py`.

One engine, no server: everything but HTTP and processes. Greedy, so that all four ways must give
the same first token; a difference ends the run. With `--lossy-tiers` what comes back is
approximate, and a difference is told. `--mb-per-s`: the directory is read as from a medium as slow
as that.

    usage: python benchmarks/tier_serving.py [--model NAME] [--lengths 512,8192]
               [--lossy-tiers int8] [--mb-per-s N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from medium import MB, Medium

from statewise.radix.segment import Tier
from statewise.runtime.clock import SystemClock
from statewise.runtime.config import checked
from statewise.runtime.engine.build import build_runtime
from statewise.runtime.engine.core import EngineCore
from statewise.runtime.messages import TokenizedRequest, pack_ids
from statewise.runtime.sampling_params import SamplingParams

WAIT_S = 0.0005  # between two looks at a load
REPEATS = 3  # of each way but the cold one


class Bench:
    """One engine with a host tier and a disk tier."""

    def __init__(
        self, model: str, directory: Path, longest: int, more_tokens: int = 0, lossy: str = "none"
    ) -> None:
        settings = {
            "model_path": model, "skip_tokenizer_init": True, "host_cache_gb": 2.0,
            "disk_cache_dir": str(directory), "disk_cache_gb": 4.0,
            "max_total_tokens": 3 * longest + more_tokens + 4096, "lossy_tiers": lossy,
        }  # fmt: skip
        built = build_runtime(checked(settings))
        self.clock = SystemClock()
        self.core: EngineCore = built.core(self.clock)
        self.rng = np.random.default_rng(0)
        self.vocab = min(built.model.vocab_size, 30000)
        self.is_lossy = lossy != "none"
        self._num = 0

    def prompt(self, length: int) -> list[int]:
        """Random tokens: nothing of them is cached."""
        found: list[int] = self.rng.integers(5, self.vocab, length).tolist()
        return found

    def add(self, prompt: list[int], max_new: int) -> str:
        """Queue a greedy request."""
        self._num += 1
        params = SamplingParams(max_new_tokens=max_new, temperature=0.0, ignore_eos=True)
        self.core.add_request(
            TokenizedRequest(f"r{self._num}", pack_ids(prompt), params, stream=True)
        )
        return f"r{self._num}"

    def first(self, prompt: list[int]) -> dict[str, Any]:
        """Run a request of one token: seconds, token, how it was served."""
        began = time.perf_counter()
        self.add(prompt, 1)
        while self.core.has_work():
            deltas = self.core.step()
            if self.core.is_stalled:
                time.sleep(WAIT_S)  # a server sleeps until it is told; threads need the lock
            for delta in deltas:
                if delta.finish is not None:
                    assert delta.report is not None
                    return {
                        "seconds": time.perf_counter() - began,
                        "token": delta.token_ids[0],
                        "level": delta.report.level,
                        "loaded_from": delta.report.loaded_from,
                    }
        raise AssertionError("it never ended")

    def settle(self) -> None:
        """Let all copies end."""
        tiering = self.core.cache.tiering
        assert tiering is not None
        while True:
            self.core.idle()
            if not tiering.is_busy:
                return
            tiering.tiers.engine.drain(10.0)

    def forget(self, *tiers: Tier) -> None:
        """Evict from the device, and from the tiers named."""
        cache = self.core.cache
        assert cache.tiering is not None
        cache.free_all()
        for tier in tiers:
            store = cache.tiering.tiers.stores[tier]
            store.free(store.all_handles())

    def ttft(self, length: int) -> dict[str, Any]:
        """Cold once; from host, disk and device the median of `REPEATS`."""
        prompt = self.prompt(length)
        cost = self.core.cache.cost.model
        out: dict[str, Any] = {"tokens": length, "computing_s": cost.prefill_s(0, length)}
        out["cold"] = self.first(prompt)
        self.settle()
        out["host"] = self._median(prompt, lambda: self.forget())
        self.forget(Tier.HOST)
        self._estimate(out, prompt)
        out["disk"] = self._median(prompt, lambda: self.forget(Tier.HOST))
        out["device"] = self._median(prompt, lambda: None)
        tokens = {out[way]["token"] for way in ("cold", "host", "disk", "device")}
        out["same_token"] = len(tokens) == 1
        assert out["same_token"] or self.is_lossy, f"first tokens differ: {out}"
        return out

    def _median(self, prompt: list[int], before: Callable[[], None]) -> dict[str, Any]:
        """The run of median time, `before` done before each; all of the same first token."""
        runs = []
        for _ in range(REPEATS):
            before()
            runs.append(self.first(prompt))
            self.settle()
        is_same = len({run["token"] for run in runs}) == 1
        assert is_same or self.is_lossy, f"first tokens differ: {runs}"
        return sorted(runs, key=lambda run: run["seconds"])[REPEATS // 2]

    def _estimate(self, out: dict[str, Any], prompt: list[int]) -> None:
        """What the planner thinks of loading it from disk."""
        from statewise.runtime.messages import CacheOptions

        ids = np.array(prompt, dtype=np.int32)
        lookup = self.core.cache.lookup(CacheOptions(), ids, len(ids) - 1)
        out["planner_loads"] = lookup.offer is not None
        if lookup.offer is not None:
            out["loading_s"] = lookup.offer.plan.recovery_s


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", default="gemma3-270m")
    parser.add_argument("--lengths", default="512,2048,8192,32000")
    parser.add_argument("--lossy-tiers", default="none", choices=["none", "int8", "fp8"])
    parser.add_argument("--mb-per-s", type=float, default=0.0, help="of the disk; 0: as it is")
    parser.add_argument("--directory", type=Path, help="on the disk to measure")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    lengths = [int(word) for word in args.lengths.split(",")]
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        if args.mb_per_s:
            Medium(args.mb_per_s * MB).mount()
        bench = Bench(args.model, Path(folder) / "cache", max(lengths), lossy=args.lossy_tiers)
        bench.first(bench.prompt(64))  # warm up
        report: dict[str, Any] = {
            "model": args.model, "lossy_tiers": args.lossy_tiers, "mb_per_s": args.mb_per_s,
            "load_average": os.getloadavg(), "cores": os.cpu_count(),
            "ttft": [],
        }  # fmt: skip
        for length in lengths:
            one = bench.ttft(length)
            print(json.dumps(one))
            report["ttft"].append(one)
        report["tiers"] = bench.core.stats()["tiers"]
        report["cost"] = bench.core.stats()["cost_model"]["tiers"]
        bench.core.close()
    print(json.dumps({k: v for k, v in report.items() if k != "ttft"}, indent=1))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
