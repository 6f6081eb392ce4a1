"""The prefix cache: tree and pools as one, from lookup to commit.

    lookup   match + validate + plan            changes nothing
    begin    drop what failed, lease what the   page tables filled from the tree
             plan reuses
    reserve  blocks for more tokens             all groups or none; evicts if it must
    commit   the worker confirmed writes        full pages go to the tree, duplicates are freed
    finish   publish, checkpoint, release       the request's own blocks are freed

Every block is in exactly one place: a pool's free list, its limbo, the tree, or one sequence.
`audit` recounts that from first principles.

This module does not schedule, and never sees a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from statewise.radix import (
    Cause,
    Freed,
    Match,
    Namespace,
    RadixTree,
    StaleMatchError,
    TokenKey,
    Written,
    eviction_policy,
)
from statewise.radix.bounded import bounded_plan, can_be_bounded
from statewise.radix.cost import CostModel
from statewise.radix.need import first_token
from statewise.radix.observe import CostObserver
from statewise.radix.plan import Level, RecoveryPlan, Replay, Reuse
from statewise.radix.planner import Budget, plan
from statewise.radix.schema import CacheSchema, StateGroupSpec
from statewise.radix.validation import Verdict
from statewise.runtime.cache.blocks import Blocks
from statewise.runtime.cache.checksums import BlockChecksums, Digest
from statewise.runtime.cache.copies import Copies, CopyQueue
from statewise.runtime.cache.counters import CacheCounters
from statewise.runtime.cache.lookup import NOTHING, Lookup
from statewise.runtime.cache.patrol import CachePatrol
from statewise.runtime.cache.promotion import Promotion
from statewise.runtime.cache.recall import disowned
from statewise.runtime.cache.recovery import RecoveryExecutor
from statewise.runtime.cache.sequence import Sequence, Standing
from statewise.runtime.cache.snapshots import Snapshots
from statewise.runtime.cache.tiering import Tiering
from statewise.runtime.cache.validity import Validity
from statewise.runtime.clock import Clock
from statewise.runtime.counters import Labelled
from statewise.runtime.errors import OutOfBlocksError
from statewise.runtime.events import EventLog
from statewise.runtime.memory.block_pool import BlockPool
from statewise.runtime.messages import CacheOptions
from statewise.runtime.tiers.page import GroupShape
from statewise.runtime.tiers.tiers import Tiers

Int32 = NDArray[np.int32]


class PrefixCache:
    """Owns the tree and the device pools of one engine."""

    def __init__(  # noqa: PLR0913 (settings, each named)
        self,
        schema: CacheSchema,
        num_blocks: tuple[int, ...],
        cost: CostModel,
        *,
        enabled: bool = True,
        audit_rate: float = 0.0,
        digest: Digest | None = None,
        events: EventLog | None = None,
        policy: str = "value",
        bounded_replay: int = 0,
    ) -> None:
        """`audit_rate` is the share of pages whose bytes are compared, by `digest`, at use.

        `policy` names the order of eviction; ValueError where there is none of this name.
        `bounded_replay` tokens are replayed, approximately, where exact is dearer; 0: never.
        """
        self.events = events or EventLog()
        self.schema = schema
        self.enabled = enabled
        self._bounded_tokens = bounded_replay if can_be_bounded(schema) else 0
        self.tree = RadixTree(schema, events=self.events, policy=eviction_policy(policy))
        self.pools = tuple(
            BlockPool(group.name, count)
            for group, count in zip(schema.groups, num_blocks, strict=True)
        )
        self._copies = CopyQueue()
        self.counters = CacheCounters(schema)
        sums = BlockChecksums(schema, num_blocks, digest if audit_rate > 0.0 else None)
        self._blocks = Blocks(self.tree, self.pools, sums, self.counters)
        told = (self.counters, self.events)
        self.validity = Validity(schema, self.tree, self._blocks, told, audit_rate)
        self.patrol = CachePatrol(self.tree, self._blocks, self.validity, self.counters)
        parts = (schema, self.tree, self._blocks, self._copies)
        self._recovery = RecoveryExecutor(*parts, self.validity)
        self._snapshots = Snapshots(*parts)
        self.has_snapshots = bool(self._snapshots.groups)
        self._seq = 0
        self._live: set[Sequence] = set()
        self.tiering: Tiering | None = None
        self.use_cost(cost)

    def use_tiers(self, tiers: Tiers, clock: Clock) -> None:
        """Keep state in slower tiers too; the cache owns and closes them."""
        assert self.enabled, "a cache that is off has nothing for slower tiers"
        parts = (self.tree, self._blocks, tiers, self._written_by_load, clock, self.events)
        self.tiering = Tiering(*parts)
        self._blocks.has_copy = self.tiering.mirror.has
        self.tiering.observe(self.cost)

    def use_cost(self, cost: CostModel) -> None:
        """Plan with these figures from now on; observations refine them."""
        self.cost = CostObserver(cost)
        if self.tiering is not None:
            self.tiering.observe(self.cost)

    @property
    def audits(self) -> bool:
        """Whether bytes are compared at use."""
        return self.validity.audit_rate > 0.0

    @property
    def version(self) -> tuple[int, ...]:
        """Changes whenever a lookup may answer differently."""
        tiers = 0 if self.tiering is None else self.tiering.version
        return self.tree.version, self._seq, tiers

    def expect(
        self, schema: CacheSchema, weights_epoch: int, shapes: Many[GroupShape] = ()
    ) -> None:
        """Other weights, versions or layouts from now on: older state is not found any more.

        No flush and no scan: it is replaced or evicted in time. Nothing may be running. `shapes`
        name the new state in slower tiers.
        """
        assert not self._live, "running requests hold state of the old weights"
        if self.tiering is not None:
            self.tiering.rebind(shapes)
        self.validity.expect(schema, weights_epoch)

    # ---------------------------------------------------------------- lookup and begin

    def lookup(
        self,
        options: CacheOptions,
        tokens: Int32,
        limit: int,
        granularity: int = 1,
        *,
        direct_only: bool = False,
        audit: bool = False,
    ) -> Lookup:
        """How a prompt can best use what is cached: at most `limit` tokens of it. Read only.

        The resume position is a multiple of `granularity` tokens. `direct_only`: without replays.
        `audit`: it is about to be used, compare checksums where they are kept.
        """
        apart = options.exact and self._blocks.lineage.is_kept
        namespace = Namespace(options.salt, options.adapter, apart)
        if not self.enabled:
            return Lookup(namespace, None, NOTHING, (), len(tokens), self.version)
        match = self.tree.match(namespace, TokenKey(tokens[:limit]))
        terminal = self.has_snapshots and granularity == 1
        position = max(match.logical_tokens, match.reuse_position() if terminal else 0)
        match.lay_out(position)  # for validation, and for the page tables if it passes
        audit = audit and self.audits
        verdicts, passed = self.validity.verdicts(match, position, audit=audit)
        if passed and position % granularity:
            # A resume further back relies on other pages: windows that end there.
            verdicts, _ = self.validity.verdicts(match, None, audit=audit)
        is_direct = passed and position % granularity == 0
        if is_direct and self.tiering is None:
            chosen = self._direct(position, len(tokens))
            return Lookup(namespace, match, chosen, (), len(tokens), self.version)
        budget = Budget(
            len(tokens),
            granularity,
            blocks=self._blocks.spare(match),
            repair=not direct_only,
            rebuild=not direct_only,
            load=False,
            terminal=terminal,
        )
        if is_direct:
            chosen = self._direct(position, len(tokens))
            verdicts = ()
        else:
            chosen = self._planned(match, verdicts, budget, exact=options.exact)
        offer, why_not = None, ""
        if self.tiering is not None:
            offer, why_not = self.tiering.offer(match, verdicts, chosen, budget, self.cost)
        what = (namespace, match, chosen, verdicts, len(tokens), self.version)
        lossy = self._blocks.lineage.num_tokens(match, chosen.position)
        return Lookup(*what, offer, why_not, lossy)

    def _planned(
        self, match: Match, verdicts: tuple[Verdict, ...], budget: Budget, *, exact: bool
    ) -> RecoveryPlan:
        """The cheapest plan; a bounded one where that is allowed and cheaper."""
        chosen = plan(match, verdicts, self.schema, self.cost.model, budget)
        has_faults = any(v.is_fault for v in verdicts)
        may_bound = budget.granularity == 1 and budget.repair and not has_faults and not exact
        if self._bounded_tokens and may_bound:
            known = (match, chosen, self._bounded_tokens, self.cost.model, budget)
            chosen = bounded_plan(*known) or chosen
        return chosen

    def _direct(self, position: int, num_tokens: int) -> RecoveryPlan:
        """Use everything that matched as it stands."""
        steps = (Reuse(0, position),) if position else ()
        seconds = self.cost.model.prefill_s(position, num_tokens) if self.tiering else 0.0
        return RecoveryPlan(position, Level.DIRECT, steps, None, position, total_s=seconds)

    def promote(self, lookup: Lookup, rid: str = "") -> Promotion:
        """Start to load what the lookup's offer names, for request `rid`.

        Raises `OutOfBlocksError` or `StaleMatchError`; nothing is held then.
        """
        assert self.tiering is not None
        assert lookup.match is not None
        assert lookup.offer is not None
        match = self.tree.match(lookup.namespace, lookup.match.key)
        if lookup.tree_version != self.version:
            raise StaleMatchError("the tree has changed since the lookup")
        self.validity.discard(match, lookup.verdicts, "use")
        match = self.tree.match(lookup.namespace, match.key)
        return self.tiering.promote(match, lookup.offer, rid, lookup.plan.total_s)

    def _without_faults(self, lookup: Lookup, match: Match) -> Match:
        """Drop what the lookup's verdicts name; returns the match without it.

        Where the tree has changed since the lookup for another reason, the old match comes back,
        and leasing finds out.
        """
        is_current = lookup.tree_version == self.version
        before = self.tree.version
        self.validity.discard(match, lookup.verdicts, "use")
        if not is_current or self.tree.version == before:
            return match
        fresh = self.tree.match(lookup.namespace, match.key)
        if fresh.logical_tokens < lookup.position // self.schema.page_size * self.schema.page_size:
            raise StaleMatchError("nothing was left of what the plan would have rebuilt")
        return fresh

    def begin(self, lookup: Lookup, capacity_tokens: int) -> Sequence:
        """Drop what failed validation, lease what `lookup` reuses, lay out page tables.

        Raises `StaleMatchError` where state has left the tree since the lookup (look up again and
        plan anew) and `OutOfBlocksError`; nothing is held then.
        """
        page = self.schema.page_size
        sequence = Sequence(self.schema, -(-capacity_tokens // page), lookup.namespace)
        self._live.add(sequence)
        try:
            self._begin(sequence, lookup)
        except (StaleMatchError, OutOfBlocksError):
            self.cancel(sequence)
            raise
        return sequence

    def _begin(self, sequence: Sequence, lookup: Lookup) -> None:
        if lookup.match is None:
            self._snapshots.begin(sequence, None, 0)
            return
        chosen = lookup.plan
        match = self._without_faults(lookup, lookup.match)
        sequence.lease = self.tree.lease(match, chosen.position, chosen.repairing, chosen.read_from)
        pages = chosen.position // self.schema.page_size
        sequence.num_pages = sequence.num_published = pages
        sequence.match = match
        sequence.began_from = min(chosen.position, chosen.read_from) // self.schema.page_size
        sequence.is_recovering = bool(chosen.replays)
        sequence.is_private = not chosen.is_exact
        sequence.num_lossy = self._blocks.lineage.num_tokens(match, chosen.position)
        sequence.last_recall = self.validity.recalls.number
        if chosen.replays:
            self._recovery.adopt(sequence)
        else:
            self._recovery.adopt_match(sequence, sequence.lease.match, chosen.position)
        self._snapshots.begin(sequence, match, chosen.position)

    def enter_replay(self, sequence: Sequence, replay: Replay) -> None:
        """Lay out page tables and working blocks for the first token of `replay`."""
        self._recovery.enter(sequence, replay)
        needed = sum(1 << g for g in replay.restore) if replay.start else 0
        sequence.standing = Standing(replay.start, needed)

    def reserve_replay(self, sequence: Sequence, replay: Replay, start: int, end: int) -> None:
        """Private blocks for what `replay` writes over tokens [start, end).

        Raises `OutOfBlocksError` and takes none, or `StaleMatchError`: plan anew.
        """
        self._recovery.reserve(sequence, replay, start, end)
        self._snapshots.ready(sequence, self._written())

    def replayed(
        self,
        sequence: Sequence,
        tokens: Int32,
        replay: Replay,
        position: int,
        after: Replay | None,
    ) -> None:
        """Take note that `replay` has run up to `position`; `after` is the next one."""
        if position < replay.end:
            self._recovery.pass_by(sequence, replay, position)
            return
        self._seq += 1
        written = self._written()
        self._blocks.lineage.follow(sequence)
        self._recovery.complete(sequence, replay, after, written)
        if after is None:
            resume = sequence.num_published * self.schema.page_size
            made = replay.write_groups if replay.end == resume else 0
            sequence.is_recovering = False
            if sequence.is_private:  # the working blocks stand there, and are nobody else's
                return
            sequence.standing = Standing(resume, self._snapshots.needed_at(resume), made)

    def _written_by_load(self) -> Written:
        self._seq += 1
        return replace(self._written(), cause=Cause.LOAD)

    def _written(self) -> Written:
        generations = tuple(pool.generations for pool in self.pools)
        sums = self._blocks.sums.tables
        return Written(self.validity.stamps, self._seq, generations, sums)

    def _first_live_page(self, group: StateGroupSpec, position: int) -> int:
        """First page that a token at `position` or later reads."""
        page = self.schema.page_size
        return first_token(group, position) // page if group.kind.is_window else 0

    def cancel(self, sequence: Sequence) -> None:
        """Give back everything `begin` and `reserve` took."""
        self._recovery.forget(sequence)
        for g, pool in enumerate(self.pools):
            pool.free(sequence.owned(g))
            sequence.tables[g][:] = -1
        sequence.repaired.clear()
        sequence.working.clear()
        sequence.taken.clear()
        sequence.num_pages = sequence.num_published = 0
        if sequence.lease is not None:
            self._blocks.take_back(self.tree.release(sequence.lease), "condemned")
            sequence.lease = None
        self._live.remove(sequence)

    # ---------------------------------------------------------------- blocks

    def available(self) -> tuple[int, ...]:
        """Free plus evictable blocks per group."""
        return self._blocks.available()

    def reserve(self, sequence: Sequence, num_tokens: int) -> None:
        """Blocks for positions below `num_tokens` in every group.

        Raises `OutOfBlocksError` and takes none, or `StaleMatchError`: plan anew.
        """
        self._extend(sequence, -(-num_tokens // self.schema.page_size) - sequence.num_pages)
        self._snapshots.ready(sequence, self._written())

    def _extend(self, sequence: Sequence, new: int) -> None:
        if new <= 0:
            return
        paged = [g for g in range(self.schema.num_groups) if g not in sequence.snapshot_groups]
        taken = self._blocks.take(dict.fromkeys(paged, new))
        lo, hi = sequence.num_pages, sequence.num_pages + new
        for g, blocks in taken.items():
            sequence.tables[g][lo:hi] = blocks
            sequence.generations[g][lo:hi] = self.pools[g].generations[blocks]
        sequence.num_pages = hi

    def take_copies(self) -> tuple[Copies, Copies]:
        """Block copies of the next step: before its rows, after its rows."""
        return self._copies.take()

    def prepare_checkpoint(self, sequence: Sequence, position: int) -> None:
        """Keep the snapshot groups' state at `position`, where the next step ends."""
        if sequence.lease is not None and self.has_snapshots and not sequence.is_private:
            self._snapshots.prepare(sequence, position)

    def forgo_checkpoint(self, sequence: Sequence, position: int) -> None:
        """Take `prepare_checkpoint` back: the next step ends elsewhere."""
        self._snapshots.forgo(sequence, position)

    # ---------------------------------------------------------------- commit and finish

    def commit(
        self,
        sequence: Sequence,
        tokens: Int32,
        num_computed: int,
        publishable: int,
        checkpoints: list[int],
    ) -> None:
        """Take note that state below `num_computed` is written.

        Full pages below `publishable` are handed to the tree; trailing state at each of
        `checkpoints` is marked as worth keeping.
        """
        lease = None if sequence.is_private else sequence.lease
        if lease is not None:
            if publishable // self.schema.page_size > sequence.num_published:
                self._publish(sequence, tokens, publishable, num_computed)
            else:
                self.tree.advance(lease, num_computed)
            for position in checkpoints:
                if position <= sequence.num_published * self.schema.page_size:
                    self.tree.keep(lease, position, "mark")
            if sequence.taken:
                self._blocks.lineage.follow(sequence)
                self._snapshots.commit(sequence, TokenKey(tokens[:num_computed]), self._written())
        self._drop_left_behind(sequence, num_computed)

    def _publish(self, sequence: Sequence, tokens: Int32, publishable: int, position: int) -> None:
        pages = publishable // self.schema.page_size
        assert sequence.lease is not None
        self._seq += 1
        self._blocks.lineage.follow(sequence)
        for g in range(self.schema.num_groups):
            if g not in sequence.snapshot_groups:
                self._blocks.sums.record_pages(
                    g, sequence.tables[g][sequence.num_published : pages]
                )
        key, written = TokenKey(tokens[: pages * self.schema.page_size]), self._written()
        published = self.tree.publish(
            sequence.lease, key, pages, sequence.tables, written, position
        )
        sequence.num_published = published.num_pages
        for duplicates in published.duplicates:
            if self.validity.replace_damaged(sequence.lease, key, duplicates, written):
                continue
            g = duplicates.group
            sequence.tables[g][duplicates.pages] = duplicates.tree_blocks
            sequence.generations[g][duplicates.pages] = duplicates.tree_generations
            self.pools[g].free(duplicates.own_blocks)
        self._blocks.take_back(published.freed, "replaced")

    def _drop_left_behind(self, sequence: Sequence, position: int) -> None:
        """Forget window pages that no later token reads; free those that are the request's own."""
        for g, group in enumerate(self.schema.groups):
            first = self._first_live_page(group, position)
            old = sequence.live_from[g]
            if first <= old:
                continue
            sequence.live_from[g] = first
            gone_from = max(old, sequence.sink_pages[g])
            own_from = max(gone_from, sequence.num_published)
            if own_from < first:
                self.pools[g].free(sequence.tables[g][own_from:first].copy())
            sequence.tables[g][gone_from:first] = -1

    def finish(
        self,
        sequence: Sequence,
        tokens: Int32,
        num_computed: int,
        *,
        snapshot: bool = True,
        resume_at: int = 0,
    ) -> None:
        """Give back everything the request held; what it published stays cached.

        The trailing state at its end is kept as a checkpoint, at the exact position where the
        model has snapshots and one is wanted. `num_computed` 0: nothing of it is to be kept.
        `resume_at`: where its own prompt would resume if it came again.
        """
        lease = None if sequence.is_private else sequence.lease
        self._blocks.lineage.follow(sequence)
        if lease is not None and num_computed and sequence.num_published:
            self.tree.keep(lease, sequence.num_published * self.schema.page_size)
        if lease is not None and num_computed and snapshot and self.has_snapshots:
            key = TokenKey(tokens[:num_computed])
            self._seq += 1
            self._snapshots.end(sequence, key, num_computed, self._written())
        if lease is not None and num_computed and self.tiering is not None:
            published = sequence.num_published * self.schema.page_size
            key = TokenKey(tokens[:published])
            self.tiering.demotion.note(sequence.namespace, key, min(resume_at, published))
        self.cancel(sequence)

    # ---------------------------------------------------------------- epochs, leases, questions

    def open_epoch(self, epoch: int) -> None:
        """A step begins that may read owned blocks."""
        for pool in self.pools:
            pool.open_epoch(epoch)

    def close_epoch(self, epoch: int) -> None:
        """The step's reads are complete."""
        for pool in self.pools:
            pool.close_epoch(epoch)

    def verify_leases(self) -> None:
        """Assert, just before a forward pass, that no block of any sequence was given away."""
        for sequence in self._live:
            for g, pool in enumerate(self.pools):
                blocks = sequence.view(g)
                same = pool.generations[blocks] == sequence.generations[g][: len(blocks)]
                assert (same | (blocks < 0)).all(), f"{pool.group}: a lease is stale"

    def is_recalled(self, sequence: Sequence) -> bool:
        """Whether state that `sequence` relies on failed since it began."""
        return self.validity.recalls.concern(sequence)

    def disown(self, sequence: Sequence, tokens: Int32) -> None:
        """Forget what a recalled sequence has published: it was computed from state that failed."""
        if sequence.is_private:
            return
        end = sequence.num_published * self.schema.page_size
        match = self.tree.match(sequence.namespace, TokenKey(tokens[:end]))
        self.validity.discard(match, disowned(sequence, match), "recall")
        if self.tiering is not None:
            self.tiering.withdraw(match, sequence.began_from)

    def flush(self) -> dict[str, int]:
        """Drop every cached page that no lease protects; returns blocks freed per group.

        Slower tiers forget what they hold as well.
        """
        if self.tiering is not None:
            self.tiering.clear()
        freed = self.free_all()
        return {group.name: freed.num(g) for g, group in enumerate(self.schema.groups)}

    def free_all(self) -> Freed:
        """Evict everything that no lease protects from the device; slower tiers keep theirs."""
        freed = self.tree.flush()
        self._blocks.take_back(freed, "flush")
        return freed

    def pool_stats(self) -> dict[str, dict[str, int]]:
        """Blocks by place, per group."""
        out = {}
        for g, pool in enumerate(self.pools):
            running = sum(len(sequence.owned(g)) for sequence in self._live)
            loading = 0
            if self.tiering is not None:
                loading = sum(len(p.blocks(g)) for p in self.tiering.holders)
            out[pool.group] = {
                "total": pool.num_blocks,
                "free": pool.num_free,
                "limbo": pool.num_limbo,
                "cached": pool.num_owned - running - loading,
                "loading": loading,
                "evictable": self.tree.evictable(g),
                "running": running,
                "evicted": self.counters.evicted(g),
            }
        return out

    def transitions(self) -> dict[str, Any]:
        """Changes of form by group and cause, as a labelled counter's JSON form."""
        counter = Labelled("Pages that changed form, by cause.", "group", "cause")
        for (g, cause), count in self.tree.ledger.counts.items():
            counter.add(self.schema.groups[g].name, cause.value, amount=count)
        return counter.as_dict()

    def audit(self) -> None:
        """Assert that every block of every pool is in exactly one place."""
        loads = [] if self.tiering is None else self.tiering.holders
        leases = [*(s.lease for s in self._live), *(load.lease for load in loads)]
        self.tree.audit([lease for lease in leases if lease is not None])
        for g, pool in enumerate(self.pools):
            places = [pool.free_blocks(), pool.limbo_blocks(), self.tree.blocks(g)]
            places += [sequence.owned(g) for sequence in self._live]
            places += [load.blocks(g) for load in loads]
            counts = np.bincount(np.concatenate(places), minlength=pool.num_blocks)
            wrong = np.flatnonzero(counts != 1)
            assert len(wrong) == 0, (
                f"{pool.group}: blocks {wrong[:8].tolist()} are in "
                f"{counts[wrong[:8]].tolist()} places"
            )

    def dump(self, form: str = "json") -> dict[str, Any]:
        """The tree and the pools as JSON-able data; as `text` where `form` is ascii or svg."""
        if form == "json":
            slower = {} if self.tiering is None else self.tiering.dump()
            return {"tree": self.tree.dump(), "pools": self.pool_stats(), **slower}
        return {"text": self.tree.svg() if form == "svg" else self.tree.show()}
