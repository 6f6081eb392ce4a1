"""What the cost model learns from loads: bandwidth of a tier, and how long a new load would wait.

    under way    loads that were started and not yet delivered; their bytes are the queue
    busy         a time without gaps in which one load at least of a tier ran

Loads that overlap share their medium, so that one's own time says little: two at once would teach
half of the bandwidth. What all of them took together is observed where a busy time ends, or has
lasted `LONGEST_S`. A load that fails or is called off ends it and teaches nothing.

This module does not start loads.
"""

from __future__ import annotations

from dataclasses import dataclass

from statewise.radix import Tier
from statewise.radix.observe import CostObserver
from statewise.runtime.tiers.transfer import Transfer

LONGEST_S = 5.0


@dataclass(slots=True)
class _Busy:
    """Loads of one tier that ended, each begun before the one before it had ended."""

    began_s: float
    finished_s: float
    num_bytes: int = 0
    floor_s: float = 0.0  # what was before has been observed


class LoadCosts:
    """Loads of one cache, as far as they tell of costs. Bytes are the device's, as in plans."""

    def __init__(self) -> None:
        self.observer: CostObserver | None = None
        self._under_way: dict[Transfer, int] = {}
        self._busy: dict[Tier, _Busy] = {}

    def begun(self, transfer: Transfer, num_bytes: int) -> None:
        """A load of so many bytes was started."""
        self._under_way[transfer] = num_bytes
        self._learn_queue(transfer.tier)

    def ended(self, transfer: Transfer, *, is_whole: bool) -> None:
        """It was delivered; `is_whole`: with all of its pages."""
        num_bytes, tier = self._under_way.pop(transfer), transfer.tier
        busy = self._busy.pop(tier, None)
        if busy is not None and busy.finished_s < transfer.started_s:
            self._observe(tier, busy)
            busy = None
        if is_whole and transfer.seconds > 0:
            busy = busy or _Busy(transfer.started_s, transfer.finished_s)
            busy.began_s = max(min(busy.began_s, transfer.started_s), busy.floor_s)
            busy.finished_s = max(busy.finished_s, transfer.finished_s)
            busy.num_bytes += num_bytes
            if all(other.tier is not tier for other in self._under_way):
                self._observe(tier, busy)
            elif busy.finished_s - busy.began_s < LONGEST_S:
                self._busy[tier] = busy
            else:
                self._observe(tier, busy)
                now = busy.finished_s
                self._busy[tier] = _Busy(now, now, floor_s=now)
        self._learn_queue(tier)

    def _observe(self, tier: Tier, busy: _Busy) -> None:
        if self.observer is not None:
            self.observer.observe_load(tier, busy.num_bytes, busy.finished_s - busy.began_s)

    def _learn_queue(self, tier: Tier) -> None:
        """How long a new load would wait behind those that are under way."""
        if self.observer is None:
            return
        queued = sum(size for t, size in self._under_way.items() if t.tier is tier)
        cost = self.observer.model.tiers[tier]
        if queued or cost.queue_s:
            self.observer.observe_queue(tier, queued / cost.bytes_per_s)
