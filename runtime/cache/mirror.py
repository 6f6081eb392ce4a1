"""Which device blocks have a copy in a slower tier, and which block a copy was made of.

A block is known by its generation, so a mark is void by itself once the block was freed. A tier
that drops a page on its own takes the mark away: the page counts as not copied, and may be copied
again before the device needs its room.

The address of a copy's origin is kept until another page is copied out of that block: after that
it says nothing, and there are never more of them than blocks.

This module does not copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from statewise.runtime.memory.block_pool import BlockPool

Int32 = NDArray[np.int32]
Bool = NDArray[np.bool_]
NEVER = -1


class Mirror:
    """Marks of all pools' blocks."""

    def __init__(self, pools: tuple[BlockPool, ...]) -> None:
        self._pools = pools
        self._marks = [np.full(pool.num_blocks, NEVER, dtype=np.int64) for pool in pools]
        self._keys: list[dict[int, bytes]] = [{} for _ in pools]  # block -> key of its copy
        self._places: dict[bytes, tuple[int, int]] = {}  # key -> group, block

    def has(self, group: int, blocks: Int32) -> Bool:
        """[n] whether a block's present content has a copy."""
        same: Bool = self._marks[group][blocks] == self._pools[group].generations[blocks]
        return same

    def mark(self, group: int, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        """These blocks have copies of these names."""
        generations = self._pools[group].generations
        for block, key in zip(blocks, keys, strict=True):
            old = self._keys[group].get(block)
            if old is not None and self._places.get(old) == (group, block):
                del self._places[old]
            self._keys[group][block] = key
            self._places[key] = (group, block)
            self._marks[group][block] = generations[block]

    def forget(self, key: bytes) -> None:
        """The copy of this name is gone."""
        place = self._places.pop(key, None)
        if place is not None:
            group, block = place
            self._marks[group][block] = NEVER
            self._keys[group].pop(block, None)

    def origin(self, key: bytes) -> tuple[int, int] | None:
        """(group, device block) that the copy of this name was made of, or was loaded into."""
        return self._places.get(key)

    def dump(self) -> dict[str, list[dict[str, Any]]]:
        """By group: blocks that copies were made of, and whether the page still lies there."""
        out: dict[str, list[dict[str, Any]]] = {}
        for group, pool in enumerate(self._pools):
            keys = self._keys[group]
            same = self.has(group, np.array(list(keys), dtype=np.int32))
            out[pool.group] = [
                {"block": block, "name": key.hex(), "on_device": there}
                for (block, key), there in zip(keys.items(), same.tolist(), strict=True)
            ]
        return out

    def clear(self) -> None:
        """All copies are gone."""
        for marks, keys in zip(self._marks, self._keys, strict=True):
            marks[:] = NEVER
            keys.clear()
        self._places.clear()
