"""A running request's blocks in order, per group: its page tables and who owns what.

    page      0 ........ num_published ........ num_pages
              |  tree's blocks, leased  |  own blocks  |

A window group's entries below `live_from[g]` are -1: those blocks went back (to the tree or the
pool) when the window moved on. Pages of sink tokens, [0, sink_pages[g]), stay. Snapshot groups
keep their working block at index 0.

This module does not allocate or free: `PrefixCache` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from statewise.radix import CacheSchema, Lease, Match, Namespace

Int32 = NDArray[np.int32]


class Standing(NamedTuple):
    """Where the working blocks must stand before the next row, and where the state comes from."""

    position: int
    needed: int  # bit per snapshot group whose state at the position is needed
    made: int = 0  # bit per group whose working block holds it already


class Sequence:
    """Page tables of one admitted request; owned by the prefix cache."""

    def __init__(self, schema: CacheSchema, capacity_pages: int, namespace: Namespace) -> None:
        sizes = [1 if g.kind.is_snapshot else capacity_pages for g in schema.groups]
        self.namespace = namespace
        self.snapshot_groups = frozenset(
            g for g, spec in enumerate(schema.groups) if spec.kind.is_snapshot
        )
        self.tables: list[Int32] = [np.full(n, -1, dtype=np.int32) for n in sizes]
        # Pool generation of each table entry when it was taken: checked before every step.
        self.generations: list[Int32] = [np.zeros(n, dtype=np.int32) for n in sizes]
        self.num_pages = 0  # pages with blocks
        self.num_published = 0  # pages whose blocks belong to the tree
        self.live_from: list[int] = [0] * len(sizes)  # first page that may hold a block
        page = schema.page_size
        self.sink_pages = tuple(
            -(-g.sinks // page) if g.kind.is_window else 0 for g in schema.groups
        )
        self.context_starts: list[int] = [0] * len(sizes)  # first position that may be read
        self.lease: Lease | None = None
        self.match: Match | None = None  # what it began from
        self.began_from = 0  # first page whose state it may have written
        self.is_private = False  # what it computes is approximate: the tree gets nothing of it
        self.num_lossy = 0  # tokens it reads whose state rests on lossy copies of slower tiers
        self.is_recovering = False  # replays are still to run
        self.standing: Standing | None = None  # None: the working blocks are as they must be
        self.has_lost_state = False  # what its recovery counted on was dropped meanwhile
        self.last_recall = 0  # failures known when it was last looked at
        # Blocks a repair wrote below num_published, per group: page -> own block.
        self.repaired: dict[int, dict[int, int]] = {}
        self.working: dict[int, int] = {}  # snapshot group -> working block
        self.taken: list[tuple[int, int, int]] = []  # snapshots not in the tree yet:
        # (position, group, block)

    def views(self) -> tuple[Int32, ...]:
        """Page tables up to the last page with a block."""
        return tuple(self.view(g) for g in range(len(self.tables)))

    def view(self, group: int) -> Int32:
        """One group's page table up to the last page with a block; its working block."""
        table = self.tables[group]
        return table if group in self.snapshot_groups else table[: self.num_pages]

    def owned(self, group: int) -> Int32:
        """Blocks of `group` that belong to this request alone."""
        if group in self.snapshot_groups:
            single = [block for _, g, block in self.taken if g == group]
            single += [self.working[group]] if group in self.working else []
            return np.array(single, dtype=np.int32)
        own = self.tables[group][self.num_published : self.num_pages]
        own = own[own >= 0]
        extra = self.repaired.get(group)
        if extra:
            own = np.concatenate([own, np.fromiter(extra.values(), dtype=np.int32)])
        return own
