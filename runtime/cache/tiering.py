"""The slower tiers as the prefix cache uses them: what is found, copied out, and copied back.

    ask         what a remote store has of a prompt
    offer       a plan that loads, where loading is estimated to be quicker than computing
    approach    load from the end while the request computes from the front (`meeting`)
    promote     start it; the request waits in the queue, or for a moment where it is quick
    note        a path is worth a copy
    poll        between two steps: deliver what ended, start the next copies
    yield_to    a running request is short of blocks: give up copies and leases nobody runs on

Everything here happens on the control plane's thread; copies run on I/O threads and are told of at
`poll`. Without slower tiers there is no `Tiering`.

This module does not decide when a request runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import lcm
from typing import Any

from statewise.radix import (
    Budget,
    CostObserver,
    Match,
    RadixTree,
    Tier,
    Verdict,
    Written,
    plan,
)
from statewise.radix.overlay import overlay, sources_first
from statewise.radix.plan import Recompute, RecoveryPlan
from statewise.runtime.cache.blocks import Blocks
from statewise.runtime.cache.demotion import Demotion
from statewise.runtime.cache.lookup import Lookup
from statewise.runtime.cache.meeting import Meeting, Meetings
from statewise.runtime.cache.mirror import Mirror
from statewise.runtime.cache.probe import Probe, Probes
from statewise.runtime.cache.promotion import Offer, Promotion, Promotions
from statewise.runtime.cache.stored import StoredState
from statewise.runtime.cache.tier_events import TierEvents
from statewise.runtime.clock import Clock
from statewise.runtime.events import EventLog
from statewise.runtime.tiers.lanes import HANG_S
from statewise.runtime.tiers.page import GroupShape
from statewise.runtime.tiers.tiers import Tiers
from statewise.runtime.tiers.transfer import Transfer

MAX_SYNC_S = 0.01  # loads estimated to be shorter are waited for
SYNC_PATIENCE = 4.0  # times the estimate; then the request waits in the queue after all
MIN_PATIENCE_S = 0.1  # for loads, where computing would take less
MEETING_SHARE = 0.8  # of the next best plan's time, to load and compute at once
MAX_PREFETCHES = 4  # at a time


class Tiering:
    """One cache's slower tiers; owns `tiers` and closes them."""

    def __init__(
        self,
        tree: RadixTree,
        blocks: Blocks,
        tiers: Tiers,
        written: Callable[[], Written],
        clock: Clock,
        events: EventLog,
    ) -> None:
        self.tiers = tiers
        self.told = TierEvents(tree.schema, events)
        self._tree = tree
        self._schema = tree.schema
        self._blocks = blocks
        self._clock = clock
        self.mirror = Mirror(blocks.pools)
        self.stored = StoredState(tree.schema, tiers)
        parts = (tree, blocks, tiers, self.stored, self.mirror)
        self.demotion = Demotion(*parts, clock, self.told)
        self.promotions = Promotions(tree, blocks, tiers, self.mirror, written, self.told)
        self.meetings = Meetings(tree, blocks, tiers, self.promotions, self.told)
        self.meeting_share = MEETING_SHARE
        self.probes = Probes(self.stored, tiers, clock)
        self._prefetching: set[Transfer] = set()

    def observe(self, cost: CostObserver) -> None:
        """Tell `cost` how long loads take."""
        self.promotions.costs.observer = cost

    @property
    def version(self) -> int:
        """Moves whenever an offer may come out differently."""
        return self.tiers.version

    # ---------------------------------------------------------------- planning

    def offer(
        self,
        match: Match,
        verdicts: Iterable[Verdict],
        device_plan: RecoveryPlan,
        budget: Budget,
        cost: CostObserver,
    ) -> tuple[Offer | None, str]:
        """A plan with loads that is quicker than `device_plan`, None where there is none.

        And why what slower tiers have is not worth loading; empty where they have nothing.
        """
        if match.namespace.exact:
            return None, ""
        unit = lcm(budget.granularity, self._schema.page_size)
        if device_plan.position >= len(match.key) // unit * unit:
            return None, ""  # nothing is left to be loaded
        findings = self.stored.look(match, verdicts, unit // self._schema.page_size)
        if not findings.stored:
            return None, ""
        asked = replace(budget, load=True, front=False, terminal=False, max_sync_s=MAX_SYNC_S)
        merged = overlay(match, findings.stored)
        state = (merged, verdicts, self._schema, cost.model)
        chosen = plan(*state, asked)
        is_quicker = bool(chosen.loads) and chosen.total_s < device_plan.total_s
        if device_plan.is_exact and (chosen.asynchronous or not is_quicker):
            both = plan(*state, replace(asked, front=True))
            best_s = chosen.total_s if is_quicker else device_plan.total_s
            if both.total_s < self.meeting_share * best_s and self._can_meet(both, cost):
                return Offer(both, findings), ""
        if not is_quicker:
            return None, self._declined(merged, findings.stored.num_pages, device_plan, chosen)
        return Offer(chosen, findings), ""

    def _can_meet(self, chosen: RecoveryPlan, cost: CostObserver) -> bool:
        """Whether a plan computes from the front, a chunk at least, while history is loaded."""
        if not chosen.concurrent:
            return False
        front = next(step for step in chosen.steps if isinstance(step, Recompute))
        groups = self._schema.groups
        has_history = any(groups[load.group].kind.is_history for load in chosen.loads)
        return has_history and front.end - front.start >= cost.model.chunk

    def _declined(
        self, merged: Match, num_pages: int, device: RecoveryPlan, chosen: RecoveryPlan
    ) -> str:
        """Why what was found up to a page is not loaded; empty where it goes no further."""
        end = num_pages * self._schema.page_size
        if end <= device.position:
            return ""
        lacking = [
            repr(spec.name)
            for group, spec in enumerate(self._schema.groups)
            if spec.kind.is_window and not merged.resumable(group, after_load=True)[num_pages]
        ]
        but = f", without what a resume there needs of {', '.join(lacking)}" if lacking else ""
        with_loads = f", {chosen.total_s:.3g} s with loads" if chosen.loads else ""
        return (
            f"slower tiers have state up to token {end}{but}: computing is estimated to be quicker "
            f"({device.total_s:.3g} s{with_loads})"
        )

    # ---------------------------------------------------------------- copying back

    def promote(
        self, match: Match, offer: Offer, rid: str = "", instead_s: float = math.inf
    ) -> Promotion:
        """Start the loads of an offer for request `rid`; waits for those that are quick.

        `match` is the tree's, without what failed validation; `instead_s` the time that computing
        would take: nobody waits longer than that for what was to be quicker. Raises
        `OutOfBlocksError` or `StaleMatchError`; nothing is held then.
        """
        promotion = self.promotions.begin(match, offer, rid)
        promotion.began_s = self._clock.monotonic()
        promotion.until_s = promotion.began_s + max(MIN_PATIENCE_S, instead_s)
        if not offer.plan.asynchronous:
            patience = SYNC_PATIENCE * MAX_SYNC_S
            for transfer in list(promotion.waiting_for):
                if not self.tiers.engine.wait(transfer, patience):
                    break
            self.deliver()
        return promotion

    def approach(self, lookup: Lookup, rid: str = "") -> Meeting:
        """Load what the lookup offers from its end while the request computes from the front."""
        assert lookup.match is not None
        assert lookup.offer is not None
        step_bytes = self._step_bytes(lookup.offer.plan, lookup.position)
        return self.meetings.begin(lookup.match, lookup.offer, lookup.position, rid, step_bytes)

    def _step_bytes(self, chosen: RecoveryPlan, position: int) -> float:
        """How much the slowest tier of a plan loads while one step computes; inf: not known."""
        if self.promotions.costs.observer is None:
            return math.inf
        cost = self.promotions.costs.observer.model
        step_s = cost.prefill_s(position, position + cost.chunk)
        used = [cost.tiers[load.tier] for load in chosen.loads]
        return min(max(step_s, tier.latency_s) * tier.bytes_per_s for tier in used)

    @property
    def holders(self) -> list[Promotion | Meeting]:
        """Whoever holds device blocks for loads."""
        return [*self.promotions.open, *self.meetings.open]

    @property
    def can_prefetch(self) -> bool:
        """Whether there is host memory in front of another tier."""
        return Tier.HOST in self.tiers.stores and len(self.tiers.stores) > 1

    def prefetch(self, offer: Offer) -> bool:
        """Copy what a queued request will want to the host; False: not now, ask again.

        Of each group no more than the host holds without pushing out what has just come.
        """
        if not self.can_prefetch or len(self._prefetching) >= MAX_PREFETCHES:
            return False
        by_tier: dict[Tier, list[tuple[int, str]]] = {}
        room = [self.demotion.room.of(group) for group in range(self._schema.num_groups)]
        for group, _, tier, handle, _ in offer.pages():
            if tier is not Tier.HOST and room[group] > 0:
                room[group] -= 1
                by_tier.setdefault(tier, []).append((handle, self._schema.groups[group].name))
        for tier, pages in by_tier.items():
            done = self._prefetching.discard
            self._prefetching.add(self.tiers.prefetch(tier, pages, done))
        return True

    def ask(self, lookup: Lookup, granularity: int, cost: CostObserver) -> Probe | None:
        """Ask a remote store for what is not here; None where that cannot help."""
        match = lookup.match
        if match is None or match.namespace.exact or self.tiers.remote is None:
            return None
        num_pages = len(match.key) // self._schema.page_size
        missing = num_pages - lookup.promised_position // self._schema.page_size
        history = [spec for spec in self._schema.groups if spec.kind.is_history]
        size = sum(spec.block_bytes(self._schema.page_size) for spec in history) * missing
        seconds = cost.model.tiers[Tier.REMOTE].seconds(max(size, 1))
        plan = lookup.plan if lookup.offer is None else lookup.offer.plan
        if missing < 1 or seconds >= plan.total_s:
            return None
        unit = lcm(granularity, self._schema.page_size)
        return self.probes.begin(match, lookup.verdicts, unit // self._schema.page_size)

    # ---------------------------------------------------------------- running

    def poll(self) -> None:
        """Deliver what ended, give up what is late, start the next copies."""
        self.deliver()
        self.probes.give_up_late()
        for late in self.promotions.give_up_late(self._clock.monotonic()):
            remote = self.tiers.remote
            if remote is not None and any(t.tier is Tier.REMOTE for t in late.waiting_for):
                remote.gave_no_answer(late.until_s - late.began_s)
        self.demotion.tick()

    def deliver(self) -> None:
        """Deliver what ended."""
        self.tiers.poll()
        for key in self.tiers.withdrawals.settle():
            self.mirror.forget(key)
        gone = self.tiers.pop_dropped()
        self.told.dropped(gone)
        for dropped in gone:
            if dropped.elsewhere is None:
                self.mirror.forget(dropped.key)

    def withdraw(self, match: Match, first_page: int) -> None:
        """What was computed along a match from a page on is wrong: no copy of it may be found."""
        if match.namespace.exact:
            return
        names = self.stored.names(match.namespace, match.key)
        pages = range(first_page, len(match.key) // self._schema.page_size)
        addresses = []
        for group in sources_first(self._schema):
            if self._schema.groups[group].kind.is_snapshot:
                addresses += [self.stored.snapshot_address(names, group, p + 1) for p in pages]
            else:
                addresses += [self.stored.page_address(names, group, page) for page in pages]
        self.tiers.withdraw(addresses)
        keys = {address.key for address in addresses}
        self.promotions.distrust(keys)
        self.meetings.distrust(keys)
        self.deliver()

    def set_decoding(self, decoding: bool) -> None:
        """Whether rows decode: copies out of the device keep to a small share then."""
        self.tiers.engine.decoding = decoding

    @property
    def is_busy(self) -> bool:
        """Whether `poll` has, or will soon have, something to do."""
        return self.tiers.num_awaited > 0 or self.demotion.is_busy

    def yield_to_running(self) -> bool:
        """Give up copies that have not begun, and leases that nobody runs on; whether any were."""
        stopped = self.demotion.yield_blocks()
        gave = self.promotions.give_up_leases()
        gave = self.meetings.abandon_all("no blocks") or gave
        self.deliver()
        return stopped or gave

    def rebind(self, shapes: Sequence[GroupShape]) -> None:
        """Other weights: nothing stored under the old ones is found from now on."""
        self.probes.abandon_all()
        self.promotions.abandon_all()
        self.meetings.abandon_all()
        self.demotion.forget_paths()
        self.tiers.rebind(shapes)
        self.deliver()
        self.mirror.clear()
        self.stored.forget_names()

    def clear(self) -> None:
        """Forget everything that slower tiers hold."""
        self.probes.abandon_all()
        self.promotions.abandon_all()
        self.meetings.abandon_all()
        self.demotion.forget_paths()
        self.demotion.yield_blocks()
        self.tiers.call_off()
        self.deliver()
        self.tiers.clear()
        self.mirror.clear()

    def status(self) -> list[dict[str, Any]]:
        """Figures of every tier, JSON-able, fastest first."""
        return [
            {
                "tier": s.tier.name.lower(),
                "state": s.state,
                "pages": s.num_pages,
                "used_bytes": s.used_bytes,
                "budget_bytes": s.budget_bytes,
                "codec": s.codec,
                "pages_by_group": s.pages_by_group,
                "counters": s.counters,
            }
            for s in self.tiers.status()
        ]

    def dump(self) -> dict[str, Any]:
        """What tiers hold, and which device blocks have copies, JSON-able."""
        return {"tiers": self.status(), "copies": self.mirror.dump()}

    def close(self, drain_s: float = 0.0) -> None:
        """Copy out what is due, for at most `drain_s` seconds, and stop. Idempotent.

        A remote store that does not answer is waited for no longer than that, or, where `drain_s`
        is 0, than `HANG_S`.
        """
        self.probes.abandon_all()
        self.promotions.abandon_all()
        self.meetings.abandon_all()
        ends_s = self._clock.monotonic() + drain_s
        left_s = drain_s
        while left_s > 0 and self.tiers.engine.drain(left_s):
            self.poll()  # what has arrived in one tier is passed on to the next
            if not self.is_busy:
                break
            left_s = ends_s - self._clock.monotonic()
        left_s = max(left_s, 0.0)
        self.tiers.close(left_s, hang_s=left_s if drain_s else HANG_S)
