"""What a hit costs the control plane, and which part of it is validation: lookup and begin.

    lookup      key, match, validate, plan
    begin       lease, page tables
    validation  what a hit takes more than one whose `validate` says yes without looking

Through the real prefix cache with block numbers alone: no tensors, no forward pass. The prefix is
computed in chunks, as a scheduler would, so the tree holds it in several nodes. Hits with and
without validation take turns, and the share is that of the median difference.

Twice: hits back to back, whose code and data are still in the processor's caches but for what a
megabyte of tokens displaced; and hits with 32 MB read between them, as a server's are, where a step
reads all weights between two lookups.

    usage: python benchmarks/hit.py [--tokens 131072] [--repeats 500] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from statewise.radix import CacheSchema, CostModel, GroupKind, StateGroupSpec, validate
from statewise.runtime.cache import validity
from statewise.runtime.cache.prefix_cache import PrefixCache
from statewise.runtime.messages import CacheOptions

Int32 = NDArray[np.int32]
CHUNK = 2048  # tokens of one step
WINDOW = 512  # tokens
READ_BETWEEN = 32 << 20  # bytes: several times what a core caches for itself
EVERYONE = CacheOptions()


def schema_of(page: int, window: int) -> CacheSchema:
    """One group of full history, and one of a window unless it is 0."""
    full = StateGroupSpec("full", GroupKind.FULL, (0,), "layout", "v1", entry_bytes=512)
    groups = [full]
    if window:
        kind = GroupKind.WINDOW
        groups.append(
            StateGroupSpec("window", kind, (1,), "layout", "v1", entry_bytes=512, window=window)
        )
    return CacheSchema(page, 2, tuple(groups), "digest")


def computed(page: int, window: int, tokens: Int32) -> PrefixCache:
    """Make a cache that has computed `tokens` in chunks, twice as large as they need."""
    schema = schema_of(page, window)
    room = 2 * len(tokens) // page + 64
    cost = CostModel.uniform(schema.num_layers, 5000.0, chunk=CHUNK)
    cache = PrefixCache(schema, (room,) * schema.num_groups, cost)
    run = cache.begin(cache.lookup(EVERYONE, tokens, 0), len(tokens))
    for end in range(CHUNK, len(tokens) + 1, CHUNK):
        cache.reserve(run, end)
        cache.commit(run, tokens, end, end, [])
    cache.finish(run, tokens, len(tokens))
    cache.audit()
    return cache


def one_hit(cache: PrefixCache, tokens: Int32, limit: int) -> tuple[float, float]:
    """Seconds of (lookup, begin); the hit is given back outside of both."""
    start = time.perf_counter()
    found = cache.lookup(EVERYONE, tokens, limit)
    looked = time.perf_counter()
    run = cache.begin(found, len(tokens))
    begun = time.perf_counter()
    assert run.num_published * cache.schema.page_size >= limit - cache.schema.page_size
    cache.cancel(run)
    return looked - start, begun - looked


def unchecked(*_: Any) -> tuple[()]:
    """Stand in for `validate`: everything passes."""
    return ()


def one_unchecked_hit(cache: PrefixCache, tokens: Int32, limit: int) -> tuple[float, float]:
    """`one_hit` without validation."""
    vars(validity)["validate"] = unchecked
    try:
        return one_hit(cache, tokens, limit)
    finally:
        vars(validity)["validate"] = validate


def measure(
    page: int, window: int, num_tokens: int, repeats: int, between: Callable[[], object]
) -> dict[str, float]:
    """Medians in microseconds; `between` runs before each hit."""
    tokens = np.random.default_rng(7).integers(0, 100_000, num_tokens + 64, dtype=np.int32)
    cache = computed(page, window, tokens[:num_tokens])
    gc.collect()
    gc.disable()
    hits, unchecked_s = [], []
    for _ in range(repeats):
        between()
        hits.append(one_hit(cache, tokens, num_tokens))
        between()
        unchecked_s.append(sum(one_unchecked_hit(cache, tokens, num_tokens)))
    gc.enable()
    lookup, begin = (statistics.median(part) * 1e6 for part in zip(*hits, strict=True))
    whole_s = [sum(hit) for hit in hits]
    total = statistics.median(whole_s) * 1e6
    more = [a - b for a, b in zip(whole_s, unchecked_s, strict=True)]
    check = statistics.median(more) * 1e6
    return {
        "page": page,
        "window": window,
        "tokens": num_tokens,
        "lookup_us": lookup,
        "begin_us": begin,
        "total_us": total,
        "validation_us": check,
        "share": check / total,
    }


def nothing() -> None:
    """Between hits back to back."""


def main() -> None:
    """Measure three page sizes, with and without a window, back to back and between steps."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--repeats", type=int, default=500)
    parser.add_argument("--json", default="", help="write the figures here")
    args = parser.parse_args()
    print(
        f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, "
        f"Python {sys.version.split()[0]}"
    )
    weights = np.ones(READ_BETWEEN // 8, dtype=np.int64)
    cells: list[dict[str, Any]] = []
    for name, between in (("back to back", nothing), ("between steps", weights.sum)):
        for page in (256, 64, 16):
            for window in (0, WINDOW):
                cell = measure(page, window, args.tokens, args.repeats, between)
                cells.append({"hits": name, **cell})
                print(
                    f"{name:13}  page {page:3} window {window:4}: "
                    f"lookup {cell['lookup_us']:6.1f} + begin {cell['begin_us']:6.1f} us, "
                    f"validation {cell['validation_us']:5.1f} us: {cell['share']:.1%}"
                )
    if args.json:
        report = {"load": os.getloadavg()[0], "python": sys.version, "cells": cells}
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=2)


if __name__ == "__main__":
    main()
