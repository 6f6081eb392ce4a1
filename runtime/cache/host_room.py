"""Which copies of device blocks go through host memory, and which go straight past it.

    host slots of a group   [ arriving: being copied in, or not passed on yet | the rest ]
                              at most half of them

A page that is pushed out of the host before its copy to the next tier was made is on no tier at
all. So only so many of a group are on their way through the host at a time; what is copied out
beyond that goes straight to the next tier. A page that routes into another goes where that goes.
Without a host tier, or with nothing behind it, everything goes to the fastest tier.

This module copies nothing and evicts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from statewise.radix.schema import CacheSchema
from statewise.radix.segment import Tier
from statewise.runtime.clock import Clock
from statewise.runtime.tiers.copies import DevicePage
from statewise.runtime.tiers.host import HostTier
from statewise.runtime.tiers.store import NO_HANDLE
from statewise.runtime.tiers.tiers import Tiers

ARRIVING_SHARE = 0.5  # of a group's slots in the host, at most; one slot at least
REFUSED_PAUSE_S = 1.0  # after the tier behind the host took nothing


class HostRoom:
    """What of each group is on its way through the host."""

    def __init__(self, schema: CacheSchema, tiers: Tiers, clock: Clock) -> None:
        self._schema, self._tiers, self._clock = schema, tiers, clock
        order = list(tiers.stores)
        self.target = order[0]
        self._behind = order[1] if len(order) > 1 and order[0] is Tier.HOST else None
        self._arriving = [0] * schema.num_groups
        self._paused_until_s = 0.0

    def split(self, pages: Sequence[DevicePage]) -> list[tuple[Tier, list[DevicePage]]]:
        """Cut a batch into what goes to each tier; pages that route into others come after them."""
        if self._behind is None or not self._can_go_straight(self._behind):
            return [(self.target, list(pages))]
        host = self._tiers.stores[self.target]
        room = self._rooms()
        through: list[DevicePage] = []
        straight: list[DevicePage] = []
        keys: set[bytes] = set()  # of what goes through
        for page in pages:
            base = page.address.base
            goes = base in keys
            if not goes and room[page.group] > 0:
                goes = not base or host.find([base]) != [NO_HANDLE]
            if goes:
                room[page.group] -= 1
                keys.add(page.address.key)
            (through if goes else straight).append(page)
        return [(self.target, through), (self._behind, straight)]

    def of(self, group: int) -> int:
        """Pages of a group that may be on their way into the host at a time."""
        host = self._tiers.stores[self.target]
        assert isinstance(host, HostTier)
        return max(int(ARRIVING_SHARE * host.capacity(self._schema.groups[group].name)), 1)

    def _rooms(self) -> list[int]:
        """Pages of each group that may enter the host now; of pairs, what both may."""
        groups = self._schema.groups
        rooms = [self.of(group) - arriving for group, arriving in enumerate(self._arriving)]
        for group, spec in enumerate(groups):
            if spec.depends_on is not None:
                base = self._schema.index_of(spec.depends_on)
                rooms[base] = rooms[group] = min(rooms[base], rooms[group])
        return rooms

    def _can_go_straight(self, behind: Tier) -> bool:
        if self._clock.monotonic() < self._paused_until_s:
            return False
        remote = self._tiers.remote
        return behind is not Tier.REMOTE or (remote is not None and remote.can_ask)

    def refuse(self) -> None:
        """The tier behind the host took nothing: everything goes through the host for a while."""
        self._paused_until_s = self._clock.monotonic() + REFUSED_PAUSE_S

    def enter(self, tier: Tier, pages: Sequence[DevicePage], sign: int = 1) -> None:
        """These pages are on their way to a tier, or (-1) with the next one or gone."""
        if tier is Tier.HOST:
            for page in pages:
                self._arriving[page.group] += sign
