"""What goes into the tree's operations and what they hand back.

Block ids of one group come as one int32 array. Whoever receives a block here owns it: the tree has
forgotten it.

This module does not decide anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from statewise.radix.forms import Cause, Form
from statewise.radix.segment import Tier

Int32 = NDArray[np.int32]
UInt64 = NDArray[np.uint64]
NO_BLOCKS: Int32 = np.empty(0, dtype=np.int32)
NO_BLOCKS.flags.writeable = False


class StaleMatchError(Exception):
    """What a match relied on has left the tree since: match again and plan anew."""


class SlowBlock(NamedTuple):
    """A block of a slower tier."""

    group: int
    tier: Tier
    block: int


class Freed(NamedTuple):
    """Blocks that left the tree: device blocks per group, and blocks of slower tiers.

    Arrays are not to be written to.
    """

    blocks: tuple[Int32, ...]
    slow: tuple[SlowBlock, ...] = ()

    def num(self, group: int) -> int:
        """Device blocks of `group`."""
        return len(self.blocks[group])

    def __bool__(self) -> bool:
        return bool(self.slow) or any(len(b) for b in self.blocks)


class FreedBuilder:
    """Collects what an operation frees."""

    __slots__ = ("counts", "parts", "slow")

    def __init__(self, num_groups: int) -> None:
        self.parts: list[tuple[int, Int32]] = []
        self.counts = [0] * num_groups
        self.slow: list[SlowBlock] = []

    def add(self, group: int, blocks: Int32) -> None:
        """Add device blocks (none of them -1)."""
        self.parts.append((group, blocks))
        self.counts[group] += len(blocks)

    def add_one(self, group: int, block: int) -> None:
        """Add one device block."""
        self.add(group, np.array([block], dtype=np.int32))

    def done(self) -> Freed:
        """Everything collected; arrays may share memory with segments, which never change."""
        num_groups = len(self.counts)
        if not self.parts and not self.slow:
            return nothing_freed(num_groups)
        joined: list[Int32] = [NO_BLOCKS] * num_groups
        several: dict[int, list[Int32]] = {}
        for group, blocks in self.parts:
            if joined[group] is NO_BLOCKS:
                joined[group] = blocks
            else:
                several.setdefault(group, [joined[group]]).append(blocks)
        for group, parts in several.items():
            joined[group] = np.concatenate(parts)
        return Freed(tuple(joined), tuple(self.slow))


@cache
def nothing_freed(num_groups: int) -> Freed:
    """No block of any group."""
    return Freed((NO_BLOCKS,) * num_groups)


@dataclass(frozen=True, slots=True)
class Written:
    """How the blocks handed to `publish` came to be.

    `stamps` and `seq` hold for all of them. `generations[group]` is the pool's own array of
    generations, indexed by block; `checksums[group]` is [blocks of the pool, layers of the group]
    (both are read during the call, not kept). None: zeros, and no checksums. `forms[group]` is what
    the writer wrote into that group's blocks; a form of another kind raises (None: not checked).
    `cause`: computed (PUBLISH), or copied back from a slower tier (LOAD).
    """

    stamps: tuple[int, ...]
    seq: int
    generations: tuple[Int32 | None, ...] | None = None
    checksums: tuple[UInt64, ...] | None = None
    forms: tuple[Form, ...] | None = None
    cause: Cause = Cause.PUBLISH

    def of_group(self, group: int) -> Int32 | None:
        """Look up the generation array of `group`."""
        return None if self.generations is None else self.generations[group]

    def sums_of(self, group: int, blocks: Int32) -> UInt64 | None:
        """[n, layers] checksums of `blocks`, zeros where a block is -1; None if none are kept."""
        if self.checksums is None:
            return None
        return np.where((blocks >= 0)[:, None], self.checksums[group][blocks], np.uint64(0))


class Duplicates(NamedTuple):
    """Pages of one group that the tree already had: use the tree's block, free your own."""

    group: int
    pages: Int32  # [n] absolute page indices, ascending
    tree_blocks: Int32  # [n]
    tree_generations: Int32  # [n]
    own_blocks: Int32  # [n] the caller's again


class Published(NamedTuple):
    """Outcome of `publish`: the lease covers `num_pages` pages now.

    `num_pages` below what was asked: the state was written under stamps that are no longer
    current; nothing was taken, the pages stay the caller's.
    """

    num_pages: int
    duplicates: tuple[Duplicates, ...]
    freed: Freed
