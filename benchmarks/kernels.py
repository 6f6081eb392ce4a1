"""Micro benchmark of the CPU kernels: time, and bytes moved against what memory can deliver.

Decode attention and the linear layers of few rows read each byte once, so memory bandwidth is
their limit; prefill attention is bound by arithmetic and shown in FLOP/s. Every operation runs
over data larger than the caches, natively and in plain torch (gather + scaled-dot-product for
attention), in one process and in turns, so that both meet the same machine. The least of several
runs is shown: others' load only ever adds. Shapes are those of SmolLM2 135M and Gemma 3 270M.

    usage: python benchmarks/kernels.py [--threads N] [--repeats N] [--only WORD] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

# As the server does, and before torch reads it: spinning threads lose where cores are shared.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch import Tensor
from torch.nn import functional

from statewise.kernels import native
from statewise.kernels.blocks import block_digests, numpy_digests
from statewise.kernels.cpu_backend import CpuAttention, CpuOps
from statewise.kernels.huge_pages import HugePages
from statewise.kernels.interface import AttentionGeometry, BatchLayout
from statewise.kernels.reference import TorchOps

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

import serving

PAGE_SIZE = 16
SPREAD_BYTES = 192 << 20  # operands rotate through this much memory
LIMIT_BYTES = 512 << 20
LIMIT_PART_BYTES = 16 << 20

Run = Callable[[], object]


@dataclass(frozen=True)
class Model:
    """Shapes of one model."""

    name: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    vocab: int
    window: int


MODELS = (
    Model("smollm2", 9, 3, 64, 576, 1536, 49_152, 0),
    Model("gemma3", 4, 1, 256, 640, 2048, 262_144, 512),
)


@dataclass(frozen=True)
class Case:
    """One operation: how to run it both ways and what it costs at least."""

    name: str
    native: Run
    torch: Run
    num_bytes: float = 0.0
    num_flops: float = 0.0


@dataclass(frozen=True)
class Result:
    """Microseconds, and what the native kernel moved and computed in them."""

    name: str
    native_us: float
    torch_us: float
    bytes_per_s: float
    flop_per_s: float


def rotating(runs: list[Run]) -> Run:
    """Return a run that takes the next of `runs` each time, so that caches stay cold."""
    state = iter(range(1 << 62))
    return lambda: runs[next(state) % len(runs)]()


def copies(num_bytes: int) -> int:
    """How many operands of a size exceed the caches together."""
    return max(1, min(64, SPREAD_BYTES // num_bytes))


# ---- attention -----------------------------------------------------------------------------------


def gathered_attention(
    geometry: AttentionGeometry, layout: BatchLayout, q: Tensor, pool: Tensor
) -> Tensor:
    """Gather each row's pages, then torch's fused attention: what one writes without a kernel."""
    outs = []
    starts, contexts = layout.query_starts.tolist(), layout.context_lens.tolist()
    for r, context in enumerate(contexts):
        count = starts[r + 1] - starts[r]
        lo = max(0, context - count - geometry.window + 1) if geometry.window else 0
        blocks = layout.page_table[r, lo // PAGE_SIZE : -(-context // PAGE_SIZE)].long()
        base = lo // PAGE_SIZE * PAGE_SIZE
        flat = pool[blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : context - base]
        queries = torch.arange(context - count, context).unsqueeze(1)
        keys = torch.arange(base, context).unsqueeze(0)
        visible = keys <= queries
        if geometry.window:
            visible &= keys > queries - geometry.window
        part = q[starts[r] : starts[r + 1]].transpose(0, 1).unsqueeze(0)
        outs.append(
            functional.scaled_dot_product_attention(
                part, flat[:1], flat[1:], visible, scale=geometry.scale, enable_gqa=True
            )
        )
    return torch.cat([o[0].transpose(0, 1) for o in outs])


def attention_case(
    model: Model, rows: int, tokens: int, context: int, window: int, dtype: torch.dtype
) -> Case:
    """One layer's attention: `rows` requests computing `tokens` tokens at `context`."""
    geometry = AttentionGeometry(
        num_q_heads=model.num_q_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        page_size=PAGE_SIZE,
        dtype=dtype,
        scale=1 / math.sqrt(model.head_dim),
        window=window,
    )
    pages = -(-context // PAGE_SIZE)
    table = torch.randperm(rows * pages).to(torch.int32).view(rows, pages).contiguous()
    layout = BatchLayout(
        query_starts=torch.arange(0, (rows + 1) * tokens, tokens, dtype=torch.int32),
        context_lens=torch.full((rows,), context, dtype=torch.int32),
        context_starts=torch.zeros(rows, dtype=torch.int32),
        page_table=table,
        write_mask=torch.ones(rows, dtype=torch.uint8),
    )
    backend, memory = CpuAttention(), HugePages()
    shape = backend.pool_shape(geometry, rows * pages)
    pool_bytes = math.prod(shape) * dtype.itemsize
    source = torch.randn(shape).to(dtype)
    pools = [memory.copy_of(source) for _ in range(copies(pool_bytes))]
    q = torch.randn(rows * tokens, model.num_q_heads, model.head_dim).to(dtype)
    plan = backend.plan(geometry, layout)
    seen = [min(window or context, context - tokens + i + 1) for i in range(tokens)]
    span = min(context, window + tokens - 1) if window else context
    word = f"{model.name} {str(dtype).removeprefix('torch.')}"
    kind = "decode" if tokens == 1 else f"prefill {tokens}"
    limit = f", window {window}" if window else ""
    return Case(
        name=f"attention {word}: {kind} x {rows} at {context}{limit}",
        native=rotating([partial(backend.run, plan, q, p) for p in pools]),
        torch=rotating([partial(gathered_attention, geometry, layout, q, p) for p in pools]),
        num_bytes=pool_bytes * span / (pages * PAGE_SIZE) if tokens == 1 else 0,
        num_flops=4.0 * rows * model.num_q_heads * model.head_dim * sum(seen),
    )


def attention_cases() -> Iterator[Case]:
    """Decode at several batches, prefill chunks, windows, float32."""
    for model in MODELS:
        for rows, context in ((1, 1024), (8, 1024), (32, 1024), (1, 8192)):
            yield attention_case(model, rows, 1, context, 0, torch.bfloat16)
        if model.window:
            yield attention_case(model, 8, 1, 2048, model.window, torch.bfloat16)
            yield attention_case(model, 1, 512, 2048, model.window, torch.bfloat16)
        for context in (512, 2048):
            yield attention_case(model, 1, 512, context, 0, torch.bfloat16)
    yield attention_case(MODELS[0], 1, 1, 1024, 0, torch.float32)
    yield attention_case(MODELS[0], 1, 512, 1024, 0, torch.float32)


# ---- the rest ------------------------------------------------------------------------------------


def linear_case(name: str, rows: int, in_dim: int, out_dim: int) -> Case:
    """One bfloat16 linear layer; torch reads ordinary memory, as its users do."""
    ops, plain = CpuOps(), TorchOps()
    source = torch.randn(out_dim, in_dim).to(torch.bfloat16)
    count = copies(source.nbytes)
    packed = [ops.pack(source) for _ in range(count)]
    weights = [source.clone() for _ in range(count)]
    x = torch.randn(rows, in_dim).to(torch.bfloat16)
    return Case(
        name=f"linear {name}: {rows} x {in_dim} -> {out_dim}",
        native=rotating([partial(ops.linear, x, w) for w in packed]),
        torch=rotating([partial(plain.linear, x, w) for w in weights]),
        num_bytes=source.nbytes,
        num_flops=2.0 * rows * in_dim * out_dim,
    )


def linear_cases() -> Iterator[Case]:
    """The layers of both models at decode batches."""
    for model in MODELS:
        shapes = {
            "gate_up": (model.hidden, 2 * model.inner),
            "down": (model.inner, model.hidden),
            "logits": (model.hidden, model.vocab),
        }
        for name, (in_dim, out_dim) in shapes.items():
            for rows in (1, 8, 32):
                yield linear_case(f"{model.name} {name}", rows, in_dim, out_dim)


def small_cases() -> Iterator[Case]:
    """Norm, rotary embedding, activation and digests: calls of microseconds."""
    ops, plain = CpuOps(), TorchOps()
    for rows in (1, 32, 512):
        x = torch.randn(rows, 576).to(torch.bfloat16)
        weight = torch.ones(576, dtype=torch.bfloat16)
        gate_up = torch.randn(rows, 3072).to(torch.bfloat16)
        q, k = (torch.randn(rows, h, 64).to(torch.bfloat16) for h in (9, 3))
        table, positions = torch.randn(2048, 32), torch.arange(rows)
        yield Case(
            f"add_rms_norm {rows} x 576",
            partial(ops.add_rms_norm, x, x, weight, 1e-5),
            partial(plain.add_rms_norm, x, x, weight, 1e-5),
        )
        yield Case(
            f"gated_act silu {rows} x 1536",
            partial(ops.gated_act, gate_up, "silu"),
            partial(plain.gated_act, gate_up, "silu"),
        )
        yield Case(
            f"rope {rows} x (9 + 3) x 64",
            partial(ops.rope, q, k, table, table, positions),
            partial(plain.rope, q, k, table, table, positions),
        )
    pool = HugePages().copy_of(torch.randn(4096, 2, 3, 16, 64).to(torch.bfloat16))
    blocks = torch.arange(4096, dtype=torch.int32)
    yield Case(
        "digests of 4096 blocks of 12 KiB",
        lambda: block_digests(pool, blocks),
        lambda: numpy_digests(pool, blocks),
        num_bytes=pool.nbytes,
    )


# ---- measuring -----------------------------------------------------------------------------------


def seconds(run: Run) -> float:
    """Return the duration of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def read_limit(repeats: int) -> float:
    """Bytes per second of reading huge pages with the library's own threads.

    Read in parts of a millisecond: longer ones are always interrupted where cores are shared.
    """
    data = HugePages().empty(
        (LIMIT_BYTES // LIMIT_PART_BYTES * 64, LIMIT_PART_BYTES // 64), torch.uint8
    )
    data.fill_(1)
    parts = torch.arange(data.shape[0], dtype=torch.int32).view(-1, 64)
    read = rotating([partial(block_digests, data, part) for part in parts])
    return LIMIT_PART_BYTES / min(seconds(read) for _ in range(4 * repeats))


def measure(case: Case, repeats: int) -> Result:
    """Run both ways in turns and keep the least of each."""
    best = [math.inf, math.inf]
    for _ in range(repeats):
        for i, run in enumerate((case.native, case.torch)):
            best[i] = min(best[i], seconds(run))
    return Result(
        name=case.name,
        native_us=best[0] * 1e6,
        torch_us=best[1] * 1e6,
        bytes_per_s=case.num_bytes / best[0],
        flop_per_s=case.num_flops / best[0],
    )


def row(result: Result, limit: float) -> str:
    """Render one result as a line of the Markdown table."""
    share = f"{result.bytes_per_s / 1e9:.1f} ({result.bytes_per_s / limit:.0%})"
    memory = share if result.bytes_per_s else ""
    flops = f"{result.flop_per_s / 1e12:.3f}" if result.flop_per_s else ""
    ratio = result.torch_us / result.native_us
    times = f"{result.native_us:.1f} | {result.torch_us:.1f} | {ratio:.1f}"
    return f"| {result.name} | {times} | {memory} | {flops} |"


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", default="", help="operations whose name contains this")
    parser.add_argument("--json", type=Path, default=Path("results/kernels.json"))
    args = parser.parse_args()
    native.set_num_threads(args.threads)
    torch.set_num_threads(args.threads)
    limit = read_limit(args.repeats)
    environment = serving.environment() | {
        "instruction_set": native.instruction_set(),
        "threads": args.threads,
    }
    results = []
    for cases in (attention_cases, linear_cases, small_cases):
        for case in cases():
            if args.only in case.name:
                print(case.name, file=sys.stderr, flush=True)
                results.append(measure(case, args.repeats))
    # Measured before and after: the better one is nearer to what the machine can do.
    limit = max(limit, read_limit(args.repeats))
    environment |= {"read_bytes_per_s": limit, "load_average_after": list(os.getloadavg())}
    print("\n".join(f"{key}: {value}" for key, value in environment.items()), end="\n\n")
    print("| operation | native us | torch us | ratio | GB/s (of limit) | TFLOP/s |")
    print("|---|---|---|---|---|---|")
    for result in results:
        print(row(result, limit))
    document = {"environment": environment, "results": [asdict(r) for r in results]}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"\nwritten: {args.json}")


if __name__ == "__main__":
    main()
