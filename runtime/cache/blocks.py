"""Where blocks come from: free ones first, then whatever the tree can do without.

`take` gives all groups what they need or none anything, however an allocation may fail: a half
reserved page would belong to nobody.

This module does not know what a block is for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from statewise.radix import Freed, Match, RadixTree
from statewise.runtime.cache.checksums import BlockChecksums
from statewise.runtime.cache.counters import CacheCounters
from statewise.runtime.cache.lineage import Lineage
from statewise.runtime.errors import OutOfBlocksError
from statewise.runtime.memory.block_pool import BlockPool

Int32 = NDArray[np.int32]
Bool = NDArray[np.bool_]


class Blocks:
    """The device pools, with the tree as their reserve; `sums` are their blocks' checksums."""

    def __init__(
        self,
        tree: RadixTree,
        pools: tuple[BlockPool, ...],
        sums: BlockChecksums,
        counters: CacheCounters,
    ) -> None:
        self.pools = pools
        self.sums = sums
        self.lineage = Lineage(tree.schema, pools)
        # Whether blocks have a copy in a slower tier, so that an eviction loses nothing.
        self.has_copy: Callable[[int, Int32], Bool] | None = None
        self._tree = tree
        self._counters = counters

    def available(self) -> tuple[int, ...]:
        """Free plus evictable blocks per group."""
        return tuple(p.num_free + self._tree.evictable(g) for g, p in enumerate(self.pools))

    def spare(self, match: Match) -> tuple[int, ...]:
        """Blocks per group that could be had beside the history of `match`."""
        evictable = self._tree.evictable_beside(match)
        return tuple(p.num_free + evictable[g] for g, p in enumerate(self.pools))

    def take(self, wanted: Mapping[int, int]) -> dict[int, Int32]:
        """Allocate `wanted[group]` blocks of every group named, evicting where needed.

        Raises `OutOfBlocksError`, naming the short group, and then nothing was taken.
        """
        for group, count in wanted.items():
            self._make_room(group, count)
        taken: dict[int, Int32] = {}
        try:
            for group, count in wanted.items():
                taken[group] = self.pools[group].allocate(count)
        except OutOfBlocksError:
            for group, blocks in taken.items():
                self.pools[group].free(blocks)
            raise
        return taken

    def _make_room(self, group: int, count: int) -> None:
        pool = self.pools[group]
        if pool.num_free >= count:
            return
        missing = count - pool.num_free - pool.num_parked
        if missing > 0:
            freed = self._tree.evict(group, missing)
            for g, blocks in enumerate(freed.blocks):
                self._count_evicted(g, blocks, "room" if g == group else "follows")
            self._free(freed)
        if pool.num_free < count:
            raise OutOfBlocksError(pool.group, count, pool.num_free)

    def _count_evicted(self, group: int, blocks: Int32, cause: str) -> None:
        demoted = 0
        if self.has_copy is not None and len(blocks):
            demoted = int(np.count_nonzero(self.has_copy(group, blocks)))
        self._counters.left(group, "demoted", demoted)
        self._counters.left(group, cause, len(blocks) - demoted)

    def take_back(self, freed: Freed, cause: str) -> None:
        """Free what the tree has let go; `cause` is a word for the counters."""
        for group, blocks in enumerate(freed.blocks):
            self._counters.left(group, cause, len(blocks))
        self._free(freed)

    def _free(self, freed: Freed) -> None:
        for pool, blocks in zip(self.pools, freed.blocks, strict=True):
            pool.free(blocks)

    def free_one(self, group: int, block: int) -> None:
        """Free one block."""
        self.pools[group].free(np.array([block], dtype=np.int32))
