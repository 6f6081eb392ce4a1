"""Loads from the end of a prefix while its request computes from the front, until the two meet.

    tokens   0 ...... reused ...... computed >>>>        <<<<< loaded ................. end
                      the request's own, in the tree     private blocks, confirmed

    begin      the end first: windows and snapshots that a resume there needs, the last history
    advance    the request has come so far: what it has passed is not loaded any more
    meet       it has come to what was loaded: that goes to the tree behind what it computed, and
               the request is looked up again. It finds all of it

The request computes as if nothing was loaded, and nobody reads a loaded block before they meet. So
a load that fails, is slow or finds no blocks costs what was copied, and no token that would not
have been computed anyhow. Loads go in batches, which take their blocks when they begin: what a
resume needs beside history alone, then history in pieces that take a fraction of a step, or else
the two would pass each other by up to a piece. Enough of them are under way to last until the next
look, since the control plane sees what has ended between two steps.

This module does not estimate whether it is worth it (`planner`), and does not schedule.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from statewise.radix import Match, RadixTree, Tier
from statewise.runtime.cache.blocks import Blocks
from statewise.runtime.cache.promotion import Incoming, Offer, Promotion, Promotions
from statewise.runtime.cache.tier_events import TierEvents
from statewise.runtime.counters import Labelled
from statewise.runtime.errors import OutOfBlocksError
from statewise.runtime.tiers.copies import LoadPage
from statewise.runtime.tiers.tiers import Tiers
from statewise.runtime.tiers.transfer import Transfer

Int32 = NDArray[np.int32]
BATCH_BYTES = 8 << 20  # at most
MAX_BATCH_PAGES = 64
BATCHES_A_STEP = 4  # history that loads while a step computes, cut into so many
MAX_IN_FLIGHT = 10  # batches of one meeting: more than two steps' worth

Wanted = tuple[int, int, Tier, int, bytes]  # group, page, tier, handle, key


@dataclass(eq=False)
class Batch:
    """Pages of a run, from page `first` on; `pages` are those that have blocks."""

    first: int
    end: int
    wanted: list[Wanted]
    pages: list[Incoming] = field(default_factory=list)
    waiting_for: set[Transfer] = field(default_factory=set)
    has_begun: bool = False

    @property
    def is_done(self) -> bool:
        """Whether its copies have ended."""
        return self.has_begun and not self.waiting_for

    @property
    def is_whole(self) -> bool:
        """Whether everything of it has arrived."""
        return self.is_done and all(page.arrived for page in self.pages)


@dataclass(eq=False)
class Meeting:
    """One request's loads from the end. `batches` are in the order of their beginning."""

    promotion: Promotion  # what it becomes when they meet
    batches: list[Batch]
    end: int  # page at which the request would resume
    floor: int  # pages that the request has
    is_over: bool = False
    lease: None = None  # nothing of the tree is held

    @property
    def ready(self) -> int | None:
        """First page from which everything has arrived; None while the end has not."""
        ready = None
        for batch in self.batches:
            if not batch.is_whole:
                break
            ready = batch.first
        return ready

    def is_met(self, num_pages: int) -> bool:
        """Whether a request with so many pages needs none any more before what has arrived."""
        ready = self.ready
        return not self.is_over and ready is not None and ready <= num_pages < self.end

    def blocks(self, group: int) -> Int32:
        """Blocks that are the meeting's own."""
        own = [p.block for batch in self.batches for p in batch.pages if p.group == group]
        return np.array(own, dtype=np.int32)


class Meetings:
    """Meetings of one cache."""

    def __init__(
        self,
        tree: RadixTree,
        blocks: Blocks,
        tiers: Tiers,
        promotions: Promotions,
        told: TierEvents,
    ) -> None:
        self._tree, self._blocks, self._tiers = tree, blocks, tiers
        self._promotions, self._told = promotions, told
        self._schema = tree.schema
        self.batch_bytes = BATCH_BYTES
        self.open: set[Meeting] = set()  # not over, or copies of theirs run
        self.meetings = Labelled(
            "Prefixes loaded from the end while computed from the front, by outcome.", "outcome"
        )
        self.met_tokens = Labelled(
            "Tokens of prefixes that were met: computed from the front, or loaded.", "part"
        )

    # ---------------------------------------------------------------- begin

    def begin(
        self, match: Match, offer: Offer, position: int, rid: str = "", step_bytes: float = math.inf
    ) -> Meeting:
        """Start to load what stands before the offer's position, from there backwards.

        The request computes from `position` on, and about `step_bytes` could be loaded during each
        of its steps. Takes what blocks there are to spare, or none.
        """
        size = self._schema.page_size
        first, end = position // size, offer.plan.position // size
        promotion = Promotion(match, None, offer.plan, [], rid=rid)
        batch_bytes = min(self.batch_bytes, step_bytes / BATCHES_A_STEP)
        meeting = Meeting(promotion, self._batches(offer, first, end, batch_bytes), end, first)
        self.open.add(meeting)
        self._told.load_begun(rid, offer.plan)
        self._go_on(meeting)
        return meeting

    def _batches(self, offer: Offer, first: int, end: int, batch_bytes: float) -> list[Batch]:
        """All that is no history, then runs of pages from the end backwards."""
        groups, stored = self._schema.groups, offer.findings.stored
        keys = offer.findings.names.pages
        history = [g for g, spec in enumerate(groups) if spec.kind.is_history]
        trailing = [page for page in offer.pages() if page[0] not in history]
        slowest = max(load.tier for load in offer.plan.loads)
        by_page: dict[int, list[Wanted]] = {}
        for g in history:
            for page, (tier, handle) in stored.pages.get(g, {}).items():
                if first <= page < end and tier <= slowest:
                    wanted = (g, page, tier, handle, keys[g, page].key)
                    by_page.setdefault(page, []).append(wanted)
        size = self._schema.page_size
        page_bytes = sum(groups[g].block_bytes(size) for g in history)
        step = max(int(min(batch_bytes / page_bytes, MAX_BATCH_PAGES)), 1)
        batches = [Batch(end, end, trailing)] if trailing else []
        for hi in range(end, first, -step):
            lo = max(hi - step, first)
            pages = chain.from_iterable(by_page.get(page, ()) for page in range(lo, hi))
            batches.append(Batch(lo, hi, list(pages)))
        return batches

    # ---------------------------------------------------------------- copies

    def _go_on(self, meeting: Meeting) -> None:
        """Begin the next batches, as far as they are of use and there is room."""
        open_ones = [b for b in meeting.batches if b.has_begun and not b.is_done]
        for batch in [b for b in meeting.batches if not b.has_begun]:
            if len(open_ones) >= MAX_IN_FLIGHT:
                return
            is_useful = all(b.is_whole or not b.is_done for b in meeting.batches)
            if not is_useful or batch.end <= meeting.floor or not self._begin(meeting, batch):
                self._stop(meeting)
                return
            if not batch.is_done:
                open_ones.append(batch)

    def _stop(self, meeting: Meeting) -> None:
        """No further batch begins; without any, it is over."""
        meeting.batches = [b for b in meeting.batches if b.has_begun]
        if not meeting.batches:
            self.give_up(meeting, "no blocks")

    def _begin(self, meeting: Meeting, batch: Batch) -> bool:
        """Take blocks for a batch and start its copies; False where there are none to spare."""
        history = [spec.kind.is_history for spec in self._schema.groups]
        batch.first = max(batch.first, meeting.floor)
        wanted = [w for w in batch.wanted if not history[w[0]] or w[1] >= batch.first]
        counts = Counter(group for group, *_ in wanted)
        if not self._has_room(meeting, counts):
            return False
        try:
            taken = {g: iter(b.tolist()) for g, b in self._blocks.take(counts).items()}
        except OutOfBlocksError:
            return False
        batch.has_begun = True
        by_tier: dict[Tier, list[tuple[Incoming, LoadPage]]] = {}
        for group, number, tier, handle, key in wanted:
            page = Incoming(group, number, next(taken[group]), key)
            batch.pages.append(page)
            load = LoadPage(group, page.block, handle, key)
            by_tier.setdefault(tier, []).append((page, load))
        for tier, loads in by_tier.items():
            self._start(meeting, batch, tier, loads)
        return True

    def _has_room(self, meeting: Meeting, counts: Counter[int]) -> bool:
        """Whether the request finds its own blocks all the same, should they never meet."""
        size = self._schema.page_size
        left = len(meeting.promotion.match.key) // size + 1 - meeting.floor
        available = self._blocks.available()
        for group, count in counts.items():
            spec = self._schema.groups[group]
            most = -(-spec.window // size) + 2 if spec.kind.is_window else left
            need = 1 if spec.kind.is_snapshot else min(left, most)
            if available[group] < count + need:
                return False
        return True

    def _start(
        self, meeting: Meeting, batch: Batch, tier: Tier, loads: list[tuple[Incoming, LoadPage]]
    ) -> None:
        def ended(transfer: Transfer) -> None:
            batch.waiting_for.discard(transfer)
            pages = [page for page, _ in loads]
            self._promotions.take_results(meeting.promotion, transfer, pages)
            if meeting.is_over:
                self._free(meeting)
            else:
                self._go_on(meeting)

        transfer = self._tiers.load(tier, [load for _, load in loads], ended)
        batch.waiting_for.add(transfer)
        self._promotions.note_begun(transfer, [page for page, _ in loads])

    # ---------------------------------------------------------------- meet

    def advance(self, meeting: Meeting, num_pages: int) -> None:
        """The request has state of `num_pages` pages in the tree."""
        meeting.floor = max(meeting.floor, num_pages)
        if meeting.is_over:
            return
        at_end = meeting.batches[0]
        if num_pages >= meeting.end:
            self.give_up(meeting, "passed")
        elif at_end.is_done and not at_end.is_whole:
            self.give_up(meeting, "failed")
        else:
            self._go_on(meeting)

    def meet(self, meeting: Meeting, position: int) -> Promotion | None:
        """Hand over what has arrived, behind the request's own pages, and lease all of it.

        `position`: the token at which the request began to compute. None where the tree has
        changed under them: nothing is held then.
        """
        size = self._schema.page_size
        promotion, num_pages = meeting.promotion, meeting.floor
        before = promotion.match
        match = self._tree.match(before.namespace, before.key)
        boundary = min(meeting.end, match.logical_pages)
        assert meeting.is_met(num_pages), "nothing is handed over before they meet"
        if match.stamps != before.stamps or match.logical_pages < num_pages:
            self.give_up(meeting, "failed")
            return None
        every = range(self._schema.num_groups)
        promotion.lease = self._tree.lease(match, boundary * size, every)
        promotion.match = match
        promotion.pages = self._take_out(meeting, num_pages)
        self.give_up(meeting, "met")
        promotion.loaded = {p: t for p, t in promotion.loaded.items() if p >= num_pages}
        computed, loaded = num_pages * size - position, (meeting.end - num_pages) * size
        self.met_tokens.add("computed", amount=max(computed, 0))
        self.met_tokens.add("loaded", amount=loaded)
        self._told.met(promotion.rid, position, num_pages * size, meeting.end * size)
        self._promotions.hand_over(promotion)
        return promotion

    def _take_out(self, meeting: Meeting, num_pages: int) -> list[Incoming]:
        """Take out what has arrived and is of use: history from a page on, trailing state."""
        taken: list[Incoming] = []
        for batch in meeting.batches:
            if not batch.is_whole:
                break
            history = [self._schema.groups[p.group].kind.is_history for p in batch.pages]
            pairs = list(zip(batch.pages, history, strict=True))
            taken += [
                page for page, is_history in pairs if not is_history or page.page >= num_pages
            ]
            batch.pages = [p for p, is_history in pairs if is_history and p.page < num_pages]
        return taken

    # ---------------------------------------------------------------- give up

    def give_up(self, meeting: Meeting, outcome: str = "cancelled") -> None:
        """Nothing more of it is wanted; its blocks are freed, those being written to later.

        `outcome` is a word for the counters. Idempotent.
        """
        if meeting.is_over:
            return
        meeting.is_over = True
        self.meetings.add(outcome)
        for batch in meeting.batches:
            for transfer in list(batch.waiting_for):
                self._tiers.engine.cancel(transfer)
        self._free(meeting)

    def _free(self, meeting: Meeting) -> None:
        """Free the blocks of batches that nothing writes to any more."""
        for batch in meeting.batches:
            if not batch.waiting_for:
                for page in batch.pages:
                    self._blocks.free_one(page.group, page.block)
                batch.pages = []
        meeting.batches = [batch for batch in meeting.batches if batch.waiting_for]
        if not meeting.batches:
            self.open.discard(meeting)

    def brings(self, match: Match, position: int) -> bool:
        """Whether the same prefix, up to `position` at least, is being loaded and computed."""
        return any(
            not meeting.is_over and meeting.promotion.covers(match, position)
            for meeting in self.open
        )

    @property
    def is_loading(self) -> bool:
        """Whether copies run whose blocks come back by themselves."""
        return any(batch.waiting_for for meeting in self.open for batch in meeting.batches)

    def distrust(self, keys: Set[bytes]) -> None:
        """Pages of these names are wrong: a meeting that has loaded one is given up."""
        for meeting in list(self.open):
            if any(page.key in keys for batch in meeting.batches for page in batch.pages):
                self.give_up(meeting, "failed")

    def abandon_all(self, outcome: str = "cancelled") -> bool:
        """Nothing that is on its way is wanted any more; whether anything was."""
        wanted = [meeting for meeting in self.open if not meeting.is_over]
        for meeting in wanted:
            self.give_up(meeting, outcome)
        return bool(wanted)
