"""Which device blocks rest on lossy copies: loaded from one, or computed from state that does.

    load      a block that came back from a slower tier
    follow    a request that reads such a block is marked, and so is whatever it hands over

A block is known by its generation, as in `mirror`: a mark is void by itself once the block was
freed. Where slower tiers keep every bit nothing is marked, and all of this costs nothing.

Marks are for reports: whether a request may read such state at all is decided by stamps and
namespaces. This module knows nothing of copies.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from statewise.radix import CacheSchema, Match
from statewise.radix.lossy import is_lossy
from statewise.runtime.cache.sequence import Sequence
from statewise.runtime.memory.block_pool import BlockPool

Int32 = NDArray[np.int32]
Bool = NDArray[np.bool_]
NEVER = -1


class Lineage:
    """Marks of all pools' blocks; `is_kept` where the schema's state may be approximate."""

    def __init__(self, schema: CacheSchema, pools: tuple[BlockPool, ...]) -> None:
        self.is_kept = is_lossy(schema)
        self._page_size = schema.page_size
        self._pools = pools
        sizes = [pool.num_blocks if self.is_kept else 0 for pool in pools]
        self._marks = [np.full(size, NEVER, dtype=np.int64) for size in sizes]

    def mark(self, group: int, blocks: Int32) -> None:
        """These blocks, as they are now, rest on lossy copies."""
        if self.is_kept:
            self._marks[group][blocks] = self._pools[group].generations[blocks]

    def has(self, group: int, blocks: Int32) -> Bool:
        """[n] whether blocks (-1 for none) rest on lossy copies."""
        if not self.is_kept:
            return np.zeros(len(blocks), dtype=np.bool_)
        same = self._marks[group][blocks] == self._pools[group].generations[blocks]
        marked: Bool = same & (blocks >= 0)
        return marked

    def num_tokens(self, match: Match, position: int) -> int:
        """Tokens below `position` of which any group's state on the device rests on lossy copies.

        All of them where state that belongs to exactly this position does.
        """
        if not self.is_kept or not position:
            return 0
        here = match.snapshot_at(position)
        held = [] if here is None else [here.block_of(g) for g in range(len(self._pools))]
        if any(b and self.has(b.group, np.array([b.block], dtype=np.int32))[0] for b in held):
            return position
        pages = np.zeros(position // self._page_size, dtype=np.bool_)
        for group, spec in enumerate(match.schema.groups):
            if not spec.kind.is_snapshot:
                marked = self.has(group, match.blocks(group)[: len(pages)])
                pages[: len(marked)] |= marked
        return int(np.count_nonzero(pages)) * self._page_size

    def follow(self, sequence: Sequence) -> None:
        """Count what a sequence reads; mark the blocks of one that reads marked ones.

        To be called before it hands anything over.
        Pages that others have handed over meanwhile count as well: it goes on with their blocks.
        """
        if not self.is_kept:
            return
        groups = range(len(self._pools))
        if not sequence.num_lossy:
            pages = [np.count_nonzero(self.has(g, sequence.view(g))) for g in groups]
            sequence.num_lossy = int(max(pages)) * self._page_size
        if sequence.num_lossy:
            for group in groups:
                self.mark(group, sequence.owned(group))
