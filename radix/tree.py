"""The radix tree: which state exists for which token prefix, who protects it, what goes first.

    match    look up a key; changes nothing                                -> Match
    lease    protect exactly what resuming at a position needs             -> Lease
    publish  hand finished pages over; pages the tree has are duplicates   -> Published
    advance  the request moved on: its window moves                        (also done by publish)
    keep     retain the trailing window at a position (a checkpoint)
    release  give the lease back, exactly once
    evict    free blocks of one group: never leased ones, never more than needed

The tree owns every block handed to it until it hands it back in a `Freed`. Time is a counter.
Each operation on one request costs the same however long the prefix is, beyond the walk of the
match; eviction never looks for its victim.

This module does not move bytes, know pools, or choose a recovery.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from statewise.radix import picture
from statewise.radix.audit import audit
from statewise.radix.forms import Cause, EventSink, Ledger, check_write, check_writes
from statewise.radix.key import TOKEN_BYTES, Namespace, TokenKey
from statewise.radix.lease import Lease, Pinned, minus, ranges_of
from statewise.radix.match import Match
from statewise.radix.need import needs_snapshot, protected_pages
from statewise.radix.node import Checkpoint, Node, StateBlock
from statewise.radix.policy import EvictionPolicy, ValuePolicy
from statewise.radix.publication import Publisher
from statewise.radix.results import (
    NO_BLOCKS,
    Freed,
    FreedBuilder,
    Published,
    StaleMatchError,
    Written,
)
from statewise.radix.schema import CacheSchema
from statewise.radix.segment import BLOCK, GENERATION, SEQ_MASK
from statewise.radix.topology import Topology
from statewise.radix.trailing import Trailing

Int32 = NDArray[np.int32]


class RadixTree:
    """Prefix tree with state groups. `stamps[group]` is the write version that counts as valid."""

    def __init__(
        self,
        schema: CacheSchema,
        stamps: Sequence[int] | None = None,
        events: EventSink | None = None,
        policy: EvictionPolicy | None = None,
    ) -> None:
        """`policy` decides what goes first; None: the default one."""
        self.schema = schema
        self.policy = policy or ValuePolicy()
        self.ledger = Ledger(schema, events)  # changes of form, counted
        self.stamps = tuple(stamps) if stamps is not None else (0,) * schema.num_groups
        if len(self.stamps) != schema.num_groups:
            raise ValueError(f"{len(self.stamps)} stamps for {schema.num_groups} groups")
        self.trailing = Trailing(schema, self.policy)
        self.topology = Topology(schema, self.trailing, self.stamps)
        self.trailing.on_emptied = self.topology.prune
        self._publisher = Publisher(self.topology, self.trailing, self.ledger)
        self._windows = self.trailing.windows
        self._page_size = schema.page_size

    @property
    def version(self) -> int:
        """Moves whenever something leaves the tree."""
        return self.topology.version

    def expect(self, stamps: Sequence[int]) -> None:
        """From now on only state written under `stamps` (one per group) is valid.

        Old state stays until it is replaced or evicted; no scan, no flush.
        """
        if len(stamps) != self.schema.num_groups:
            raise ValueError(f"{len(stamps)} stamps for {self.schema.num_groups} groups")
        self.stamps = tuple(stamps)
        self.topology.stamps = self.stamps
        self.topology.history_stamps = tuple(self.stamps[g] for g in self.topology.history)
        self.topology.version += 1

    # ---------------------------------------------------------------- match and lease

    def match(self, namespace: Namespace, key: TokenKey) -> Match:
        """Longest prefix of `key` in whole pages, and the snapshots along it. Read only.

        Cap the reuse by capping the key: its last token is matched like any other.
        """
        return self.topology.walk(
            Match(self.schema, self.stamps, self.topology.version, namespace, key)
        )

    def lease(
        self,
        match: Match,
        position: int,
        repairing: Collection[int] = (),
        read_from: int | None = None,
    ) -> Lease:
        """Protect what resuming at `position` (tokens) needs, and refresh only that.

        `repairing` names groups that the caller will rebuild: what they still have is protected,
        nothing of theirs is required. With `read_from`, windows are protected from where a resume
        at that earlier position would read them (a replay starts there) until `advance` or
        `publish` moves them. Raises ValueError where another group cannot resume at
        `position` even after a load, StaleMatchError where what the match relied on has gone
        since (match again and plan anew). Nothing is protected when it raises.
        """
        page, rest = divmod(position, self._page_size)
        if rest or page != match.intersection()[0]:
            self._check_able(match, position, repairing)
        if match.version != self.topology.version:
            match = self._renew(match, position, read_from)
        top = self.topology
        node = top.boundary_node(match.nodes[-1], page) if page else top.root(match.namespace)
        top.lock(node)
        lease = Lease(match.namespace, match, node, position)
        for index, group in enumerate(self._windows):
            pinned = self._pinned(group, position, read_from)
            lease.pinned.append(pinned)
            for start, stop in ranges_of(pinned):
                self.trailing.lock(node, index, start, stop)
        if node.checkpoints:
            self._start_from(lease, node, page, position)
        return lease

    def _pinned(self, group: int, position: int, read_from: int | None) -> Pinned:
        """Pages of a window group that a lease at `position` protects, back to `read_from`."""
        spec, size = self.schema.groups[group], self._page_size
        sinks, lo, hi = protected_pages(spec, position, position // size, size)
        if read_from is not None and read_from < position:
            lo = min(lo, protected_pages(spec, read_from, hi, size)[1])
        return min(sinks, lo), lo, hi

    @staticmethod
    def _check_able(match: Match, position: int, repairing: Collection[int]) -> None:
        for group, spec in enumerate(match.schema.groups):
            if group not in repairing and not match.resumable_at(group, position, after_load=True):
                raise ValueError(f"group {spec.name!r} cannot resume at {position}: {match!r}")

    def _start_from(self, lease: Lease, node: Node, page: int, position: int) -> None:
        """Hold the checkpoint at `position`, if there is one."""
        tail = lease.match.key.data[page * self._page_size * TOKEN_BYTES : position * TOKEN_BYTES]
        checkpoint = node.checkpoints.get((page, tail))
        if checkpoint is not None:
            self.trailing.lock_checkpoint(checkpoint)
            lease.checkpoint = checkpoint

    def _renew(self, match: Match, position: int, read_from: int | None) -> Match:
        """Match again; the same state must still be there for everything needed."""
        fresh = self.match(match.namespace, match.key)
        page = position // self._page_size
        same = fresh.logical_pages >= page and fresh.stamps == match.stamps
        if same and position:
            same = self._same_pages(match, fresh, position, read_from)
            mine, theirs = match.snapshot_at(position), fresh.snapshot_at(position)
            if same and mine is not None:
                same = theirs is not None and set(mine.blocks) <= set(theirs.blocks)
        if not same:
            raise StaleMatchError(f"state below {position} has left the tree since the match")
        return fresh

    def _same_pages(self, match: Match, fresh: Match, position: int, read_from: int | None) -> bool:
        page = position // self._page_size
        for group, spec in enumerate(self.schema.groups):
            if spec.kind.is_snapshot:
                continue
            lo, sinks = 0, 0
            if spec.kind.is_window:
                sinks, lo, _ = self._pinned(group, position, read_from)
            for rows in (Match.blocks, Match.generations, Match.tiers):
                old, new = rows(match, group), rows(fresh, group)
                if not np.array_equal(old[lo:page], new[lo:page]):
                    return False
                if not np.array_equal(old[:sinks], new[:sinks]):
                    return False
        return True

    # ---------------------------------------------------------------- a request's life

    def publish(
        self,
        lease: Lease,
        key: TokenKey,
        num_pages: int,
        tables: Sequence[Int32],
        written: Written,
        position: int,
    ) -> Published:
        """Hand pages [lease.num_published_pages, num_pages) to the tree, which owns them now.

        `tables[group]` holds the request's blocks by page, -1 where it has none (a window page
        already gone; snapshot groups' tables are not read); everything handed over is completely
        written. Where the tree has a valid page its block stays and yours comes back as a
        duplicate; where it has none, or one of another stamp, yours is taken. Then advances to
        `position`. Raises FormError where `written` names another form than a group holds.
        """
        assert not lease.released, "publish on a released lease"
        if written.forms is not None:
            check_writes(self.schema, written.forms)
        freed = FreedBuilder(self.schema.num_groups)
        if written.stamps != self.stamps:
            return Published(lease.num_published_pages, (), freed.done())
        assert key.num_tokens >= num_pages * self._page_size, "the key covers what is published"
        duplicates = self._publisher.publish(lease, key, num_pages, tables, written, freed)
        self._move(lease, position)
        return Published(lease.num_published_pages, duplicates, freed.done())

    def restore(
        self, lease: Lease, start: int, stop: int, tables: Sequence[Int32], written: Written
    ) -> Published:
        """Hand over repaired pages [start, stop) below what the lease has published.

        Same rules as `publish`; tables hold -1 for what was not repaired.
        """
        assert not lease.released, "restore on a released lease"
        if written.forms is not None:
            check_writes(self.schema, written.forms)
        assert stop <= lease.num_published_pages, "restore only what is published"
        freed = FreedBuilder(self.schema.num_groups)
        if written.stamps != self.stamps:
            return Published(start, (), freed.done())
        found = self._publisher.restore(lease, start, stop, tables, written, freed)
        return Published(lease.num_published_pages, found, freed.done())

    def advance(self, lease: Lease, position: int) -> None:
        """Move the protected window to where the request stands, `position` tokens.

        Pages that fell out stay cached until evicted. The checkpoint it started from is let go
        once it has moved past it.
        """
        assert not lease.released, "advance on a released lease"
        self._move(lease, position)

    def _move(self, lease: Lease, position: int) -> None:
        for index, group in enumerate(self._windows):
            spec = self.schema.groups[group]
            new = protected_pages(spec, position, lease.num_published_pages, self._page_size)
            if new != lease.pinned[index]:
                self._repin(lease, index, new)
        lease.position = position
        if lease.checkpoint is not None and position > lease.checkpoint.position:
            self.trailing.unlock_checkpoint(lease.checkpoint)
            lease.checkpoint = None

    def _repin(self, lease: Lease, index: int, new: Pinned) -> None:
        old = lease.pinned[index]
        lease.pinned[index] = new
        node, lock = lease.node, self.trailing.lock
        if not new[0] and not old[0] and new[1] >= old[1] and new[2] >= old[2]:  # moved on
            lock(node, index, max(new[1], old[2]), new[2])
            lock(node, index, old[1], min(new[1], old[2]), -1)
            return
        for start, stop in minus(new, old):
            lock(node, index, start, stop)
        for start, stop in minus(old, new):
            lock(node, index, start, stop, -1)

    def release(self, lease: Lease) -> Freed:
        """Give the lease back, exactly once. Returns blocks whose freeing waited for it."""
        assert not lease.released, "a lease is released exactly once"
        lease.released = True
        freed = FreedBuilder(self.schema.num_groups)
        for index, pinned in enumerate(lease.pinned):
            for start, stop in ranges_of(pinned):
                self.trailing.lock(lease.node, index, start, stop, -1)
        if lease.checkpoint is not None:
            self.trailing.unlock_checkpoint(lease.checkpoint)
            lease.checkpoint = None
        self.topology.unlock(lease.node, freed)
        return freed.done()

    def pages(self, lease: Lease, group: int) -> tuple[Int32, Int32]:
        """(blocks, generations) [num_published_pages] of one group as the tree has them now."""
        parts: list[Int32] = []
        node: Node | None = self.topology.node_at(lease.node, lease.num_published_pages)
        while node is not None and node.parent is not None:
            parts.append(node.segments[group].table[: GENERATION + 1])
            node = node.parent
        if not parts:
            return NO_BLOCKS, NO_BLOCKS
        parts.reverse()
        pairs = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        return pairs[BLOCK], pairs[GENERATION]

    # ---------------------------------------------------------------- checkpoints

    def keep(self, lease: Lease, position: int, reason: str = "end") -> bool:
        """Retain the trailing windows at the page boundary at or below `position`.

        False where one of their pages is not resident: nothing is kept then.
        """
        page = position // self._page_size
        assert not lease.released, "keep on a released lease"
        assert page <= lease.num_published_pages, "keep only what is published"
        if not page:
            return True
        node = self.topology.node_at(lease.node, page)
        boundary = page * self._page_size
        kept = self.trailing.kept_at(boundary, page)
        for index, group in enumerate(self._windows):
            if not self.trailing.has_pages(node, index, kept[index], self.stamps[group]):
                return False
        if any(lo < hi for ranges in kept for lo, hi in ranges):
            self.trailing.add_checkpoint(node, page, b"", boundary, reason, kept)
        return True

    def add_snapshot(
        self,
        lease: Lease,
        key: TokenKey,
        position: int,
        group: int,
        block: int,
        written: Written,
    ) -> int | None:
        """Hand over the one block of `group` that belongs to exactly `position`.

        A snapshot of a tail or recurrent group, or, where `position` lies inside a page, the
        partly filled last page of any other group (whoever resumes there copies it first). All
        pages below must be published. Returns the block that the caller must free: its own where
        the tree has a valid one, a replaced one, or None.
        """
        page, rest = divmod(position, self._page_size)
        assert not lease.released, "add_snapshot on a released lease"
        assert page <= lease.num_published_pages, "snapshots stand on published pages"
        spec = self.schema.groups[group]
        if written.forms is not None:
            check_write(self.schema, group, written.forms[group])
        if not (spec.kind.is_snapshot or rest):
            raise ValueError(f"group {spec.name!r} has whole pages at {position}: publish them")
        if spec.kind.is_snapshot and not needs_snapshot(spec, position):
            return block
        if written.stamps != self.stamps:
            return block
        node = self.topology.node_at(lease.node, page) if page else self._root_of(lease)
        tail = key.data[page * self._page_size * TOKEN_BYTES : position * TOKEN_BYTES]
        checkpoint = self.trailing.add_checkpoint(node, page, tail, position, "snapshot")
        generations = written.of_group(group)
        generation = 0 if generations is None else int(generations[block])
        sums = written.sums_of(group, np.array([block], dtype=np.int32))
        held = StateBlock(
            group,
            block,
            generation,
            written.stamps[group],
            written.seq & SEQ_MASK,
            () if sums is None else tuple(sums[0].tolist()),
        )
        return self._hold(checkpoint, held, node, written.cause)

    def _root_of(self, lease: Lease) -> Node:
        return self.topology.root(lease.namespace)

    def _hold(
        self, checkpoint: Checkpoint, held: StateBlock, node: Node, cause: Cause
    ) -> int | None:
        known = checkpoint.block_of(held.group)
        if known is None:
            self.ledger.note(held.group, cause, 1)
            self.trailing.add_block(checkpoint, held)
            return None
        if known.stamp == held.stamp:
            return held.block if known.block != held.block else None
        self.ledger.note(held.group, Cause.REPLACE, 1)
        old = self.trailing.take_block(checkpoint, held.group)
        self.topology.version += 1
        self.trailing.add_block(checkpoint, held)
        if checkpoint.locks:
            self.topology.condemn(node, held.group, known.block)
            return None
        return old

    # ---------------------------------------------------------------- freeing

    def evictable(self, group: int) -> int:
        """Device blocks of `group` that `evict` could free now. O(1)."""
        return self.trailing.evictable[group]

    def evictable_beside(self, match: Match) -> tuple[int, ...]:
        """Blocks per group that `evict` could free after the history of `match` was leased."""
        spare = list(self.trailing.evictable)
        for node, size in zip(match.nodes, match.node_sizes(), strict=True):
            if not node.protect and self.topology.holds(node):
                whole = size >= node.num_pages
                for group in self.topology.history:
                    segment = node.segments[group]
                    spare[group] -= (segment if whole else segment.part(0, size)).num_present
        return tuple(spare)

    def evict(self, group: int, num_blocks: int) -> Freed:
        """Free at least `num_blocks` device blocks of `group`, or as many as are evictable.

        History goes from the tails of the leaves that the policy names first, with everything that
        stands on it; windows and snapshots go without their history. The result names what every
        group lost. Leased state is never touched.
        """
        freed = FreedBuilder(self.schema.num_groups)
        kind = self.schema.groups[group].kind
        if kind.is_history:
            self._evict_history(group, num_blocks, freed)
        elif kind.is_window:
            if self.policy.whole_leaves:
                self._evict_leaves(group, num_blocks, freed)
            self.trailing.evict_window(group, num_blocks, freed)
        else:
            self.trailing.evict_snapshots(group, num_blocks, freed)
        if any(freed.counts):
            self.topology.version += 1
            self.ledger.note_all(freed.counts, Cause.EVICT)
        return freed.done()

    def _evict_history(self, group: int, num_blocks: int, freed: FreedBuilder) -> None:
        top = self.topology
        while freed.counts[group] < num_blocks:
            terminal = self.trailing.least_score(group)
            leaf = top.leaves.first()
            if terminal is not None and (leaf is None or terminal <= top.leaves.score_of(leaf)):
                self.trailing.evict_snapshots(group, freed.counts[group] + 1, freed)
            elif leaf is not None:
                top.take_leaf(leaf, group, num_blocks - freed.counts[group], freed)
            else:
                return

    def _evict_leaves(self, group: int, num_blocks: int, freed: FreedBuilder) -> None:
        """Take whole leaves until enough of `group` is free."""
        top = self.topology
        while freed.counts[group] < num_blocks and (leaf := top.leaves.first()) is not None:
            top.take_leaf(leaf, group, num_blocks - freed.counts[group], freed)

    def drop(self, match: Match, group: int, places: Iterable[int]) -> Freed:
        """Forget state that failed validation; nobody finds it from now on.

        `places` are pages of the match, or positions in tokens for a snapshot group. What has
        been replaced since the match stays. A block that a lease may still read is freed when
        the last such lease is released.
        """
        freed = FreedBuilder(self.schema.num_groups)
        if self.schema.groups[group].kind.is_snapshot:
            for position in places:
                self._drop_snapshot(match, group, position, freed)
        else:
            self._publisher.drop(
                match, self.match(match.namespace, match.key), group, places, freed
            )
        self.topology.version += 1
        return freed.done()

    def drop_at(self, match: Match, group: int, position: int) -> Freed:
        """Forget the block of `group` that belongs to exactly `position`, as `drop` does.

        A snapshot, or the partly filled last page that a terminal position keeps.
        """
        freed = FreedBuilder(self.schema.num_groups)
        self._drop_snapshot(match, group, position, freed)
        self.topology.version += 1
        return freed.done()

    def mark_invalid(self, match: Match, group: int, layers: Mapping[int, int]) -> None:
        """Mark single layers of pages as not to be used: page of the match -> bit per layer.

        The block stays, so that its other layers can be kept when it is rebuilt; a match no
        longer finds the page usable. What has been replaced since the match stays valid.
        """
        fresh = self.match(match.namespace, match.key)
        self._publisher.mark(match, fresh, group, layers)

    def _drop_snapshot(self, match: Match, group: int, position: int, freed: FreedBuilder) -> None:
        found = match.snapshot_at(position)
        checkpoint = None if found is None else found.checkpoint
        if found is None or checkpoint is None or checkpoint.node is None:
            return
        held = checkpoint.block_of(group)
        if held is None or held != found.block_of(group):
            return
        self.trailing.take_block(checkpoint, group)
        self.ledger.note(group, Cause.DROP, 1)
        if checkpoint.locks:
            self.topology.condemn(checkpoint.node, group, held.block)
            return
        freed.add_one(group, held.block)
        if not checkpoint.blocks and not any(checkpoint in o for o in self.trailing.checkpoints):
            node = checkpoint.node
            self.trailing.remove_checkpoint(checkpoint, freed)
            self.topology.prune(node)

    def flush(self) -> Freed:
        """Free everything that no lease protects."""
        freed = FreedBuilder(self.schema.num_groups)
        top = self.topology
        while top.recency:
            node = next(iter(top.recency))
            top.take_tail(node, node.start, freed)
        for group in self._windows:
            self.trailing.evict_window(group, 1 << 62, freed)
        for group in range(self.schema.num_groups):
            self.trailing.evict_snapshots(group, 1 << 62, freed)
        top.version += 1
        self.ledger.note_all(freed.counts, Cause.FLUSH)
        return freed.done()

    # ---------------------------------------------------------------- inspection

    def blocks(self, group: int) -> Int32:
        """Every device block of `group` that the tree owns, condemned ones included, unordered."""
        parts: list[Int32] = []
        for _, node in self.topology.nodes():
            blocks = node.segments[group].table[BLOCK]
            single = [c.block for c in node.condemned if c.group == group]
            for checkpoint in node.checkpoints.values():
                held = checkpoint.block_of(group)
                if held is not None:
                    single.append(held.block)
            parts.append(blocks[blocks >= 0])
            parts.append(np.array(single, dtype=np.int32))
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)

    def audit(self, leases: Iterable[Lease] | None = None) -> None:
        """Recount everything from first principles; AssertionError names what is wrong.

        With all live leases given, their locks are recounted too.
        """
        audit(self.topology, self.trailing, leases)

    def dump(self) -> dict[str, Any]:
        """JSON-able picture of everything the tree holds."""
        return picture.dump(self.topology)

    def show(self) -> str:
        """ASCII picture, one line per node."""
        return picture.show(self.topology)

    def svg(self) -> str:
        """SVG picture, one row per node."""
        return picture.svg(self.topology)
