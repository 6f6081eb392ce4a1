"""What this machine can do at most: memory bandwidth and matrix products, on the threads in use.

A figure means little without the limit beside it. Printed as JSON by a process of its own, so
that torch and its thread pool are gone before anything else is measured.

    usage: python benchmarks/limits.py [--threads N]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch

READ_BYTES = 512 << 20
SIDE = 2048
REPEATS = 7


def best_seconds(run: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the shortest of several runs: others' load only ever adds."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def read_bandwidth() -> float:
    """Bytes per second of reading memory far larger than the caches."""
    data = torch.ones(READ_BYTES // 4, dtype=torch.float32)
    return READ_BYTES / best_seconds(lambda: data.sum())


def matmul_flops(dtype: torch.dtype) -> float:
    """Floating-point operations per second of a square product."""
    a = torch.randn(SIDE, SIDE).to(dtype)
    b = torch.randn(SIDE, SIDE).to(dtype)
    return float(2 * SIDE**3 / best_seconds(lambda: a @ b))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--threads", type=int, default=0, help="0: torch's default")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    print(
        json.dumps(
            {
                "threads": torch.get_num_threads(),
                "read_bytes_per_s": read_bandwidth(),
                "matmul_bf16_flops": matmul_flops(torch.bfloat16),
                "matmul_f32_flops": matmul_flops(torch.float32),
            }
        )
    )


if __name__ == "__main__":
    main()
