"""What slower tiers did for cached state, told: loads by request and page, drops, refusals.

Why was this page (not) loaded? `load_begun` says what was asked for and where it was; `load_ended`
names every page that did not come back, and why; `load_declined` why nothing was asked for;
`pages_dropped` what a tier let go. Copies between tiers are told where they end (`Tiers.poll`).

What failed is also put into sentences for the request's own report. This module decides nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from statewise.radix import Tier
from statewise.radix.plan import RecoveryPlan
from statewise.radix.schema import CacheSchema
from statewise.runtime.counters import Labelled
from statewise.runtime.events import MAX_PAGES, EventLog
from statewise.runtime.tiers.store import Outcome
from statewise.runtime.tiers.tiers import Dropped
from statewise.runtime.tiers.transfer import PageResult, Transfer

Page = tuple[int, int]  # group, page
WORDS = {
    Outcome.MISSING: "gone",
    Outcome.CORRUPT: "damaged",
    Outcome.FAILED: "not readable",
    Outcome.REFUSED: "refused",
    Outcome.CANCELLED: "called off",
}


class TierEvents:
    """Tells the events of one cache's slower tiers."""

    def __init__(self, schema: CacheSchema, events: EventLog) -> None:
        self._names = [spec.name for spec in schema.groups]
        self._events = events
        self.dropped_pages = Labelled("Pages that a tier let go by itself.", "tier", "cause")

    def load_begun(self, rid: str, plan: RecoveryPlan) -> None:
        """Copies of what `plan` loads begin; `pages` of snapshots are boundaries."""
        if not self._events.is_on:
            return
        self._events.emit(
            "load_begun",
            rid=rid,
            position=plan.position,
            loads=[
                {
                    "tier": load.tier.name.lower(),
                    "group": self._names[load.group],
                    "pages": [load.start_page, load.end_page],
                }
                for load in plan.loads
            ],
            waits=plan.asynchronous,
            estimated_s=plan.total_s,
        )

    def load_ended(self, rid: str, transfer: Transfer, pages: Sequence[Page]) -> tuple[str, ...]:
        """One tier's copies for a request ended; returns what failed, in sentences."""
        known = [result for result in transfer.results if result is not None]
        failed = [
            (page, result)
            for page, result in zip(pages, known, strict=True)
            if result.outcome is not Outcome.OK
        ]
        tier = transfer.tier.name.lower()
        if self._events.is_on:
            self._events.emit(
                "load_ended",
                rid=rid,
                tier=tier,
                num_pages=len(pages),
                num_failed=len(failed),
                failed=[self._describe(*one) for one in failed[:MAX_PAGES]],
                num_bytes=transfer.size_bytes,
                seconds=transfer.seconds,
            )
        return tuple(self._sentences(tier, failed))

    def _describe(self, page: Page, result: PageResult) -> dict[str, object]:
        return {
            "group": self._names[page[0]],
            "page": page[1],
            "outcome": result.outcome.value,
            "reason": result.reason,
            "layers": result.bad_layers,
        }

    def _sentences(self, tier: str, failed: Sequence[tuple[Page, PageResult]]) -> Iterable[str]:
        """One for each group and kind of failure; what was called off is none."""
        kinds: Counter[tuple[int, Outcome, str]] = Counter()
        first: dict[tuple[int, Outcome, str], int] = {}
        for (group, page), result in failed:
            kind = (group, result.outcome, result.reason)
            kinds[kind] += 1
            first.setdefault(kind, page)
        for kind, count in kinds.items():
            group, outcome, reason = kind
            if outcome is not Outcome.CANCELLED:
                what = "1 page" if count == 1 else f"{count} pages"
                why = f" ({reason})" if reason else ""
                yield (
                    f"{tier}: {what} of {self._names[group]!r} from page {first[kind]} on: "
                    f"{WORDS[outcome]}{why}"
                )

    def met(self, rid: str, start: int, position: int, end: int) -> None:
        """Computing from `start` came to `position`, from where all up to `end` was loaded."""
        self._events.emit("load_met", rid=rid, start=start, position=position, end=end)

    def load_declined(self, rid: str, why: str) -> None:
        """A request runs without state that slower tiers have."""
        self._events.emit("load_declined", rid=rid, why=why)

    def demotion_refused(self, tier: Tier, num_pages: int, cause: str) -> None:
        """Pages were not copied out now; `cause`: queue (write-behind is full) or pins."""
        self._events.emit(
            "demotion_refused", tier=tier.name.lower(), num_pages=num_pages, cause=cause
        )

    def dropped(self, dropped: Sequence[Dropped]) -> None:
        """Tiers let go of pages by themselves."""
        for tier, why in sorted({(one.tier, one.why.value) for one in dropped}):
            mine = [one for one in dropped if (one.tier, one.why.value) == (tier, why)]
            self.dropped_pages.add(tier.name.lower(), why, amount=len(mine))
            self._events.emit(
                "pages_dropped",
                tier=tier.name.lower(),
                cause=why,
                num_pages=len(mine),
                num_elsewhere=sum(one.elsewhere is not None for one in mine),
                names=[one.key.hex() for one in mine[:MAX_PAGES]],
            )
