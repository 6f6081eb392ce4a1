"""Kill a writer of the disk tier at random moments, many times, and look at what is left.

Each round a child process writes pages, evicts and reads, and is killed with SIGKILL after a random
time; then the directory is opened again and every page that is found must have exactly the bytes
that its key decides, fetched as well as loaded into blocks (by the native library where it runs).
Rounds go on in the same directory, so later ones begin with what earlier ones left. Nothing may be
found damaged either: a killed process loses no byte that it had written.

    usage: python tools/torture_disk.py [--count N] [--seed S] [--directory DIR] [--longest-s T]

Prints one line of JSON; exit status 1 if a page was wrong or damaged.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from statewise.kernels import native
from statewise.kernels.blocks import BlockRows
from statewise.radix.key import Namespace
from statewise.radix.stamp import Stamp
from statewise.runtime.clock import SystemClock
from statewise.runtime.tiers.blocks import Digests, FileRun
from statewise.runtime.tiers.buffers import Bytes, Row
from statewise.runtime.tiers.checksums import layer_digests
from statewise.runtime.tiers.disk import DiskOptions, DiskTier
from statewise.runtime.tiers.page import (
    GroupShape,
    PageAddress,
    PageRecord,
    PrefixChain,
    content_of,
)
from statewise.runtime.tiers.store import NO_HANDLE, Outcome

SHAPE = GroupShape("full", Stamp("torture", "v1", "layout"), 4, 3000, 4)
SEQUENCES = 40
PAGES = 12  # of a sequence
OPTIONS = DiskOptions(budget_bytes=4 << 20, extent_bytes=512 << 10)


def addresses(sequence: int) -> list[PageAddress]:
    """Pages of a sequence, by number."""
    chain = PrefixChain(Namespace("torture"), SHAPE.page_size)
    chain.extend(np.arange(sequence * 1000, sequence * 1000 + 4 * PAGES, dtype=np.int32).tobytes())
    return [chain.address(SHAPE, page) for page in range(PAGES)]


def payload(address: PageAddress) -> Bytes:
    """What a page must hold."""
    rng = np.random.default_rng(int.from_bytes(address.key, "little"))
    return rng.integers(0, 256, SHAPE.block_bytes, dtype=np.uint8)


def write_forever(directory: Path, seed: int, ready: int) -> None:
    """The child: write, free and read until it is killed."""
    rng = random.Random(seed)
    disk = DiskTier(directory, [SHAPE], OPTIONS, SystemClock())
    os.write(ready, b"!")
    while True:
        where = addresses(rng.randrange(SEQUENCES))
        rows = disk.stage("full", PAGES)
        pages = []
        for address, row in zip(where, rows, strict=True):
            row.data[:] = payload(address)
            digests = layer_digests(row.data, SHAPE.num_layers)
            record = PageRecord(address, 4, digests, content_of(digests), 0, time.time())
            pages.append((record, row))
        handles = disk.commit(pages)
        disk.release(disk.fetch(handles[:3]))
        if rng.random() < 0.3:
            disk.free(handles[::2])


class Blocks:
    """A `BlockIO` over blocks for one sequence."""

    def __init__(self) -> None:
        memory = np.zeros((SHAPE.num_layers, PAGES, SHAPE.layer_bytes), dtype=np.uint8)
        self.layers = list(torch.from_numpy(memory))
        self._native = BlockRows(self.layers) if native.is_available() else None

    def read(self, group: int, blocks: Sequence[int], rows: Sequence[Row]) -> Digests:
        """See `BlockIO`."""
        for block, row in zip(blocks, rows, strict=True):
            row.data[:] = self.block(block)
        return np.stack([layer_digests(row.data, SHAPE.num_layers) for row in rows])

    def write(self, group: int, blocks: Sequence[int], rows: Sequence[Row]) -> Digests:
        """See `BlockIO`."""
        for block, row in zip(blocks, rows, strict=True):
            parts = row.data.reshape(SHAPE.num_layers, -1)
            for layer, part in zip(self.layers, parts, strict=True):
                layer[block].numpy()[:] = part
        return np.stack([layer_digests(self.block(block), SHAPE.num_layers) for block in blocks])

    def write_from_file(
        self, group: int, blocks: Sequence[int], run: FileRun, buffer: Bytes, heads: Bytes
    ) -> Digests | None:
        """See `BlockIO`."""
        if self._native is None:
            return None
        wanted = np.array(blocks, dtype=np.int32)
        return self._native.read_records(
            wanted, run.fd, run.offset, run.record_bytes, buffer, heads
        )

    def block(self, number: int) -> Bytes:
        """Bytes of a block, layer after layer."""
        return np.concatenate([layer[number].numpy() for layer in self.layers])


def load(disk: DiskTier, handles: Sequence[int], where: Sequence[PageAddress]) -> Counter[str]:
    """Load pages into blocks and compare them."""
    seen: Counter[str] = Counter()
    blocks = Blocks()
    for run in disk.plain_runs("full", handles, [address.key for address in where]):
        for i, is_good in zip(run.indices, run.load(blocks, 0, run.indices), strict=True):
            if not is_good:
                seen["damaged_load"] += 1
            elif (blocks.block(i) == payload(where[i])).all():
                seen["loaded"] += 1
            else:
                seen["wrong"] += 1
    if seen.total() < len(handles):  # every page here is plain, and so in some run
        seen["damaged_load"] += len(handles) - seen.total()
    return seen


def look(directory: Path) -> Counter[str]:
    """Open what is left and compare every page."""
    seen: Counter[str] = Counter()
    disk = DiskTier(directory, [SHAPE], OPTIONS, SystemClock())
    for sequence in range(SEQUENCES):
        where = addresses(sequence)
        handles = disk.find([address.key for address in where])
        fetched = disk.fetch([handle for handle in handles if handle != NO_HANDLE])
        there = [a for a, h in zip(where, handles, strict=True) if h != NO_HANDLE]
        seen += load(disk, [handle for handle in handles if handle != NO_HANDLE], there)
        for one, address in zip(fetched, there, strict=True):
            if one.outcome is not Outcome.OK or one.row is None or one.record is None:
                seen[f"damaged_{one.outcome.value}"] += 1
            elif not (one.row.data == payload(address)).all():
                seen["wrong"] += 1
            else:
                seen["whole"] += 1
        disk.release(fetched)
    seen["index_rebuilt"] += disk.status().counters.get("index_rebuilt", 0)
    disk.close()
    return seen


def kill_one(directory: Path, rng: random.Random, longest_s: float) -> None:
    """One round: a child that writes, killed at a random moment."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            write_forever(directory, rng.randrange(1 << 30), writer)
        finally:
            os._exit(3)
    os.close(writer)
    started = os.read(reader, 1)
    time.sleep(rng.uniform(0, longest_s))
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    os.close(reader)
    if not started or not os.WIFSIGNALED(status):
        raise RuntimeError("the child ended by itself")


def main(argv: list[str] | None = None) -> int:
    """Run rounds and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=1000, help="kills (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="decides the moments")
    parser.add_argument("--directory", type=Path, help="where (default: a temporary folder)")
    parser.add_argument("--longest-s", type=float, default=0.25, help="a child lives at most this")
    args = parser.parse_args(argv)
    rng = random.Random(args.seed)
    total: Counter[str] = Counter()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        for _ in range(args.count):
            kill_one(Path(folder) / "cache", rng, args.longest_s)
            total.update(look(Path(folder) / "cache"))
    seconds = round(time.monotonic() - start, 1)
    print(json.dumps({"kills": args.count, "seconds": seconds, **total}))
    return 1 if total["wrong"] or any(word.startswith("damaged") for word in total) else 0


if __name__ == "__main__":
    sys.exit(main())
