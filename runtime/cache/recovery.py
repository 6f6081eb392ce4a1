"""Carrying out a recovery plan: private blocks for what a replay writes, then into the tree.

    enter      page tables as the replay's first token needs them
    reserve    private blocks for the pages the next chunk writes (never a shared block)
    pass_by    scratch that no later token reads is freed
    complete   what became exact is handed to the tree; the next replay, or the request, goes on

A replay never writes into a block that anyone else may read: it writes into fresh blocks, which
replace what was missing or invalid only when the whole replay is done. A page whose deeper layers
were valid is copied first, so that a partial-depth forward completes it.

This module does not choose plans and does not run them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from statewise.radix import Match, RadixTree, Written
from statewise.radix.need import first_token
from statewise.radix.plan import Replay
from statewise.radix.schema import CacheSchema
from statewise.radix.segment import BLOCK, GENERATION
from statewise.runtime.cache.blocks import Blocks
from statewise.runtime.cache.copies import CopyQueue
from statewise.runtime.cache.sequence import Sequence
from statewise.runtime.cache.validity import Validity

Int32 = NDArray[np.int32]


class RecoveryExecutor:
    """Moves blocks for replays; shares tree and pools with the prefix cache."""

    def __init__(
        self,
        schema: CacheSchema,
        tree: RadixTree,
        blocks: Blocks,
        copies: CopyQueue,
        validity: Validity,
    ) -> None:
        self.schema = schema
        self._tree = tree
        self._blocks = blocks
        self._pools = blocks.pools
        self._copies = copies
        self._validity = validity

    def forget(self, sequence: Sequence) -> None:
        """Drop copies into blocks that the sequence is about to give back."""
        for g in range(self.schema.num_groups):
            self._copies.forget(g, sequence.owned(g).tolist())

    def adopt(self, sequence: Sequence) -> None:
        """Page tables as the tree has them, for a request at its resume position."""
        self._adopt(sequence, windows=True)

    def adopt_match(self, sequence: Sequence, match: Match, position: int) -> None:
        """Page tables of a request that reuses what `match` found below `position` as it stands.

        Blocks with the generations they were written under: a block that was given away since
        shows when leases are verified.
        """
        page = self.schema.page_size
        pages = sequence.num_published
        for g, spec in enumerate(self.schema.groups):
            if spec.kind.is_snapshot or not pages:
                continue
            first = min(first_token(spec, position) // page, pages) if spec.kind.is_window else 0
            sequence.live_from[g] = first
            for lo, hi in ((0, min(sequence.sink_pages[g], first)), (first, pages)):
                if lo < hi:
                    held = match.pairs(g, lo, hi)
                    sequence.tables[g][lo:hi] = held[BLOCK]
                    sequence.generations[g][lo:hi] = held[GENERATION]

    def enter(self, sequence: Sequence, replay: Replay) -> None:
        """Lay out window tables for a replay that begins at `replay.start`.

        Pages written by earlier replays are read from the private blocks, all others from the
        tree; nothing below the replay's floor.
        """
        page = self.schema.page_size
        assert sequence.lease is not None
        for g, spec in enumerate(self.schema.groups):
            sequence.context_starts[g] = replay.context_floor[g]
            if not spec.kind.is_window:
                continue
            first = max(first_token(spec, replay.start), replay.context_floor[g]) // page
            sinks = min(sequence.sink_pages[g], first)
            own = sequence.repaired.get(g, {})
            self._release(sequence, g, [p for p in own if sinks <= p < first])
            sequence.tables[g][: sequence.num_pages] = -1
            sequence.live_from[g] = first
            blocks, _ = self._tree.pages(sequence.lease, g)
            self._fill(sequence, g, 0, blocks[:sinks])
            self._fill(sequence, g, first, blocks[first : sequence.num_published])
            for p, block in own.items():
                sequence.tables[g][p] = block
                sequence.generations[g][p] = self._pools[g].generations[block]

    def _fill(self, sequence: Sequence, group: int, first: int, blocks: Int32) -> None:
        stop = first + len(blocks)
        sequence.tables[group][first:stop] = blocks
        held = np.where(blocks >= 0, self._pools[group].generations[blocks], 0)
        sequence.generations[group][first:stop] = held

    def reserve(self, sequence: Sequence, replay: Replay, start: int, end: int) -> None:
        """Private blocks for the pages that tokens [start, end) of `replay` write.

        All groups or none; raises `OutOfBlocksError`.
        """
        page = self.schema.page_size
        pages = range(start // page, -(-end // page))
        missing = {
            g: [p for p in pages if p not in sequence.repaired.get(g, {})]
            for g in range(self.schema.num_groups)
            if replay.write_groups >> g & 1 and g not in sequence.snapshot_groups
        }
        taken = self._blocks.take({g: len(wanted) for g, wanted in missing.items()})
        for g, wanted in missing.items():
            for p, block in zip(wanted, taken[g].tolist(), strict=True):
                self._replace(sequence, g, p, block)

    def _replace(self, sequence: Sequence, group: int, page: int, block: int) -> None:
        old = int(sequence.tables[group][page])
        if old >= 0 and self.schema.groups[group].kind.is_history:
            self._copies.before(group, old, block)  # keep the deeper layers
        sequence.repaired.setdefault(group, {})[page] = block
        sequence.tables[group][page] = block
        sequence.generations[group][page] = self._pools[group].generations[block]

    def pass_by(self, sequence: Sequence, replay: Replay, position: int) -> None:
        """Free private window pages that neither later tokens nor the tree will need."""
        page = self.schema.page_size
        for g, spec in enumerate(self.schema.groups):
            if not spec.kind.is_window:
                continue
            first = first_token(spec, position) // page
            keep_from, keep_to = replay.write_back[g]
            own = sequence.repaired.get(g, {})
            sinks = sequence.sink_pages[g]
            gone = [p for p in own if sinks <= p < first and not keep_from <= p < keep_to]
            self._release(sequence, g, gone)
            old = max(sequence.live_from[g], sinks)
            if first > old:
                borrowed = [p for p in range(old, first) if p not in own]
                sequence.tables[g][borrowed] = -1

    def _release(self, sequence: Sequence, group: int, pages: list[int]) -> None:
        if not pages:
            return
        own = sequence.repaired[group]
        self._pools[group].free(np.array([own.pop(p) for p in pages], dtype=np.int32))
        sequence.tables[group][pages] = -1

    def complete(
        self, sequence: Sequence, replay: Replay, after: Replay | None, written: Written
    ) -> None:
        """Hand what the replay made exact to the tree.

        `after` is the next replay, which may read this one's scratch; after the last one all
        scratch is freed. A private sequence keeps its scratch and hands over nothing.
        """
        if sequence.is_private:  # its windows stay in its own blocks until it ends
            return
        self._hand_over(sequence, replay, written)
        if after is not None:
            self._adopt(sequence, windows=False)
            return
        for g in range(self.schema.num_groups):
            self._release(sequence, g, list(sequence.repaired.get(g, {})))
        self._adopt(sequence, windows=True)
        sequence.has_lost_state = self._is_short(sequence)
        assert sequence.lease is not None
        self._tree.advance(sequence.lease, sequence.num_published * self.schema.page_size)

    def _is_short(self, sequence: Sequence) -> bool:
        """Whether state that the sequence relies on was dropped while it recovered."""
        stop = sequence.num_published
        return any(
            bool((sequence.tables[g][sequence.live_from[g] : stop] < 0).any())
            for g in range(self.schema.num_groups)
            if g not in sequence.snapshot_groups
        )

    def _hand_over(self, sequence: Sequence, replay: Replay, written: Written) -> None:
        lo = min((a for a, b in replay.write_back if a < b), default=0)
        hi = max((b for a, b in replay.write_back if a < b), default=0)
        if lo == hi:
            return
        assert sequence.lease is not None
        handed: list[Int32] = []
        for g in range(self.schema.num_groups):
            own = sequence.repaired.get(g, {})
            table = np.full(hi, -1, dtype=np.int32)
            first, stop = replay.write_back[g]
            for p in [p for p in own if first <= p < stop]:
                table[p] = own.pop(p)
            self._blocks.sums.record_pages(g, table)
            handed.append(table)
        outcome = self._tree.restore(sequence.lease, lo, hi, handed, written)
        assert sequence.match is not None
        for duplicates in outcome.duplicates:
            place = (sequence.lease, sequence.match.key, duplicates, written)
            if not self._validity.replace_damaged(*place):
                self._pools[duplicates.group].free(duplicates.own_blocks)
        self._blocks.take_back(outcome.freed, "replaced")

    def _adopt(self, sequence: Sequence, *, windows: bool) -> None:
        """Page tables as the tree has them now, for a request at its resume position."""
        assert sequence.lease is not None
        page = self.schema.page_size
        position = sequence.num_published * page
        for g, spec in enumerate(self.schema.groups):
            if spec.kind.is_snapshot or (spec.kind.is_window and not windows):
                continue
            blocks, _ = self._tree.pages(sequence.lease, g)
            first = first_token(spec, position) // page if spec.kind.is_window else 0
            sequence.tables[g][: sequence.num_published] = -1
            sequence.live_from[g] = first
            sequence.context_starts[g] = 0
            self._fill(sequence, g, 0, blocks[: min(sequence.sink_pages[g], first)])
            self._fill(sequence, g, first, blocks[first : sequence.num_published])
