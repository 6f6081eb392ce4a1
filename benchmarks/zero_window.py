"""Zero-window replay: a long prompt's history is kept, its windows and tails are not.

A random model with the published layout of DeepSeek-V4 (window 128, ratios 4 and 128, pages of 128
tokens) serves a prompt; then every window page and every snapshot is dropped, and the prompt is
served again. What must be computed is the receptive field of the windows, layers x (window - 1)
tokens, however long the prompt. Layer l needs only the rows that deeper layers still need, so the
replay runs in steps of growing depth. Then everything is dropped and the prompt recomputed.

    field          layers x (window - 1): tokens that must be replayed, before rounding to pages
    layer tokens   tokens x layers that the replay computed, of the rectangle (all layers for all)
    ratio          time to the first token, of recomputing

Every answer (token and log probability) is compared with the first serving's.

    usage: python benchmarks/zero_window.py [--tokens N ...] [--layers N] [--repeats N] [--json F]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from statewise.radix import Match, Namespace, TokenKey
from statewise.radix.plan import Level, RecoveryPlan, Replay
from statewise.runtime.clock import SystemClock
from statewise.runtime.config import ServerArgs
from statewise.runtime.engine.build import build_runtime
from statewise.runtime.messages import CacheOptions, LogprobOptions, TokenizedRequest, pack_ids
from statewise.runtime.models.tiny import TinySize, make_tiny_model
from statewise.runtime.sampling_params import SamplingParams

WINDOW, PAGE = 128, 128
LENGTHS = (4096, 8192, 16384, 32768)
CONFIG = {
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    "index_topk": 64,
    "index_n_heads": 8,
}
MAX_DIFFERENCE = 1e-3  # of a log probability


@dataclass(frozen=True)
class Answer:
    """One serving."""

    seconds: float
    token: int
    logprob: float
    level: str
    reused: int


@dataclass(frozen=True)
class Row:
    """One length; medians of the repeats."""

    tokens: int
    field: int
    replayed: int
    steps: int
    layer_tokens: int
    rectangle: int
    replay_s: float
    direct_s: float
    recompute_s: float
    difference: float  # largest, of a log probability
    is_exact: bool


class Bench:
    """One engine over a model in `directory`."""

    def __init__(self, directory: Path, layers: int, longest: int) -> None:
        size = TinySize(layers=layers, hidden=256, intermediate=512, heads=8, head_dim=32,
                        window=WINDOW, context=longest + 1024)  # fmt: skip
        make_tiny_model("deepseek-v4", directory, size=size, config=CONFIG)
        args = ServerArgs(
            model_path=str(directory), skip_tokenizer_init=True, page_size=PAGE, dtype="float32",
            max_total_tokens=2 * longest, checkpoint_interval=1 << 20,
        )  # fmt: skip
        self.clock, self.layers = SystemClock(), layers
        self.core = build_runtime(args).core(self.clock)
        self._num_served = 0

    def serve(self, prompt: list[int]) -> Answer:
        """Serve a prompt for one token."""
        self._num_served += 1
        params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
        name = f"r{self._num_served}"
        request = TokenizedRequest(
            name, pack_ids(prompt), params, logprob=LogprobOptions(enabled=True)
        )
        started = self.clock.monotonic()
        self.core.add_request(request)
        found: Answer | None = None
        token, logprob, seconds = -1, 0.0, 0.0
        while self.core.has_work():
            for delta in self.core.step():
                if delta.token_ids:
                    seconds = self.clock.monotonic() - started
                    token, logprob = delta.token_ids[0], delta.logprobs[0].logprob or 0.0
                if delta.report is not None:
                    report = delta.report
                    found = Answer(seconds, token, logprob, report.level, report.reused)
        assert found is not None
        return found

    def plan(self, prompt: list[int]) -> RecoveryPlan:
        """What serving a prompt would do now."""
        ids = np.array(prompt, dtype=np.int32)
        return self.core.cache.lookup(CacheOptions(), ids, len(ids) - 1).plan

    def drop_trailing(self, prompt: list[int]) -> None:
        """Drop every window page and every snapshot along a prompt."""
        match = self.core.cache.tree.match(Namespace(), TokenKey(np.array(prompt, dtype=np.int32)))
        for group, spec in enumerate(self.core.cache.schema.groups):
            places = _places(match, group, spec.kind.is_snapshot or spec.kind.is_history)
            if spec.kind.is_history:
                places = [s.position for s in match.snapshots if s.is_terminal]
                freed = [self.core.cache.tree.drop_at(match, group, at) for at in places]
            elif spec.kind.is_snapshot:
                freed = [self.core.cache.tree.drop(match, group, places)]
            else:
                freed = [self.core.cache.tree.drop(match, group, range(match.logical_pages))]
                freed += [self.core.cache.tree.drop_at(match, group, at) for at in places]
            for one in freed:
                for pool, blocks in zip(self.core.cache.pools, one.blocks, strict=True):
                    pool.free(blocks)


def _places(match: Match, group: int, every: bool) -> list[int]:
    """Positions at which a group has a block of its own; inside pages only, or all."""
    return [s.position for s in match.snapshots if every or s.is_terminal]


def measure(bench: Bench, num_tokens: int, repeats: int) -> Row:
    """One prompt length."""
    rng = random.Random(num_tokens)
    prompt = [rng.randrange(256) for _ in range(num_tokens + 1)]
    bench.core.flush()
    first = bench.serve(prompt)
    replays: list[Answer] = []
    directs: list[Answer] = []
    cold = [first]
    plan = bench.plan(prompt)
    for repeat in range(repeats):
        bench.drop_trailing(prompt)
        plan = bench.plan(prompt)
        replays.append(bench.serve(prompt))
        directs.append(bench.serve(prompt))
        if repeat + 1 < repeats:
            bench.core.flush()
            cold.append(bench.serve(prompt))
    steps = [step for step in plan.steps if isinstance(step, Replay)]
    answers = [*replays, *directs, *cold]
    return Row(
        tokens=num_tokens,
        field=bench.layers * (WINDOW - 1),
        replayed=plan.replayed_tokens,
        steps=len(steps),
        layer_tokens=sum(step.num_tokens * step.num_layers for step in steps),
        rectangle=plan.replayed_tokens * bench.layers,
        replay_s=_median(replays),
        direct_s=_median(directs),
        recompute_s=_median(cold),
        difference=max(abs(a.logprob - first.logprob) for a in answers),
        is_exact=plan.level is Level.REPAIR
        and all(a.token == first.token for a in answers)
        and all(a.reused + plan.replayed_tokens == num_tokens for a in replays),
    )


def _median(answers: list[Answer]) -> float:
    return statistics.median(answer.seconds for answer in answers)


def table(rows: list[Row]) -> Iterator[str]:
    """Rows as text."""
    yield (
        "tokens  field  replayed  steps  layer tokens  of rectangle  replay s  direct s  "
        "recompute s  ratio  exact"
    )
    for r in rows:
        exact = r.is_exact and r.difference < MAX_DIFFERENCE
        yield (
            f"{r.tokens:6} {r.field:6} {r.replayed:9} {r.steps:6} {r.layer_tokens:13} "
            f"{r.layer_tokens / max(r.rectangle, 1):13.2f} {r.replay_s:9.3f} {r.direct_s:9.3f} "
            f"{r.recompute_s:12.3f} {r.replay_s / r.recompute_s:6.3f}  {'yes' if exact else 'NO'}"
        )


def main() -> int:
    """Measure and print; exit status 1 where an answer differed from the first."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file to write the results to")
    args = parser.parse_args()
    load = os.getloadavg()
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory) / "model", args.layers, max(args.tokens))
        rows = [measure(bench, n, args.repeats) for n in args.tokens]
    print(f"{args.layers} layers, {os.cpu_count()} cores, load {load[0]:.1f} before")
    print("\n".join(table(rows)))
    if args.json is not None:
        record = {"layers": args.layers, "cores": os.cpu_count(), "load_before": load,
                  "rows": [asdict(row) for row in rows]}  # fmt: skip
        args.json.write_text(json.dumps(record, indent=2) + "\n")
    return 0 if all(r.is_exact and r.difference < MAX_DIFFERENCE for r in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
