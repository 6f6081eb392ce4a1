"""What copies to and from slower tiers cost a request that decodes.

    writing     state is copied out all the time          alone, writing, alone, loading, alone, ...
    loading     state is copied from disk all the time    windows of one request's tokens, in turn
    restore     the prompts' pages are loaded from disk until it was 1 GiB: the way that requests'
                loads take, into blocks that nothing is computed in meanwhile
    arrivals    the prompts themselves arrive: loaded, then computed and decoded in the same batches

Windows alternate within one run, so that what others do on the machine hits all kinds alike; the
figure is the median over the rounds of each window's median, beside the windows alone before and
after it. Copies are queued again as soon as they ended: how often one was open is reported.

    usage: python benchmarks/tier_decoding.py [--model NAME] [--rounds N] [--prompts N]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tier_serving import Bench

from statewise.radix import Namespace, TokenKey
from statewise.radix.segment import Tier
from statewise.runtime.cache.tiering import Tiering
from statewise.runtime.tiers.copies import LoadPage
from statewise.runtime.tiers.transfer import Transfer

WINDOW = 60  # tokens of one window
LOAD_PAGES = 400  # of one load, at most
RESTORE_BYTES = 1 << 30


class Copies:
    """Keeps copies going while a request decodes; counts steps and bytes."""

    def __init__(self, tiering: Tiering) -> None:
        self.tiering = tiering
        self.engine = tiering.tiers.engine
        self.steps = self.busy = 0

    def count(self) -> None:
        """Between two steps."""
        self.steps += 1
        self.busy += self.engine.num_open > 0

    def step(self) -> None:
        """Nothing is copied."""
        self.count()

    def end(self) -> None:
        """The window is over."""

    @property
    def bytes_done(self) -> int:
        """Bytes copied."""
        return 0


class Writing(Copies):
    """Copies the same paths out again and again."""

    def __init__(self, tiering: Tiering, paths: Sequence[tuple[Namespace, TokenKey, int]]) -> None:
        super().__init__(tiering)
        self.paths = paths
        self._forget()
        self._before = self._written()

    def _forget(self) -> None:
        for tier, store in self.tiering.tiers.stores.items():
            if tier is not Tier.DISK:
                store.free(store.all_handles())
        self.tiering.mirror.clear()

    def step(self) -> None:
        """Queue the paths again where nothing is left to copy."""
        self.count()
        if not self.tiering.is_busy:
            self._forget()
            for path in self.paths:
                self.tiering.demotion.note(*path)

    def end(self) -> None:
        """Call off what is open."""
        self.tiering.demotion.forget_paths()
        for transfer in self.engine.open_transfers():
            self.engine.cancel(transfer)
        self.engine.drain()
        self.tiering.deliver()

    def _written(self) -> int:
        return sum(s.counters.get("bytes_written", 0) for s in self.tiering.tiers.status())

    @property
    def bytes_done(self) -> int:
        """Bytes copied."""
        return self._written() - self._before


class Loading(Copies):
    """Loads the same pages from disk into blocks of its own, again and again."""

    def __init__(self, tiering: Tiering, pages: Sequence[LoadPage]) -> None:
        super().__init__(tiering)
        self.pages = pages
        self.transfers: list[Transfer] = []

    def step(self) -> None:
        """Have two loads open: one runs while the other waits for its turn."""
        self.count()
        while sum(not t.is_done for t in self.transfers[-2:]) < 2:
            self.transfers.append(self.tiering.tiers.load(Tier.DISK, self.pages))

    def end(self) -> None:
        """Call off what is open."""
        for transfer in self.transfers:
            self.engine.cancel(transfer)
        self.engine.drain()
        self.tiering.deliver()

    @property
    def bytes_done(self) -> int:
        """Bytes copied."""
        page = self.transfers[0].size_bytes // len(self.pages) if self.transfers else 0
        return sum(t.num_ok for t in self.transfers) * page


class Decoder:
    """One request that decodes, and the times of its tokens."""

    def __init__(self, bench: Bench, num_tokens: int) -> None:
        self.core = bench.core
        self.rid = bench.add(bench.prompt(64), num_tokens)
        self.times: list[float] = []
        while len(self.times) < 16:
            self.step()

    def step(self) -> bool:
        """One step of the engine; whether the request got a token."""
        before = len(self.times)
        for delta in self.core.step():
            if delta.rid == self.rid and delta.token_ids:
                self.times.append(time.perf_counter())
        return len(self.times) > before

    def window(self, before_step: Callable[[], None], tokens: int) -> list[float]:
        """Seconds between tokens; the first two are left out: what begins a window is not it."""
        first = len(self.times)
        while len(self.times) < first + tokens:
            before_step()
            self.step()
        return np.diff(self.times[first + 1 :]).tolist()

    def end(self) -> None:
        """Let it finish."""
        self.core.abort(self.rid)
        while self.core.has_work():
            self.core.step()


def quantiles(gaps: Sequence[float]) -> dict[str, float]:
    """Milliseconds."""
    p50, p99 = (1e3 * float(np.quantile(gaps, q)) for q in (0.5, 0.99))
    return {
        "tokens": len(gaps), "p50_ms": round(p50, 2), "p99_ms": round(p99, 2),
        "max_ms": round(1e3 * max(gaps), 2), "mean_ms": round(1e3 * statistics.fmean(gaps), 2),
    }  # fmt: skip


class Figures:
    """Prompts whose state is cached and stored, and the windows over them."""

    def __init__(self, bench: Bench, length: int, count: int) -> None:
        self.bench = bench
        tiering = bench.core.cache.tiering
        assert tiering is not None
        self.tiering = tiering
        self.paths: list[tuple[Namespace, TokenKey, int]] = []
        note = tiering.demotion.note

        def noted(namespace: Namespace, key: TokenKey, resume_at: int = 0) -> None:
            self.paths.append((namespace, key, resume_at))
            note(namespace, key, resume_at)

        tiering.demotion.note = noted  # type: ignore[method-assign]
        self.prompts = [bench.prompt(length) for _ in range(count)]
        for prompt in self.prompts:
            bench.first(prompt)
            bench.settle()
        tiering.demotion.note = note  # type: ignore[method-assign]

    def pages_on_disk(self, path: int, at_most: int) -> list[LoadPage]:
        """Pages of a prompt, and blocks for them that the cache does not use."""
        namespace, key, _ = self.paths[path]
        names = self.tiering.stored.names(namespace, key)
        count = min(at_most, len(key) // self.bench.core.cache.schema.page_size)
        stored = [self.tiering.stored.page_address(names, 0, page) for page in range(count)]
        handles = self.tiering.tiers.stores[Tier.DISK].find([a.key for a in stored])
        blocks = self.bench.core.cache.pools[0].allocate(count).tolist()
        return [
            LoadPage(0, block, handle, address.key)
            for block, handle, address in zip(blocks, handles, stored, strict=True)
        ]

    def windows(self, rounds: int) -> dict[str, Any]:
        """Rounds of alone, writing, alone, loading."""
        pages = self.pages_on_disk(0, LOAD_PAGES)
        kinds: dict[str, Callable[[], Copies]] = {
            "writing": lambda: Writing(self.tiering, self.paths),
            "loading": lambda: Loading(self.tiering, pages),
        }
        decoder = Decoder(self.bench, 4 * (rounds + 1) * (WINDOW + 2) + 100)
        rows: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
        pooled: dict[str, list[float]] = {"alone": [], **{kind: [] for kind in kinds}}
        alone = decoder.window(lambda: None, WINDOW)
        for _ in range(rounds):
            for kind, make in kinds.items():
                copies = make()
                began = time.perf_counter()
                gaps = decoder.window(copies.step, WINDOW)
                seconds = time.perf_counter() - began
                done = copies.bytes_done
                copies.end()
                after = decoder.window(lambda: None, WINDOW)
                base = statistics.median([*alone, *after])
                rows[kind].append({
                    "ratio": statistics.median(gaps) / base, "base_ms": 1e3 * base,
                    "busy": copies.busy / copies.steps, "mb_per_s": done / seconds / 1e6,
                })  # fmt: skip
                pooled[kind] += gaps
                pooled["alone"] += after
                alone = after
        decoder.end()
        self.bench.settle()
        return {
            kind: {
                "median_ratio": round(statistics.median(r["ratio"] for r in found), 4),
                "ratios": [round(r["ratio"], 3) for r in found],
                "busy_share": round(statistics.fmean(r["busy"] for r in found), 3),
                "mb_per_s": round(statistics.fmean(r["mb_per_s"] for r in found), 1),
                **quantiles(pooled[kind]),
            }
            for kind, found in rows.items()
        } | {"alone": quantiles(pooled["alone"])}

    def restore(self) -> dict[str, Any]:
        """The pages of all prompts are loaded once while a request decodes."""
        self.bench.forget(Tier.HOST)
        loads = [self.pages_on_disk(i, 1 << 30) for i in range(len(self.paths))]
        decoder = Decoder(self.bench, 4000)
        alone = decoder.window(lambda: None, WINDOW)
        first = len(decoder.times) - 1
        began = time.perf_counter()
        done: list[Transfer] = []
        while sum(transfer.size_bytes for transfer in done) < RESTORE_BYTES:
            done += [self.tiering.tiers.load(Tier.DISK, pages) for pages in loads]
            while not all(transfer.is_done for transfer in done):
                decoder.step()
        seconds = time.perf_counter() - began
        gaps = np.diff(decoder.times[first:]).tolist()
        alone += decoder.window(lambda: None, WINDOW)
        decoder.end()
        assert all(t.num_ok == t.num_pages for t in done), "a page did not arrive"
        size = sum(transfer.size_bytes for transfer in done)
        for pages in loads:
            blocks = np.array([page.block for page in pages], dtype=np.int32)
            self.bench.core.cache.pools[0].free(blocks)
        return {
            "seconds": round(seconds, 3), "mib": size >> 20,
            "mb_per_s": round(size / seconds / 1e6, 1),
            "ratio": round(statistics.median(gaps) / statistics.median(alone), 3),
            "during": quantiles(gaps), "alone": quantiles(alone),
        }  # fmt: skip

    def arrivals(self) -> dict[str, Any]:
        """All prompts come back from disk while a request decodes."""
        self.bench.forget(Tier.HOST)
        decoder = Decoder(self.bench, 2000)
        alone = decoder.window(lambda: None, WINDOW)
        disk = self.tiering.tiers.stores[Tier.DISK]
        before = disk.status().counters.get("bytes_read", 0)
        began = time.perf_counter()
        waiting = {self.bench.add(prompt, 1) for prompt in self.prompts}
        gaps: list[float] = []
        levels: dict[str, int] = {}
        while waiting:
            last = len(decoder.times)
            for delta in self.core_step(decoder):
                if delta.rid in waiting and delta.finish is not None:
                    waiting.remove(delta.rid)
                    source = str(delta.report.loaded_from if delta.report else None)
                    levels[source] = levels.get(source, 0) + 1
            gaps += np.diff(decoder.times[last - 1 :]).tolist()
        seconds = time.perf_counter() - began
        read = disk.status().counters.get("bytes_read", 0) - before
        alone += decoder.window(lambda: None, WINDOW)
        decoder.end()
        return {
            "seconds": round(seconds, 3), "mib_read": read >> 20, "loaded_from": levels,
            "during": quantiles(gaps), "alone": quantiles(alone),
        }  # fmt: skip

    def core_step(self, decoder: Decoder) -> list[Any]:
        """One step, the decoder's tokens timed."""
        deltas = self.bench.core.step()
        for delta in deltas:
            if delta.rid == decoder.rid and delta.token_ids:
                decoder.times.append(time.perf_counter())
        return deltas


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--length", type=int, default=8000, help="tokens of a stored prompt")
    parser.add_argument("--prompts", type=int, default=6, help="that are stored, then restored")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="on the disk to measure")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        more = args.prompts * args.length
        bench = Bench(args.model, Path(folder) / "cache", args.length, more)
        report: dict[str, Any] = {
            "model": args.model, "cores": os.cpu_count(), "load_average": os.getloadavg(),
            "prompts": args.prompts, "length": args.length,
        }  # fmt: skip
        figures = Figures(bench, args.length, args.prompts)
        report["windows"] = figures.windows(args.rounds)
        report["restore"] = figures.restore()
        report["arrivals"] = figures.arrivals()
        report["load_average_after"] = os.getloadavg()
        bench.core.close()
    print(json.dumps(report, indent=1))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
