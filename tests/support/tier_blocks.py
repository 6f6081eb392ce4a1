"""Device blocks for tests of transfers: numpy arrays, which a test may poison, delay or damage."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from statewise.runtime.tiers.buffers import Row
from statewise.runtime.tiers.checksums import layer_digests
from statewise.runtime.tiers.page import GroupShape

Digests = NDArray[np.uint64]


class ArrayBlocks:
    """A `BlockIO` over arrays [num_blocks, block_bytes]. `before(kind)` runs before each copy."""

    def __init__(self, shapes: Sequence[GroupShape], num_blocks: int) -> None:
        self.shapes = tuple(shapes)
        self.pools = [np.full((num_blocks, s.block_bytes), 0xEE, dtype=np.uint8) for s in shapes]
        self.before: Callable[[str], None] = lambda _kind: None
        self.after_write: Callable[[int, Sequence[int]], None] = lambda _group, _blocks: None
        self.threads: set[str] = set()

    def _digests(self, group: int, blocks: Sequence[int]) -> Digests:
        layers = self.shapes[group].num_layers
        return np.stack([layer_digests(self.pools[group][block], layers) for block in blocks])

    def read(self, group: int, blocks: Sequence[int], rows: Sequence[Row]) -> Digests:
        self.before("read")
        self.threads.add(threading.current_thread().name)
        digests = self._digests(group, blocks)
        for block, row in zip(blocks, rows, strict=False):
            row.data[:] = self.pools[group][block]
        return digests

    def write(self, group: int, blocks: Sequence[int], rows: Sequence[Row]) -> Digests:
        self.before("write")
        self.threads.add(threading.current_thread().name)
        for block, row in zip(blocks, rows, strict=True):
            self.pools[group][block] = row.data
        self.after_write(group, blocks)
        return self._digests(group, blocks)

    def write_from_file(self, *_args: object) -> None:
        """Takes rows from memory alone."""
