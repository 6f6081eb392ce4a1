"""Pages that must not be found again by anybody: what they hold turned out to be wrong.

A page's digests say that it is what was stored, not that it was computed from good state. When
state fails that a request has relied on, what that request had computed leaves the tree; the copies
that were made of it meanwhile leave the tiers here.

    begin      from now on nothing finds the pages, passes them on or takes a load of them
    settle     once every copy that was under way has ended, they are destroyed in each store
    is_over    then their names are free again

A copy that a crash overtakes between the two is found by the next process, and so is one in a
remote store that does not answer when the process ends: the time between is that of the copies
under way.

This module does not know requests, and waits for nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from statewise.radix.segment import Tier
from statewise.runtime.tiers.store import Counters, Outcome, TierStore
from statewise.runtime.tiers.transfer import PageResult, Priority, Step, Transfer


@dataclass(eq=False)
class _Withdrawal:
    """Names, and the transfers that must end before they can be free again."""

    keys: tuple[bytes, ...]
    waiting_for: set[Transfer]
    unfinished: set[Tier] = field(default_factory=set)  # stores that still have to destroy theirs


class Withdrawals:
    """Withdrawals of one engine's stores."""

    def __init__(
        self,
        stores: Mapping[Tier, TierStore],
        submit: Callable[[Transfer], bool],
        counters: Counters,
    ) -> None:
        self._stores, self._submit, self._counters = stores, submit, counters
        self._open: list[_Withdrawal] = []
        self._keys: set[bytes] = set()

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def begin(self, keys: Iterable[bytes], under_way: Iterable[Transfer]) -> None:
        """Withdraw pages; `under_way`: transfers that may be touching them."""
        found = tuple(keys)
        if found:
            self._open.append(_Withdrawal(found, set(under_way), set(self._stores)))
            self._keys.update(found)
            self._counters.add("withdrawn", len(found))

    def settle(self) -> list[bytes]:
        """Go on with what was begun; keys that are free again."""
        over: list[bytes] = []
        for one in list(self._open):
            one.waiting_for = {transfer for transfer in one.waiting_for if not transfer.is_done}
            if one.waiting_for:
                continue
            if not one.unfinished:
                self._open.remove(one)
                over += one.keys
                continue
            for tier in sorted(one.unfinished):
                self._destroy(one, tier)
        if over:
            self._keys = {key for one in self._open for key in one.keys}
        return over

    def _destroy(self, one: _Withdrawal, tier: Tier) -> None:
        store = self._stores[tier]

        def run() -> list[PageResult]:
            store.withdraw(one.keys)
            return [PageResult(Outcome.OK)]

        def ended(transfer: Transfer) -> None:
            if not transfer.is_cancelled or transfer.num_ok:
                one.unfinished.discard(tier)

        transfer = Transfer("withdraw", tier, Priority.LOAD, [Step(0, 1, 0, run)], ended)
        one.waiting_for.add(transfer)
        self._submit(transfer)

    def finish(self, hang_s: float) -> None:
        """Destroy what is left: the engine is closed. A remote store gets `hang_s` seconds."""
        left = [(tier, one.keys) for one in self._open for tier in sorted(one.unfinished)]
        for tier, keys in left:
            if tier is not Tier.REMOTE:
                self._stores[tier].withdraw(keys)
        keys = tuple(key for tier, keys in left if tier is Tier.REMOTE for key in keys)
        if keys:
            withdraw = self._stores[Tier.REMOTE].withdraw
            asking = threading.Thread(target=withdraw, args=(keys,), daemon=True)
            asking.start()
            asking.join(hang_s)
        self._open, self._keys = [], set()
