"""State on its way back from slower tiers: private blocks first, then the tree.

    begin     lease what the device has of the prefix, take blocks, start the copies
    copied    every page is confirmed by digests where it landed; what failed is freed
    settle    what arrived is handed to the tree, as if it had been computed
    release   the lease goes: whoever waited runs, or does not want it any more

Nobody can read a block before it is in the tree, so a copy that fails, comes back damaged or is
called off costs its blocks and nothing else. The prefix stays leased until `release`, so that what
came back is still there when its request is admitted; `give_up_leases` ends that where blocks are
short.

This module does not choose what to load, and runs on the control plane's thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from statewise.radix import Duplicates, Freed, Lease, Match, RadixTree, Tier, Written
from statewise.radix.key import common_tokens
from statewise.radix.plan import RecoveryPlan
from statewise.runtime.cache.blocks import Blocks
from statewise.runtime.cache.load_costs import LoadCosts
from statewise.runtime.cache.mirror import Mirror
from statewise.runtime.cache.stored import Findings
from statewise.runtime.cache.tier_events import TierEvents
from statewise.runtime.counters import Labelled, LabelledHistogram
from statewise.runtime.tiers.copies import LoadPage
from statewise.runtime.tiers.store import Outcome
from statewise.runtime.tiers.tiers import Tiers
from statewise.runtime.tiers.transfer import Transfer

Int32 = NDArray[np.int32]


@dataclass(frozen=True)
class Offer:
    """A plan that loads, and where its pages are."""

    plan: RecoveryPlan
    findings: Findings

    def pages(self) -> Iterator[tuple[int, int, Tier, int, bytes]]:
        """(group, page, tier, handle, key) of everything to load; boundaries for snapshots."""
        names, stored = self.findings.names, self.findings.stored
        for load in self.plan.loads:
            for page in range(load.start_page, load.end_page):
                snapshot = stored.snapshots.get((load.group, page))
                if snapshot is not None:
                    key = names.snapshots[load.group, page].key
                    yield load.group, page, *snapshot, key
                else:
                    tier, handle = stored.pages[load.group][page]
                    yield load.group, page, tier, handle, names.pages[load.group, page].key


@dataclass(slots=True)
class Incoming:
    """One page on its way, and the block it is for."""

    group: int
    page: int
    block: int
    key: bytes
    arrived: bool = False


@dataclass(eq=False)
class Promotion:
    """One request's loads. `lease` is None once it was released."""

    match: Match
    lease: Lease | None
    plan: RecoveryPlan
    pages: list[Incoming]
    waiting_for: set[Transfer] = field(default_factory=set)
    is_done: bool = False
    is_wanted: bool = True
    began_s: float = 0.0
    until_s: float = math.inf  # nobody waits for it any longer
    loaded: dict[int, Tier] = field(default_factory=dict)  # pages with loaded state, whence
    rid: str = ""  # of the request that it is for
    faults: list[str] = field(default_factory=list)  # what did not come back, in sentences

    def covers(self, match: Match, position: int) -> bool:
        """Whether it is of the same prefix as `match`, up to `position` or all that is loaded."""
        if self.match.namespace != match.namespace:
            return False
        shared = common_tokens(self.match.key.data, match.key.data, 0)
        return shared >= min(position, self.plan.position)

    def blocks(self, group: int) -> Int32:
        """Blocks that are the promotion's own."""
        own = [page.block for page in self.pages if page.group == group]
        return np.array(own, dtype=np.int32)


class Promotions:
    """Loads of one cache."""

    def __init__(
        self,
        tree: RadixTree,
        blocks: Blocks,
        tiers: Tiers,
        mirror: Mirror,
        written: Callable[[], Written],
        told: TierEvents,
    ) -> None:
        """`written` numbers a hand-over to the tree."""
        self._told = told
        self._tree, self._blocks, self._tiers, self._mirror = tree, blocks, tiers, mirror
        self._schema = tree.schema
        self._written = written
        self.costs = LoadCosts()
        self.open: set[Promotion] = set()  # not released, or not done
        self.loaded_pages = Labelled(
            "Pages asked back from slower tiers, by tier, group and outcome.",
            "tier", "group", "outcome",
        )  # fmt: skip
        self.load_seconds = LabelledHistogram("Time of loads, from first to last step.", "tier")

    # ---------------------------------------------------------------- begin

    def begin(self, match: Match, offer: Offer, rid: str = "") -> Promotion:
        """Start to load what `offer` names for request `rid`; `match` is what the tree has now.

        Raises `OutOfBlocksError` or `StaleMatchError`; nothing is held then.
        """
        size = self._schema.page_size
        wanted = list(offer.pages())
        boundary = min(offer.plan.position // size, match.logical_pages)
        lease = self._tree.lease(match, boundary * size, range(self._schema.num_groups))
        counts: dict[int, int] = {}
        for group, *_ in wanted:
            counts[group] = counts.get(group, 0) + 1
        try:
            taken = {g: iter(b.tolist()) for g, b in self._blocks.take(counts).items()}
        except BaseException:
            self._blocks.take_back(self._tree.release(lease), "condemned")
            raise
        pages = [Incoming(g, page, next(taken[g]), key) for g, page, _, _, key in wanted]
        promotion = Promotion(match, lease, offer.plan, pages, rid=rid)
        self.open.add(promotion)
        self._told.load_begun(rid, offer.plan)
        by_tier: dict[Tier, list[tuple[Incoming, LoadPage]]] = {}
        for page, (g, _, tier, handle, key) in zip(pages, wanted, strict=True):
            load = LoadPage(g, page.block, handle, key)
            by_tier.setdefault(tier, []).append((page, load))
        for tier, loads in by_tier.items():
            self._start(promotion, tier, loads)
        return promotion

    def _start(
        self, promotion: Promotion, tier: Tier, loads: list[tuple[Incoming, LoadPage]]
    ) -> None:
        def ended(transfer: Transfer) -> None:
            promotion.waiting_for.discard(transfer)
            self.take_results(promotion, transfer, [page for page, _ in loads])
            if not promotion.waiting_for:
                self._settle(promotion)

        transfer = self._tiers.load(tier, [load for _, load in loads], ended)
        promotion.waiting_for.add(transfer)
        self.note_begun(transfer, [page for page, _ in loads])

    def is_loading(self, match: Match, position: int) -> bool:
        """Whether state of the same prefix, up to `position` at least, is on its way already."""
        return any(
            promotion.is_wanted and not promotion.is_done and promotion.covers(match, position)
            for promotion in self.open
        )

    def note_begun(self, transfer: Transfer, pages: list[Incoming]) -> None:
        """A load has begun; `take_results` is told when it has ended."""
        self.costs.begun(transfer, self._device_bytes(pages))

    # ---------------------------------------------------------------- copied

    def take_results(self, promotion: Promotion, transfer: Transfer, pages: list[Incoming]) -> None:
        """Take note of what became of a transfer's pages."""
        names = [spec.name for spec in self._schema.groups]
        tier = transfer.tier
        for page, result in zip(pages, transfer.results, strict=True):
            assert result is not None, "a transfer that is done has results"
            is_good = page.key not in self._tiers.withdrawals
            page.arrived = is_good and result.outcome is Outcome.OK
            self.loaded_pages.add(tier.name.lower(), names[page.group], result.outcome.value)
            if page.arrived:
                promotion.loaded.setdefault(page.page, tier)
        where = [(page.group, page.page) for page in pages]
        promotion.faults += self._told.load_ended(promotion.rid, transfer, where)
        is_whole = transfer.num_ok == transfer.num_pages
        if is_whole and transfer.seconds > 0:
            self.load_seconds.add(tier.name.lower(), value=transfer.seconds)
        self.costs.ended(transfer, is_whole=is_whole)

    def _device_bytes(self, pages: list[Incoming]) -> int:
        """Bytes of these pages on the device, as plans count them; in a tier they may be fewer."""
        size, groups = self._schema.page_size, self._schema.groups
        return sum(groups[page.group].block_bytes(size) for page in pages)

    # ---------------------------------------------------------------- settle

    def _settle(self, promotion: Promotion) -> None:
        """Every copy has ended: hand over what arrived, free the rest."""
        promotion.is_done = True
        has_reader = promotion.is_wanted and promotion.lease is not None
        for page in promotion.pages:
            if not (has_reader and page.arrived):
                self._blocks.free_one(page.group, page.block)
        promotion.pages = [page for page in promotion.pages if has_reader and page.arrived]
        if promotion.pages:
            self._put(promotion, self._written())
        promotion.pages = []
        if not promotion.is_wanted:
            self.release(promotion)

    def distrust(self, keys: Set[bytes]) -> None:
        """Pages of these names are wrong: none that has arrived is handed over."""
        for promotion in self.open:
            for page in promotion.pages:
                page.arrived = page.arrived and page.key not in keys

    def hand_over(self, promotion: Promotion) -> None:
        """Hand pages that were loaded apart, and have arrived, to the tree, under its lease."""
        promotion.is_done = True
        self.open.add(promotion)
        self._put(promotion, self._written())
        promotion.pages = []

    def _put(self, promotion: Promotion, written: Written) -> None:
        """Hand the promotion's blocks to the tree; duplicates and leftovers are freed."""
        lease = promotion.lease
        assert lease is not None
        groups = self._schema.groups
        paged = [p for p in promotion.pages if not groups[p.group].kind.is_snapshot]
        if written.stamps != self._tree.stamps or written.stamps != promotion.match.stamps:
            for page in promotion.pages:
                self._blocks.free_one(page.group, page.block)
            return
        tables = self._tables(paged)
        num_pages = max((len(table) for table in tables), default=0)
        for group, table in enumerate(tables):
            self._blocks.sums.record_pages(group, table)
        for group in range(len(groups)):
            self._blocks.lineage.mark(group, promotion.blocks(group))
        first = lease.num_published_pages
        self._restore(promotion, lease, min(first, num_pages), tables, written)
        if num_pages > first:
            self._publish(promotion, lease, num_pages, tables, written)
        self._put_snapshots(promotion, lease, written)
        self._tree.keep(lease, lease.num_published_pages * self._schema.page_size, "load")

    def _tables(self, pages: list[Incoming]) -> list[Int32]:
        """Blocks by group and page, -1 for none."""
        stop = max((page.page + 1 for page in pages), default=0)
        tables = [np.full(stop, -1, dtype=np.int32) for _ in self._schema.groups]
        for page in pages:
            tables[page.group][page.page] = page.block
        return tables

    def _restore(
        self, promotion: Promotion, lease: Lease, stop: int, tables: list[Int32], written: Written
    ) -> None:
        if not any((table[:stop] >= 0).any() for table in tables):
            return
        below = [np.where(np.arange(len(t)) < stop, t, -1).astype(np.int32) for t in tables]
        outcome = self._tree.restore(lease, 0, stop, below, written)
        self._after(promotion, outcome.duplicates, outcome.freed, below)

    def _publish(
        self,
        promotion: Promotion,
        lease: Lease,
        num_pages: int,
        tables: list[Int32],
        written: Written,
    ) -> None:
        size, first = self._schema.page_size, lease.num_published_pages
        above = [np.where(np.arange(len(t)) >= first, t, -1).astype(np.int32) for t in tables]
        outcome = self._tree.publish(
            lease, promotion.match.key, num_pages, above, written, num_pages * size
        )
        self._after(promotion, outcome.duplicates, outcome.freed, above)

    def _after(
        self,
        promotion: Promotion,
        duplicates: Iterable[Duplicates],
        freed: Freed,
        tables: list[Int32],
    ) -> None:
        """Free what the tree had already; what it took has a copy."""
        keys = {(page.group, page.block): page.key for page in promotion.pages}
        for found in duplicates:
            self._blocks.pools[found.group].free(found.own_blocks)
            for block in found.own_blocks.tolist():
                del keys[found.group, block]
        for group, table in enumerate(tables):
            mine = [b for b in table.tolist() if b >= 0 and (group, b) in keys]
            self._mirror.mark(group, mine, [keys[group, b] for b in mine])
        self._blocks.take_back(freed, "replaced")

    def _put_snapshots(self, promotion: Promotion, lease: Lease, written: Written) -> None:
        size = self._schema.page_size
        for page in promotion.pages:
            if not self._schema.groups[page.group].kind.is_snapshot:
                continue
            if page.page > lease.num_published_pages:  # its history did not arrive
                self._blocks.free_one(page.group, page.block)
                continue
            self._blocks.sums.record(page.group, page.block)
            self._mirror.mark(page.group, [page.block], [page.key])
            back = self._tree.add_snapshot(
                lease, promotion.match.key, page.page * size, page.group, page.block, written
            )
            if back is not None:
                self._blocks.free_one(page.group, back)

    # ---------------------------------------------------------------- release

    def release(self, promotion: Promotion) -> None:
        """Its request runs, or does not want it any more. What arrived stays cached."""
        promotion.is_wanted = promotion.is_wanted and promotion.is_done
        if promotion.lease is not None and promotion.is_done:
            self._blocks.take_back(self._tree.release(promotion.lease), "condemned")
            promotion.lease = None
        if promotion.is_done:
            self.open.discard(promotion)
            return
        for transfer in list(promotion.waiting_for):
            self._tiers.engine.cancel(transfer)

    def give_up_leases(self) -> bool:
        """Blocks are short: let go of what came back and waits; whether there was any."""
        done = [p for p in self.open if p.is_done and p.lease is not None]
        for promotion in done:
            self.release(promotion)
        return bool(done)

    def give_up_late(self, now_s: float) -> list[Promotion]:
        """Call off what is not back in time; returns it."""
        late = [p for p in self.open if not p.is_done and p.is_wanted and p.until_s <= now_s]
        for promotion in late:
            self.release(promotion)
        return late

    @property
    def num_loading(self) -> int:
        """Promotions that somebody waits for."""
        return sum(not p.is_done and p.is_wanted for p in self.open)

    def abandon_all(self) -> None:
        """Nothing that is on its way is wanted any more."""
        for promotion in list(self.open):
            self.release(promotion)
