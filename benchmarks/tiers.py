"""Slower tiers: how fast pages go out and come back, beside what the medium can do.

In one run, on one directory and with the same bytes: a plain sequential write and read of a file
(direct I/O where there is any, the limit), then the same through the transfer engine between
device blocks and each tier, digests included. Codecs are measured on the pages themselves.

Goal: loading from disk at least 80 % of the plain read. Trust ratios, not rates: others share this
machine.

    usage: python benchmarks/tiers.py [--mib N] [--directory DIR] [--json FILE] [--repeats N]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from statewise.kernels.interface import AttentionGeometry
from statewise.kernels.select import select_backend
from statewise.radix.key import Namespace
from statewise.radix.schema import CacheSchema, GroupKind, StateGroupSpec
from statewise.radix.segment import Tier
from statewise.runtime.clock import SystemClock
from statewise.runtime.memory.block_store import DeviceStore
from statewise.runtime.tiers.buffers import allocate
from statewise.runtime.tiers.codec import measure_codecs
from statewise.runtime.tiers.copies import Copier, DevicePage, LoadPage
from statewise.runtime.tiers.device_io import DeviceIO, layer_bytes_of
from statewise.runtime.tiers.disk import DiskOptions, DiskTier
from statewise.runtime.tiers.files import Files
from statewise.runtime.tiers.host import HostTier
from statewise.runtime.tiers.page import GroupShape, shapes_of
from statewise.runtime.tiers.store import TierStore
from statewise.runtime.tiers.tiers import Tiers, all_ok
from statewise.runtime.tiers.transfer import EngineOptions, TransferEngine

PAGE_SIZE = 16
LAYERS = 30  # SmolLM2-135M: 30 layers, 3 K/V heads of 64, bfloat16
GEOMETRY = AttentionGeometry(9, 3, 64, PAGE_SIZE, torch.bfloat16, 0.125)
CHUNK_BYTES = 4 << 20
SAMPLES = 8


def schema() -> CacheSchema:
    """One full-attention group."""
    size = 2 * GEOMETRY.num_kv_heads * GEOMETRY.head_dim * GEOMETRY.dtype.itemsize
    layers = tuple(range(LAYERS))
    group = StateGroupSpec("full", GroupKind.FULL, layers, "bench", "v1", entry_bytes=size)
    return CacheSchema(PAGE_SIZE, LAYERS, (group,), "bench")


def device(num_blocks: int) -> DeviceStore:
    """Blocks filled with normal numbers."""
    backend, _ = select_backend("auto", GEOMETRY.dtype)
    store = DeviceStore(schema(), {"full": GEOMETRY}, backend, [num_blocks])
    for layer in store.groups[0].layers:
        layer.copy_(torch.randn(layer.shape))
    return store


def plain(directory: Path, size: int, repeats: int) -> dict[str, float]:
    """Bytes per second of sequential writes and reads of one file, the best of several."""
    files, buffer = Files(), allocate(CHUNK_BYTES)
    buffer[:] = np.random.default_rng(0).integers(0, 256, CHUNK_BYTES, dtype=np.uint8)
    path = directory / "plain"
    rates: dict[str, float] = {"write": 0.0, "read": 0.0}
    for _ in range(repeats):
        files.remove(path)
        fd = files.create(path, size)

        def write(fd: int = fd) -> None:
            for offset in range(0, size, CHUNK_BYTES):
                files.write(fd, [buffer], offset)
            files.sync(fd)

        def read(fd: int = fd) -> None:
            for offset in range(0, size, CHUNK_BYTES):
                files.read(fd, [buffer], offset)

        rates["write"] = max(rates["write"], size / seconds(write))
        rates["read"] = max(rates["read"], size / seconds(read))
        files.close(fd)
    files.remove(path)
    return rates


def seconds(run: Callable[[], object]) -> float:
    """Time of one run."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


class Bench:
    """One engine over a host and a disk tier."""

    def __init__(self, directory: Path, num_pages: int, threads: int) -> None:
        self.num_pages = num_pages
        self.store = device(2 * num_pages)
        self.shapes = shapes_of(schema(), layer_bytes_of(self.store))
        clock = SystemClock()
        size = num_pages * self.shapes[0].row_bytes
        options = DiskOptions(4 * size + (1 << 28))
        stores: list[TierStore] = [
            HostTier(self.shapes, [num_pages]),
            DiskTier(directory, self.shapes, options, clock),
        ]
        copier = Copier(self.shapes, DeviceIO(self.store), clock)
        engine = TransferEngine(EngineOptions(threads, max_queued_bytes=4 * size), clock)
        self.tiers = Tiers(stores, copier, engine)

    @property
    def shape(self) -> GroupShape:
        """The group."""
        return self.shapes[0]

    def rates(self, tier: Tier, run: int) -> dict[str, float]:
        """Bytes per second of demoting all pages to a tier and loading them into other blocks."""
        chain = self.tiers.chain(Namespace(f"run {run}"))
        tokens = np.arange(self.num_pages * PAGE_SIZE, dtype=np.int32).tobytes()
        chain.extend(tokens)
        where = [self.tiers.address(chain, 0, page) for page in range(self.num_pages)]
        pages = [DevicePage(0, i, address, PAGE_SIZE) for i, address in enumerate(where)]
        size = self.num_pages * self.shape.block_bytes
        demotion = self.tiers.demote(tier, pages)
        assert demotion is not None
        self.tiers.engine.wait(demotion)
        assert all_ok(demotion), demotion.results[0]
        places = self.tiers.find(where)
        loads = [
            LoadPage(0, self.num_pages + i, place.handle, where[i].key)
            for i, place in enumerate(places)
            if place is not None and place.tier is tier
        ]
        load = self.tiers.load(tier, loads)
        self.tiers.engine.wait(load)
        assert load.num_ok == self.num_pages
        self.tiers.engine.poll()
        self.tiers.free([place for place in places if place is not None])
        return {"write": size / demotion.seconds, "read": size / load.seconds}


def best(runs: list[dict[str, float]]) -> dict[str, float]:
    """Best of several: others' load only ever takes away."""
    return {name: max(run[name] for run in runs) for name in runs[0]}


def codec_figures(bench: Bench, read_bytes_per_s: float) -> list[dict[str, float | str]]:
    """Codecs on pages of this device."""
    rows = bench.tiers.stores[Tier.DISK].stage("full", SAMPLES)
    DeviceIO(bench.store).read(0, list(range(SAMPLES)), rows)
    samples = [row.data.copy() for row in rows]
    bench.tiers.stores[Tier.DISK].discard(rows)
    figures = measure_codecs(samples, GEOMETRY.dtype.itemsize, read_bytes_per_s, SystemClock())
    return [
        {
            "codec": f.name,
            "ratio": round(f.ratio, 3),
            "encode_gb_per_s": round(f.encode_bytes_per_s / 1e9, 2) if f.name != "none" else 0.0,
            "decode_gb_per_s": round(f.decode_bytes_per_s / 1e9, 2) if f.name != "none" else 0.0,
            "load_gb_per_s": round(1e-9 / f.load_s_per_byte, 2),
        }
        for f in figures
    ]


def show(report: dict[str, object]) -> None:
    """Print a table."""
    rates: dict[str, dict[str, float]] = report["bytes_per_s"]  # type: ignore[assignment]
    print(f"{'':<12}{'write GB/s':>12}{'read GB/s':>12}{'of plain':>10}")
    limit = rates["plain"]
    for name, one in rates.items():
        share = one["read"] / limit["read"]
        print(f"{name:<12}{one['write'] / 1e9:>12.2f}{one['read'] / 1e9:>12.2f}{share:>10.0%}")
    print()
    for figures in report["codecs"]:  # type: ignore[attr-defined]
        print("  ".join(f"{name} {value}" for name, value in figures.items()))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--mib", type=int, default=256, help="bytes moved each way, in MiB")
    parser.add_argument("--directory", type=Path, help="on the disk to measure")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=3, help="of loads")
    args = parser.parse_args()
    size = args.mib << 20
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        bench = Bench(Path(folder) / "cache", size // (368 << 10), args.threads)
        rates: dict[str, dict[str, float]] = {}
        plains, disks, hosts = [], [], []
        for run in range(args.repeats):  # side by side, so that load hits all alike
            plains.append(plain(Path(folder), size, 1))
            disks.append(bench.rates(Tier.DISK, run))
            hosts.append(bench.rates(Tier.HOST, run))
        rates = {"plain": best(plains), "disk": best(disks), "host": best(hosts)}
        report: dict[str, object] = {
            "load_average": os.getloadavg(),
            "mib": args.mib,
            "bytes_per_s": rates,
            "read_share_of_plain": rates["disk"]["read"] / rates["plain"]["read"],
            "codecs": codec_figures(bench, rates["plain"]["read"]),
        }
        bench.tiers.close()
    show(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
