"""State that belongs to one position: working blocks, snapshots, and partly filled last pages.

    begin       a working block per snapshot group
    ready       just before a row, the snapshot where it starts is copied into the working block
    checkpoint  the chunk stops at the position; after the step the working block is copied aside
    commit      the copy is handed to the tree, bound to exactly that position (F3, F17)
    end         the working block itself, and the partly filled last page of every other group,
                are handed over: whoever continues the finished request resumes at its exact end

A block handed to the tree is never written again (F16, F18): whoever resumes there copies it.

This module does not decide where checkpoints are.
"""

from __future__ import annotations

from statewise.radix import Match, RadixTree, StaleMatchError, TokenKey, Written
from statewise.radix.need import needs_snapshot
from statewise.radix.node import StateBlock
from statewise.radix.schema import CacheSchema
from statewise.runtime.cache.blocks import Blocks
from statewise.runtime.cache.copies import CopyQueue
from statewise.runtime.cache.sequence import Sequence, Standing
from statewise.runtime.errors import OutOfBlocksError


class Snapshots:
    """Moves blocks of single positions; shares tree, pools and copies with the prefix cache."""

    def __init__(
        self,
        schema: CacheSchema,
        tree: RadixTree,
        blocks: Blocks,
        copies: CopyQueue,
    ) -> None:
        self._schema = schema
        self._tree = tree
        self._blocks = blocks
        self._pools = blocks.pools
        self._copies = copies
        self.groups = tuple(g for g, s in enumerate(schema.groups) if s.kind.is_snapshot)
        self.num_taken = 0
        self.num_skipped = 0  # checkpoints for which no block could be had

    # ---------------------------------------------------------------- begin

    def begin(self, sequence: Sequence, match: Match | None, position: int) -> None:
        """Give a new sequence its working blocks, and the state at `position` in them.

        At a position inside a page the partly filled blocks are copied as well. Raises
        `OutOfBlocksError`; what was taken by then belongs to the sequence.
        """
        taken = self._blocks.take(dict.fromkeys(self.groups, 1))
        for g in self.groups:
            block = sequence.working[g] = int(taken[g][0])
            sequence.tables[g][0] = block
            sequence.generations[g][0] = self._pools[g].generations[block]
        if match is not None and position:
            sequence.standing = Standing(position, self.needed_at(position))
            if position % self._schema.page_size:
                self._copy_partial_page(sequence, match, position)

    def ready(self, sequence: Sequence, written: Written) -> None:
        """Make the working blocks stand where the sequence says they must, before the next row.

        A replay used them as its own, so the snapshot at the position is copied in. Where there is
        none but the replay made the state, it is shared with the tree. Raises `StaleMatchError`
        where a needed snapshot has gone since the match.
        """
        standing, match = sequence.standing, sequence.match
        if standing is None or match is None:
            return
        snapshot = match.snapshot_at(standing.position)
        made = []
        for g in self.groups:
            held = snapshot.block_of(g) if snapshot is not None else None
            if held is not None and self._is_current(held, written):
                self._copies.before(g, held.block, sequence.working[g])
            elif standing.needed >> g & 1:
                if not standing.made >> g & 1:
                    name = self._schema.groups[g].name
                    raise StaleMatchError(f"no {name!r} snapshot at {standing.position} any more")
                made.append(g)
        sequence.standing = None
        self._share(sequence, standing.position, made)

    def _is_current(self, held: StateBlock, written: Written) -> bool:
        """Whether the block still is the one that the match found, and its state valid."""
        same = self._pools[held.group].generations[held.block] == held.generation
        return bool(same) and held.stamp == written.stamps[held.group]

    def needed_at(self, position: int) -> int:
        """Bit per snapshot group that needs state to resume at `position`."""
        specs = self._schema.groups
        return sum(1 << g for g in self.groups if needs_snapshot(specs[g], position))

    def _share(self, sequence: Sequence, position: int, groups: list[int]) -> None:
        """Copy working state aside, to be handed over once the copy has been made."""
        try:
            taken = self._blocks.take(dict.fromkeys(groups, 1))
        except OutOfBlocksError:
            self.num_skipped += 1
            return
        for g in groups:
            block = int(taken[g][0])
            self._copies.before(g, sequence.working[g], block)
            sequence.taken.append((position, g, block))

    def _copy_partial_page(self, sequence: Sequence, match: Match, position: int) -> None:
        page = position // self._schema.page_size
        snapshot = match.terminal_at(position)
        assert snapshot is not None, "a position inside a page is resumed from its snapshot"
        paged = [g for g in range(self._schema.num_groups) if g not in self.groups]
        taken = self._blocks.take(dict.fromkeys(paged, 1))
        for g in paged:
            block = int(taken[g][0])
            sequence.tables[g][page] = block
            sequence.generations[g][page] = self._pools[g].generations[block]
            held = snapshot.block_of(g)
            if held is not None:
                self._copies.before(g, held.block, block)
        sequence.num_pages = page + 1

    # ---------------------------------------------------------------- checkpoints

    def prepare(self, sequence: Sequence, position: int) -> None:
        """Take copies of the working blocks after the next step, which ends at `position`."""
        wanted = [g for g in self.groups if needs_snapshot(self._schema.groups[g], position)]
        try:
            taken = self._blocks.take(dict.fromkeys(wanted, 1))
        except OutOfBlocksError:
            self.num_skipped += 1
            return
        for g in wanted:
            block = int(taken[g][0])
            sequence.taken.append((position, g, block))
            self._copies.after(g, sequence.working[g], block)

    def forgo(self, sequence: Sequence, position: int) -> None:
        """Give back the blocks of a checkpoint that was prepared; its copies are not made."""
        for at, g, block in sequence.taken:
            if at == position:
                self._copies.forget(g, [block])
                self._blocks.free_one(g, block)
        sequence.taken = [taken for taken in sequence.taken if taken[0] != position]

    def commit(self, sequence: Sequence, key: TokenKey, written: Written) -> None:
        """Hand the snapshots that were taken to the tree, where their pages are published."""
        published = sequence.num_published * self._schema.page_size
        for position, g, block in sequence.taken:
            if position > published:
                self._blocks.free_one(g, block)
                continue
            self._hand_over(sequence, key, (position, g, block), written)
            self.num_taken += 1
        sequence.taken.clear()

    def _hand_over(
        self,
        sequence: Sequence,
        key: TokenKey,
        what: tuple[int, int, int],
        written: Written,
    ) -> None:
        """Give a completely written block to the tree."""
        position, g, block = what
        assert sequence.lease is not None
        self._blocks.sums.record(g, block)
        back = self._tree.add_snapshot(sequence.lease, key, position, g, block, written)
        if back is not None:
            self._blocks.free_one(g, back)

    # ---------------------------------------------------------------- end

    def end(self, sequence: Sequence, key: TokenKey, position: int, written: Written) -> None:
        """Hand over what belongs to exactly `position`, the end of what was computed.

        Nothing where the working blocks do not hold it: the request never ran from there.
        """
        page, rest = divmod(position, self._schema.page_size)
        if page != sequence.num_published or not position or sequence.standing is not None:
            return
        for g in self.groups:
            if needs_snapshot(self._schema.groups[g], position):
                self._hand_over(sequence, key, (position, g, sequence.working.pop(g)), written)
                sequence.tables[g][0] = -1
        if not rest or page >= sequence.num_pages:
            return
        for g in range(self._schema.num_groups):
            block = int(sequence.tables[g][page]) if g not in self.groups else -1
            if block >= 0:
                self._hand_over(sequence, key, (position, g, block), written)
                sequence.tables[g][page] = -1
