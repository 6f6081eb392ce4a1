"""Waiting requests whose state is on its way from a slower tier.

    ask      a remote store is asked once what it has of the prompt
    load     what the lookup offers is copied back while others run; then the request is looked up
             again, as if nobody had ever loaded anything
    run      the lease that kept it cached goes to the request
    meet     or: it computes from the front while the rest is loaded from the end (`cache/meeting`)

A load is an offer, never a condition: one that fails, finds no blocks, takes longer than computing
would, or was tried often enough leaves the request with the plan it had without it.

This module does not admit, and does not copy.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from statewise.radix import StaleMatchError
from statewise.runtime.cache.lookup import Lookup
from statewise.runtime.cache.meeting import Meeting
from statewise.runtime.cache.prefix_cache import PrefixCache
from statewise.runtime.cache.promotion import Promotion
from statewise.runtime.cache.tiering import Tiering
from statewise.runtime.errors import OutOfBlocksError
from statewise.runtime.scheduler.request import Request

MAX_LOADS = 2  # of one request: what was evicted before it ran is loaded once more
MAX_LOADING = 4  # requests at a time
PREFETCH_AHEAD = 8  # waiting requests looked at

Reason = tuple[str, str]  # cause, sentence


class Loading:
    """Loads for the waiting requests of one scheduler; does nothing without slower tiers."""

    def __init__(self, cache: PrefixCache, granularity: int = 1) -> None:
        """State is reused at multiples of `granularity` tokens."""
        self._cache = cache
        self._granularity = granularity

    @property
    def is_on(self) -> bool:
        """Whether there are slower tiers."""
        return self._cache.tiering is not None

    @property
    def progress(self) -> frozenset[tuple[Promotion | Meeting, bool]]:
        """What is being loaded or was, and holds blocks; differs whenever that changes."""
        if self._tiering is None:
            return frozenset()
        meetings = {(m, m.is_over) for m in self._tiering.meetings.open}
        return frozenset((p, p.is_done) for p in self._tiering.promotions.open) | meetings

    @property
    def _tiering(self) -> Tiering | None:
        return self._cache.tiering

    def must_wait(self, request: Request, lookup: Lookup, *, is_alone: bool) -> Reason | None:
        """Why the request waits for a slower tier, having started what it waits for; or None.

        The lookup may be out of date afterwards. `is_alone`: nothing runs that could give blocks.
        """
        tiering = self._tiering
        if tiering is None or lookup.match is None:
            return None
        if request.promotion is not None and not request.promotion.is_done:
            if request.promotion.is_wanted:
                return "load", "its state is being copied back"
            request.promotion, request.num_loads = None, MAX_LOADS  # it took too long
        if self._is_asking(request, lookup, tiering):
            return "load", "the remote store is being asked"
        if request.meeting is not None:
            self.meet(request, lookup.position)
            return None
        if lookup.offer is None or request.num_loads >= MAX_LOADS:
            return None
        position = lookup.offer.plan.position
        is_coming = tiering.promotions.is_loading(lookup.match, position)
        if is_coming or tiering.meetings.brings(lookup.match, position):
            return "prefix", "another request's load brings it"
        if tiering.promotions.num_loading >= MAX_LOADING:
            return "load", "others are loading"
        if lookup.offer.plan.concurrent:
            request.num_loads += 1
            request.meeting = tiering.approach(lookup, request.rid)
            return None
        return self._load(request, lookup, is_alone=is_alone)

    def _is_asking(self, request: Request, lookup: Lookup, tiering: Tiering) -> bool:
        """Whether a remote store is still to say what it has; it is asked once a request."""
        if not request.has_asked:
            request.has_asked = True
            request.probe = tiering.ask(lookup, self._granularity, self._cache.cost)
        if request.probe is not None and request.probe.is_done:
            request.probe = None
        return request.probe is not None

    def _load(self, request: Request, lookup: Lookup, *, is_alone: bool) -> Reason | None:
        self.release(request)
        try:
            request.promotion = self._cache.promote(lookup, request.rid)
        except StaleMatchError:
            request.lookup = None
            return "cache", "what it would have loaded has just changed"
        except OutOfBlocksError as error:
            if is_alone:
                request.num_loads = MAX_LOADS  # nobody will give blocks: do without
                return None
            return "blocks", str(error)
        request.num_loads += 1
        if request.promotion.is_done:
            return None
        return "load", "its state is being copied back"

    # ---------------------------------------------------------------- meeting halfway

    def meet(self, request: Request, position: int) -> bool:
        """Whether a request has met what is loaded from its end, which is cached and leased then.

        `position` tokens of it are in the tree. It is to be looked up again.
        """
        meeting, tiering = request.meeting, self._tiering
        if meeting is None or tiering is None:
            return False
        num_pages = position // self._cache.schema.page_size
        tiering.meetings.advance(meeting, num_pages)
        if meeting.is_met(num_pages):
            request.promotion = tiering.meetings.meet(meeting, request.began_at)
        if meeting.is_over:
            request.meeting = None
        return request.promotion is not None

    def meeting_point(self, request: Request) -> int:
        """Position from which the request need not compute, as it looks now; 0 for none."""
        ready = None if request.meeting is None else request.meeting.ready
        return 0 if ready is None else ready * self._cache.schema.page_size

    def give_up_meeting(self, request: Request) -> None:
        """It begins anew, or has ended: nothing is loaded from its end any more."""
        meeting, request.meeting = request.meeting, None
        if meeting is not None and self._tiering is not None:
            self._tiering.meetings.give_up(meeting)

    # ---------------------------------------------------------------- the end of a wait

    def release(self, request: Request) -> None:
        """It runs, or has ended, or will load anew: what was loaded for it may go."""
        probe, request.probe = request.probe, None
        if probe is not None and self._tiering is not None:
            self._tiering.probes.give_up(probe)
        promotion, request.promotion = request.promotion, None
        if promotion is None:
            return
        assert self._tiering is not None
        if promotion.is_done:
            request.loaded.update(promotion.loaded)
            request.load_faults += promotion.faults
        self._tiering.promotions.release(promotion)

    def admitted(self, request: Request) -> None:
        """It runs: what was loaded for it is its own, what was not is told."""
        self.release(request)
        if request.sequence is not None and request.sequence.is_private:
            self.give_up_meeting(request)  # nothing that it computes is there to be met
        lookup = request.lookup
        if self._tiering is None or lookup is None:
            return
        if lookup.offer is not None:
            tried = f"{request.num_loads} loads were tried" if request.num_loads else "no blocks"
            self._tiering.told.load_declined(request.rid, tried)
        elif lookup.why_not:
            self._tiering.told.load_declined(request.rid, lookup.why_not)

    def prefetch(self, waiting: dict[str, Request], look: Callable[[Request], Lookup]) -> None:
        """Have what queued requests will want in host memory by the time it is their turn.

        `look` looks a request up, or remembers. Where the batch is full, nobody else does.
        """
        tiering = self._tiering
        if tiering is None or not tiering.can_prefetch:
            return
        for request in islice(waiting.values(), PREFETCH_AHEAD):
            if request.is_prefetched or request.promotion or request.meeting:
                continue
            lookup = look(request)
            if lookup.offer is not None and not self._is_asking(request, lookup, tiering):
                request.is_prefetched = tiering.prefetch(lookup.offer)

    def yield_to_running(self) -> bool:
        """A request that runs, or could if it had blocks, comes before copies and loads.

        Whether blocks came, or will come by themselves.
        """
        return self._tiering is not None and self._tiering.yield_to_running()

    @property
    def holds_blocks(self) -> bool:
        """Whether blocks come back by themselves when a copy that has begun ends."""
        if self._tiering is None:
            return False
        loading = any(not promotion.is_done for promotion in self._tiering.promotions.open)
        loading = loading or self._tiering.meetings.is_loading
        return loading or any(pool.num_parked for pool in self._cache.pools)
