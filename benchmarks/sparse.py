"""Micro benchmark of the kernels of hybrid models: sparse attention, index scoring, the delta rule.

Shapes are those of one layer of DeepSeek-V4 Flash and of Qwen3-Next. Each operation runs natively
and in plain torch over the same poison-free pools, in turns; the least of several runs is shown.
Bytes are what the operation reads at least (each key once per query), beside the memory limit.

    usage: python benchmarks/sparse.py [--threads N] [--repeats N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from statewise.kernels import native
from statewise.kernels.interface import BatchLayout, EntryGeometry, Ops, SparseKernels
from statewise.kernels.reference import TorchOps
from statewise.kernels.select import select_backend, select_sparse
from statewise.kernels.sparse_reference import TorchSparse

PAGE, HEADS, DIM, WINDOW, RATIO = 128, 64, 512, 128, 4
INDEX_HEADS, INDEX_DIM, TOP_K = 64, 128, 512
LIMIT_BYTES = 512 << 20


@dataclass(frozen=True)
class Result:
    """Microseconds of both, and bytes that the native kernel reads in its time."""

    name: str
    native_us: float
    torch_us: float
    bytes_per_s: float


@dataclass(frozen=True)
class Case:
    """One operation, natively and in plain torch."""

    name: str
    native: Callable[[], object]
    torch: Callable[[], object]
    num_bytes: float


def layout_of(context: int, tokens: int) -> BatchLayout:
    """One row that computes the last `tokens` of a context."""
    pages = -(-context // PAGE)
    return BatchLayout(
        query_starts=torch.tensor([0, tokens], dtype=torch.int32),
        context_lens=torch.tensor([context], dtype=torch.int32),
        context_starts=torch.zeros(1, dtype=torch.int32),
        page_table=torch.randperm(pages).to(torch.int32).view(1, -1),
        write_mask=torch.ones(1, dtype=torch.uint8),
    )


def pool_of(geometry: EntryGeometry, context: int) -> torch.Tensor:
    """Random entries of a whole context."""
    pages = -(-context // PAGE)
    return torch.randn(pages, geometry.entries_per_page, geometry.dim).to(geometry.dtype)


def attention_case(context: int, tokens: int) -> Case:
    """Window and selected entries in one softmax."""
    layout = layout_of(context, tokens)
    window = EntryGeometry(DIM, PAGE, torch.bfloat16, window=WINDOW)
    entries = EntryGeometry(DIM, PAGE, torch.bfloat16, RATIO)
    pools = pool_of(window, context), pool_of(entries, context)
    q, sinks = torch.randn(tokens, HEADS, DIM).to(torch.bfloat16), torch.randn(HEADS)
    visible = (context - tokens) // RATIO
    rows = [torch.randperm(visible)[:TOP_K].sort().values for _ in range(tokens)]
    selected = torch.stack(rows).to(torch.int32)

    def run(kernel: SparseKernels) -> Callable[[], object]:
        plans = kernel.plan(window, layout), kernel.plan(entries, layout)
        return lambda: kernel.attend(
            q, (plans[0], pools[0]), (plans[1], pools[1]), selected, sinks,
            scale=DIM**-0.5, value_dim=DIM,
        )  # fmt: skip

    name = f"attention: {tokens} queries at {context}, window {WINDOW} and {TOP_K} entries"
    num_bytes = tokens * (WINDOW + TOP_K) * DIM * 2
    return Case(name, run(select_sparse("cpu")), run(TorchSparse()), num_bytes)


def select_case(context: int, tokens: int) -> Case:
    """Scores of every visible index key, and the best of them."""
    layout = layout_of(context, tokens)
    geometry = EntryGeometry(INDEX_DIM, PAGE, torch.bfloat16, RATIO)
    pool = pool_of(geometry, context)
    q = torch.randn(tokens, INDEX_HEADS, INDEX_DIM).to(torch.bfloat16)
    weights = torch.randn(tokens, INDEX_HEADS)

    def run(kernel: SparseKernels) -> Callable[[], object]:
        plan = kernel.plan(geometry, layout)
        return lambda: kernel.select(plan, pool, q, weights, TOP_K)

    name = f"selection: {tokens} queries at {context}"
    num_bytes = tokens * (context // RATIO) * INDEX_DIM * 2
    return Case(name, run(select_sparse("cpu")), run(TorchSparse()), num_bytes)


def window_case(count: int) -> Case:
    """Gated sums of overlapping windows."""
    values, gates = torch.randn(2, count, 2 * RATIO, DIM)

    def run(ops: Ops) -> Callable[[], object]:
        return lambda: ops.pool_windows(values, gates)

    native_ops = select_backend("cpu", torch.float32)[1]
    num_bytes = 2 * values.nbytes
    return Case(f"compression: {count} windows", run(native_ops), run(TorchOps()), num_bytes)


def delta_case(tokens: int) -> Case:
    """One layer of Qwen3-Next 80B: 32 heads of 128 x 128."""
    heads, dim = 32, 128
    q, k, v = torch.randn(3, tokens, heads, dim)
    decay, beta = -torch.rand(tokens, heads), torch.rand(tokens, heads)
    states = torch.randn(1, heads, dim, dim)

    def run(ops: Ops) -> Callable[[], object]:
        return lambda: ops.delta_rule(q, k, v, decay, beta, states, ([0, tokens], [0]))

    native_ops = select_backend("cpu", torch.float32)[1]
    num_bytes = 2 * states.nbytes  # read and written once, however many tokens
    return Case(f"delta rule: {tokens} tokens", run(native_ops), run(TorchOps()), num_bytes)


def cases() -> Iterator[Case]:
    """Decode and prefill of every operation."""
    for context, tokens in ((4096, 1), (32768, 1), (4096, 64)):
        yield attention_case(context, tokens)
    for context, tokens in ((4096, 1), (32768, 1), (4096, 64)):
        yield select_case(context, tokens)
    yield from (window_case(count) for count in (1, 128))
    yield from (delta_case(tokens) for tokens in (1, 64))


def measure(case: Case, repeats: int) -> Result:
    """Run both in turns; keep the least of each."""
    least = [float("inf")] * 2
    for _ in range(repeats):
        for i, run in enumerate((case.native, case.torch)):
            start = time.perf_counter()
            run()
            least[i] = min(least[i], time.perf_counter() - start)
    return Result(case.name, least[0] * 1e6, least[1] * 1e6, case.num_bytes / least[0])


def memory_limit() -> float:
    """Bytes per second of reading memory larger than the caches."""
    data = torch.ones(LIMIT_BYTES // 4)
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - start)
    return LIMIT_BYTES / best


def main() -> None:
    """Print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description="Kernels of hybrid models.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    native.set_num_threads(args.threads)
    limit = memory_limit()
    load = os.getloadavg()[0]
    print(f"{native.instruction_set()}, {args.threads} threads, load {load:.1f}, "
          f"memory limit {limit / 1e9:.1f} GB/s")  # fmt: skip
    results = []
    for case in cases():
        results.append(measure(case, args.repeats))
        r = results[-1]
        print(f"{r.name:58} {r.native_us:10.0f} us  torch {r.torch_us:10.0f} us  "
              f"{r.bytes_per_s / 1e9:6.1f} GB/s")  # fmt: skip
    if args.json:
        facts = {"isa": native.instruction_set(), "threads": args.threads, "load": load}
        record = facts | {"limit_bytes_per_s": limit, "results": [asdict(r) for r in results]}
        args.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
