"""The first figures: what a user of the HTTP server sees, each beside the physical limit.

    decode      one stream, tokens per second after the first, at short and long context
    prefill     prompt tokens per second of prompts never seen before
    ttft        time to first token, cold and cached, of ~1k and 4k tokens: the cached one is asked
                for right after the cold one, so that both see the same machine
    shared      8 clients whose prompts share 1,024 tokens: prefix cached before, and new
    overhead    time per decode step at batch 8 that is not the worker's forward pass
    memory      resident memory of the whole process tree (PSS: shared pages count once)
    start       from spawn to the first healthy answer

Prompts are random token ids from a seed, so that nothing is cached by accident. Everything runs
against one server started for it on loopback. The machine is often shared: medians of several
runs are shown, all runs are in the JSON, and so is the load average before and after.

    usage: python benchmarks/first_figures.py [--model NAME] [--quick] [--json FILE] [-- ARGS...]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "tools"))

import serving  # noqa: E402
import wire  # noqa: E402

NUM_CLIENTS = 8
SHARED_LEN = 1024
UNIQUE_LEN = 16


@dataclass(frozen=True)
class ModelFacts:
    """What the limits need to know of a model. Parameters count a tied embedding once."""

    num_params: int  # read once per decode step
    num_layer_params: int  # multiplied once per prompt token (the output layer runs only once)
    vocab_size: int
    goal_decode: float  # tokens per second at 1k context
    goal_prefill: tuple[float, float]  # at 512 and 2,048 tokens; 0: none set
    goal_shared: tuple[float, float]  # cached, new; 0: none set


MODELS = {
    "smollm2-135m": ModelFacts(134_515_008, 106_203_456, 49_152, 150, (3000, 2200), (300, 200)),
    "gemma3-270m": ModelFacts(268_098_176, 100_326_016, 262_144, 90, (0, 0), (0, 0)),
}


@dataclass
class Figure:
    """One row of the table. `values` are all runs; `limit` and `goal` are in the same unit."""

    name: str
    unit: str
    values: list[float]
    limit: float | None = None
    limit_of: str = ""
    goal: str = ""
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def median(self) -> float:
        """The middle run."""
        return statistics.median(self.values)


class Bench:
    """Asks one server for each figure in turn."""

    def __init__(self, server: serving.Server, facts: ModelFacts, repeats: int, seed: int) -> None:
        self.server = server
        self.facts = facts
        self.repeats = repeats
        self._random = random.Random(seed)

    def prompt(self, length: int) -> list[int]:
        """Return token ids that no earlier prompt began with; special ids are left out."""
        return [self._random.randrange(1000, self.facts.vocab_size - 1000) for _ in range(length)]

    async def ask(
        self, ids: list[int], max_new_tokens: int, on_event: Callable[[], None] | None = None
    ) -> wire.Reply:
        """Generate greedily, streaming, for exactly `max_new_tokens` tokens."""
        sampling = {"max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": True}
        payload = {"input_ids": ids, "sampling_params": sampling, "stream": True}
        return await self.server.generate(payload, on_event=on_event)

    async def ttft(self, ids: list[int]) -> tuple[float, int]:
        """Return (milliseconds to the first token, cached tokens)."""
        reply = await self.ask(ids, 1)
        return reply.events[0][0] * 1e3, int(reply.last_event["meta_info"]["cached_tokens"])

    async def decode(self, context_len: int, num_tokens: int) -> Figure:
        """One stream's tokens per second, from the first token to the last."""
        values = []
        for _ in range(self.repeats):
            reply = await self.ask(self.prompt(context_len), num_tokens)
            times = [at for at, data in reply.events if data != b"[DONE]"]
            made = int(reply.last_event["meta_info"]["completion_tokens"])
            values.append((made - 1) / (times[-1] - times[0]))
        goal = f">= {self.facts.goal_decode:g} (4-bit weights)" if context_len > 500 else ""
        return Figure(f"decode, context {context_len}", "tok/s", values, goal=goal)

    async def prefill(self, length: int, goal: float) -> Figure:
        """Prompt tokens per second until the first token."""
        values = [length / (await self.ttft(self.prompt(length)))[0] * 1e3
                  for _ in range(self.repeats)]  # fmt: skip
        text = f">= {goal:g} (bf16)" if goal else ""
        return Figure(f"prefill, {length} tokens", "tok/s", values, goal=text)

    async def first_tokens(self, length: int, goal: str) -> list[Figure]:
        """TTFT of a new prompt, then of the same prompt again."""
        cold, warm, ratios, cached = [], [], [], 0
        for _ in range(self.repeats):
            ids = self.prompt(length)
            cold.append((await self.ttft(ids))[0])
            again, cached = await self.ttft(ids)
            warm.append(again)
            ratios.append(again / cold[-1])
        detail = {"cached_tokens": cached, "ratio": statistics.median(ratios)}
        return [
            Figure(f"TTFT, {length} tokens, new", "ms", cold),
            Figure(f"TTFT, {length} tokens, again", "ms", warm, goal=goal, detail=detail),
        ]

    async def shared(self, num_tokens: int) -> list[Figure]:
        """Eight clients over one prefix: generated tokens per second of all of them."""
        goals = [f">= {g:g}" if g else "" for g in self.facts.goal_shared]
        new, cached = [], []
        for _ in range(self.repeats):
            prefix = self.prompt(SHARED_LEN)
            new.append(await self._burst(prefix, num_tokens))
            cached.append(await self._burst(prefix, num_tokens))
        name = f"{NUM_CLIENTS} clients sharing {SHARED_LEN} tokens, prefix"
        return [
            Figure(f"{name} cached", "tok/s", cached, goal=goals[0]),
            Figure(f"{name} new", "tok/s", new, goal=goals[1]),
        ]

    async def _burst(self, prefix: list[int], num_tokens: int) -> float:
        prompts = [prefix + self.prompt(UNIQUE_LEN) for _ in range(NUM_CLIENTS)]
        start = time.perf_counter()
        await asyncio.gather(*(self.ask(ids, num_tokens) for ids in prompts))
        return NUM_CLIENTS * num_tokens / (time.perf_counter() - start)

    async def overhead(self, num_tokens: int) -> list[Figure]:
        """Step time at batch 8, and the part of it that is not the worker's forward pass.

        The engine's counters are read once all clients decode and again before the first ends, so
        that no prefill falls between the two readings.
        """
        walls, rests = [], []
        for _ in range(self.repeats):
            prefix = self.prompt(SHARED_LEN)
            await self.ask(prefix, 1)
            progress = [0] * NUM_CLIENTS
            asking = asyncio.gather(
                *(self._count_events(prefix, num_tokens, progress, i) for i in range(NUM_CLIENTS))
            )
            start, before = await self._counters_when(progress, 2)
            end, after = await self._counters_when(progress, num_tokens - 16)
            await asking
            steps = after["num_steps"] - before["num_steps"]
            worker_s = after["worker_seconds"] - before["worker_seconds"]
            walls.append((end - start) / steps * 1e3)
            rests.append((end - start - worker_s) / steps * 1e3)
        return [
            Figure("decode step at batch 8", "ms", walls),
            Figure("of that, outside the worker", "ms", rests, goal="<= 1"),
        ]

    async def _count_events(
        self, prefix: list[int], num_tokens: int, progress: list[int], client: int
    ) -> None:
        def one_more() -> None:
            progress[client] += 1

        await self.ask(prefix + self.prompt(UNIQUE_LEN), num_tokens, one_more)

    async def _counters_when(
        self, progress: list[int], num_events: int
    ) -> tuple[float, dict[str, float]]:
        while min(progress) < num_events:
            await asyncio.sleep(0.002)
        return time.perf_counter(), await self.counters()

    async def counters(self) -> dict[str, float]:
        """Return the engine's counters."""
        return find_counters(await self.server.info())


def find_counters(info: Any) -> dict[str, float]:
    """Find the engine's counters wherever the server's description keeps them."""
    if isinstance(info, dict) and "num_steps" in info:
        return info
    parts = info.values() if isinstance(info, dict) else info if isinstance(info, list) else ()
    return next((found for part in parts if (found := find_counters(part))), {})


async def measure(bench: Bench, quick: bool) -> list[Figure]:
    """All figures that need requests, cheapest first."""
    tokens = 64 if quick else 128
    goal_512, goal_2048 = bench.facts.goal_prefill
    figures = [await bench.decode(50, tokens), await bench.decode(1040, tokens)]
    figures.append(await bench.prefill(512, goal_512))
    if not quick:
        figures.append(await bench.prefill(2048, goal_2048))
    figures += await bench.first_tokens(1040, "<= 25")
    figures += await bench.first_tokens(4096, "<= 1/10 of new")
    figures += await bench.shared(32 if quick else 64)
    figures += await bench.overhead(tokens)
    return figures


def weight_bytes_of(server_info: dict[str, Any], facts: ModelFacts) -> int:
    """What a token reads of weights: what the kernels laid out themselves, else plain matrices."""
    return int(server_info["model"]["packed_weight_bytes"]) or 2 * facts.num_params


def add_limits(
    figures: list[Figure], facts: ModelFacts, limits: dict[str, float], weight_bytes: int
) -> None:
    """Set the physical limit beside decode and prefill figures."""
    bytes_per_s, flops = limits["read_bytes_per_s"], limits["matmul_bf16_flops"]
    for figure in figures:
        if figure.name.startswith("decode, context"):
            figure.limit = bytes_per_s / weight_bytes
            figure.limit_of = f"{weight_bytes / 1e6:.0f} MB of weights read once a token"
        elif figure.name.startswith("prefill"):
            figure.limit = flops / (2 * facts.num_layer_params)
            figure.limit_of = "bf16 products, attention not counted"


def memory_figures(idle: serving.ProcessFigures, loaded: serving.ProcessFigures,
                   weight_bytes: int) -> list[Figure]:  # fmt: skip
    """Resident memory before and after the load, and what of it is neither weights nor pools.

    Idle, no block has been written, and untouched pages of the pools take no memory: what remains
    without the weights is the processes' own.
    """
    before, after = idle.pss_bytes / 2**20, loaded.pss_bytes / 2**20
    weights = weight_bytes / 2**20
    return [
        Figure("memory (PSS) when ready", "MiB", [before], detail=serving.as_json(idle)),
        Figure("of that, without weights", "MiB", [before - weights], goal="<= 400"),
        Figure("memory (PSS) after the load", "MiB", [after], detail=serving.as_json(loaded)),
    ]


def table(figures: list[Figure]) -> str:
    """Render the figures as Markdown."""
    lines = ["| figure | median | runs | limit | goal |", "|---|---|---|---|---|"]
    for f in figures:
        runs = f"{min(f.values):.4g} - {max(f.values):.4g}" if len(f.values) > 1 else ""
        limit = f"{f.limit:.4g} ({f.limit_of})" if f.limit else ""
        extra = f" ({f.detail['ratio']:.3f} of new)" if "ratio" in f.detail else ""
        lines.append(f"| {f.name} | {f.median:.4g} {f.unit}{extra} | {runs} | {limit} | {f.goal} |")
    return "\n".join(lines)


def machine_limits() -> dict[str, float]:
    """Measure memory bandwidth and products in a process of their own."""
    script = str(Path(__file__).with_name("limits.py"))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    limits: dict[str, float] = json.loads(done.stdout)
    return limits


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Read the command line; what follows `--` goes to the server."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--model", default="smollm2-135m", choices=sorted(MODELS))
    parser.add_argument("--model-path", default="", help="weights to serve instead of the name's")
    parser.add_argument("--quick", action="store_true", help="fewer runs, shorter streams")
    parser.add_argument("--repeats", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=None, help="default: results/<name>.json")
    parser.add_argument("server_arguments", nargs="*", help="after --: arguments of the server")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Measure, print the table, write the JSON."""
    args = parse_arguments(argv)
    facts = MODELS[args.model]
    environment = serving.environment()
    print(f"{environment['cpu']}, {environment['cores']} cores, load {environment['load_average']}")
    limits = machine_limits()
    print(f"limits: {limits['read_bytes_per_s'] / 1e9:.1f} GB/s read, "
          f"{limits['matmul_bf16_flops'] / 1e12:.2f} TFLOP/s bf16")  # fmt: skip
    results = REPOSITORY / "results"
    log = results / f"first_figures-{args.model}.log"
    model = args.model_path or args.model
    with serving.Server(model, *args.server_arguments, log=log) as server:
        idle = server.figures()
        bench = Bench(server, facts, args.repeats or (2 if args.quick else 5), args.seed)
        asyncio.run(bench.ask(bench.prompt(64), 8))  # the first request warms buffers
        figures = asyncio.run(measure(bench, args.quick))
        info = asyncio.run(server.info())
        weight_bytes = weight_bytes_of(info, facts)
        figures += memory_figures(idle, server.figures(), weight_bytes)
        figures.append(Figure("start to ready", "s", [server.start_s], goal="<= 10"))
    add_limits(figures, facts, limits, weight_bytes)
    print(table(figures))
    target = args.json or results / f"first_figures-{args.model}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "benchmark": "first_figures",
        "model": model,
        "server_arguments": args.server_arguments,
        "quick": args.quick,
        "environment": environment,
        "load_average_after": list(os.getloadavg()),
        "limits": limits,
        "figures": [asdict(f) | {"median": f.median} for f in figures],
        "server_info": info,
    }
    target.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"written: {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
