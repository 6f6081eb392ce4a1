"""What slower tiers hold of a prompt, beyond what the device has.

    history    page after page from the first missing one, until a group has a gap
    trailing   windows and snapshots at that depth; only where they are incomplete, all below it

Copies are found by name, and a name is a digest over all tokens up to the page's end: whoever finds
one need not know who stored it, or when. Names of a prompt are worked out once and remembered for a
while, since a waiting request is looked up again and again.

This module does no I/O and does not choose.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from statewise.radix import Match, Namespace, Tier, TokenKey, Verdict
from statewise.radix.need import needed_ranges, needs_snapshot
from statewise.radix.overlay import Stored, sources_first
from statewise.radix.schema import CacheSchema
from statewise.runtime.tiers.page import PageAddress, PrefixChain
from statewise.runtime.tiers.tiers import Tiers

Bool = NDArray[np.bool_]
FIRST_LOOKS = (1, 8, 64)  # pages asked for at a time: a cold prompt costs one question
MAX_TRAILING_PAGES = 1024  # looked at below the deepest position
MAX_REMEMBERED = 64  # prompts


@dataclass
class Names:
    """Addresses of one prompt's pages, as far as they were needed."""

    chain: PrefixChain
    data: bytes
    pages: dict[tuple[int, int], PageAddress] = field(default_factory=dict)
    snapshots: dict[tuple[int, int], PageAddress] = field(default_factory=dict)  # by boundary


@dataclass(frozen=True)
class Findings:
    """Copies and their names."""

    stored: Stored
    names: Names


class StoredState:
    """Looks for one engine's state in its slower tiers."""

    def __init__(self, schema: CacheSchema, tiers: Tiers) -> None:
        self.schema = schema
        self._tiers = tiers
        self._remembered: OrderedDict[tuple[bytes, bytes], Names] = OrderedDict()
        groups = range(schema.num_groups)
        self._paged = [g for g in sources_first(schema) if not schema.groups[g].kind.is_snapshot]
        self._history = [g for g in self._paged if schema.groups[g].kind.is_history]
        self._windows = [g for g in self._paged if schema.groups[g].kind.is_window]
        self._snapshots = [g for g in groups if schema.groups[g].kind.is_snapshot]

    def forget_names(self) -> None:
        """Names have changed: other weights."""
        self._remembered.clear()

    # ---------------------------------------------------------------- names

    def names(self, namespace: Namespace, key: TokenKey) -> Names:
        """Names of a prompt, remembered ones where there are any."""
        place = (namespace.key, key.data)
        known = self._remembered.get(place)
        if known is None:
            chain = self._tiers.chain(namespace)
            known = self._remembered[place] = Names(chain, key.data)
            if len(self._remembered) > MAX_REMEMBERED:
                self._remembered.popitem(last=False)
        self._remembered.move_to_end(place)
        return known

    def page_address(self, names: Names, group: int, page: int) -> PageAddress:
        """Address of a whole page."""
        known = names.pages.get((group, page))
        if known is None:
            self._extend(names, page + 1)
            known = names.pages[group, page] = self._tiers.address(names.chain, group, page)
        return known

    def snapshot_address(self, names: Names, group: int, boundary: int) -> PageAddress:
        """Address of the state at a page boundary."""
        known = names.snapshots.get((group, boundary))
        if known is None:
            position = boundary * self.schema.page_size
            known = self._tiers.address_at(names.chain, group, names.data, position)
            names.snapshots[group, boundary] = known
        return known

    def _extend(self, names: Names, num_pages: int) -> None:
        if names.chain.num_pages < num_pages:
            names.chain.extend(names.data[: num_pages * self.schema.page_size * 4])

    # ---------------------------------------------------------------- looking

    def look(self, match: Match, verdicts: Iterable[Verdict], step_pages: int) -> Findings:
        """Everything useful that slower tiers have for the match's key.

        Only boundaries that are multiples of `step_pages` can be resumed at.
        """
        look = self.look_at(match, verdicts)
        depth = look.depth
        whole = depth // step_pages * step_pages
        if not look.trailing_at(self._windows, self._snapshots, whole):
            look.trailing_below(self._windows, self._snapshots, depth)
        stored = Stored(depth if self._history else look.deepest, look.pages, look.snapshots)
        return Findings(stored, look.names)

    def look_at(self, match: Match, verdicts: Iterable[Verdict]) -> Look:
        """A match beside what is stored of its history."""
        look = Look(self, match, tuple(v for v in verdicts if v.is_fault))
        look.depth = look.history(self._history)
        return look

    def find(self, addresses: list[PageAddress]) -> list[tuple[Tier, int] | None]:
        """(tier, handle) of each address, None where no tier has it."""
        found = self._tiers.find(addresses)
        return [None if at is None else (at.tier, at.handle) for at in found]


class Look:
    """One look at a match: what the device has, and what was found so far."""

    def __init__(self, state: StoredState, match: Match, faults: tuple[Verdict, ...]) -> None:
        self._state = state
        self._match = match
        self._faults = faults
        self._schema = match.schema
        self._size = match.schema.page_size
        self.num_pages = len(match.key) // self._size
        self.names = state.names(match.namespace, match.key)
        self.pages: dict[int, dict[int, tuple[Tier, int]]] = {}
        self.snapshots: dict[tuple[int, int], tuple[Tier, int]] = {}
        self._usable: dict[int, Bool] = {}
        self.depth = 0  # up to which history is whole, with what was found

    @property
    def deepest(self) -> int:
        """Boundary after the last page of which something was found."""
        ends = [page + 1 for pages in self.pages.values() for page in pages]
        return max([*ends, *(boundary for _, boundary in self.snapshots)], default=0)

    def usable(self, group: int) -> Bool:
        """[num_pages] pages that the device has."""
        known = self._usable.get(group)
        if known is None:
            known = np.zeros(self.num_pages, dtype=np.bool_)
            now = self._match.resident(group)[: self.num_pages]
            known[: len(now)] = now
            for verdict in self._faults:
                if verdict.group == group:
                    known[[p for p in verdict.pages if p < self.num_pages]] = False
            self._usable[group] = known
        return known

    def _find_pages(self, group: int, wanted: list[int]) -> int | None:
        """Look for pages; the first one that was not found, None where all were."""
        addresses = [self._state.page_address(self.names, group, page) for page in wanted]
        of_group = self.pages.setdefault(group, {})
        for page, at in zip(wanted, self._state.find(addresses), strict=True):
            if at is None:
                return page
            of_group[page] = at
        return None

    def history(self, groups: list[int]) -> int:
        """Depth up to which every history group is on the device or was found."""
        if not groups:
            return self.num_pages
        first, looks = 0, iter(FIRST_LOOKS)
        size = FIRST_LOOKS[0]
        whole = np.logical_and.reduce([self.usable(g) for g in groups])
        while first < self.num_pages:
            if whole[first]:  # skip what the device has
                gaps = np.flatnonzero(~whole[first:])
                first = first + int(gaps[0]) if len(gaps) else self.num_pages
                continue
            size = next(looks, size)
            end = min(first + size, self.num_pages)
            for group in groups:
                wanted = (np.flatnonzero(~self.usable(group)[first:end]) + first).tolist()
                missing = self._find_pages(group, wanted)
                end = end if missing is None else min(end, missing)
            if end < min(first + size, self.num_pages):
                self._cut(end)
                return end
            first = end
        return self.num_pages

    def _cut(self, depth: int) -> None:
        """Forget what was found beyond a gap."""
        for group, pages in self.pages.items():
            self.pages[group] = {page: at for page, at in pages.items() if page < depth}

    def trailing_at(self, windows: list[int], snapshots: list[int], boundary: int) -> bool:
        """Look for what trailing groups need at one boundary; whether all of it is there."""
        if not boundary:
            return True
        complete = True
        for group in windows:
            spec = self._schema.groups[group]
            for lo, hi in needed_ranges(spec, boundary * self._size, self._size):
                wanted = (np.flatnonzero(~self.usable(group)[lo:hi]) + lo).tolist()
                complete = self._find_pages(group, wanted) is None and complete
        for group in snapshots:
            if needs_snapshot(self._schema.groups[group], boundary * self._size):
                complete = self._find_snapshots(group, [boundary]) and complete
        return complete

    def trailing_below(self, windows: list[int], snapshots: list[int], depth: int) -> None:
        """Look for all trailing state at and below a depth."""
        first = max(0, depth - MAX_TRAILING_PAGES)
        for group in windows:
            left = (np.flatnonzero(~self.usable(group)[first:depth]) + first).tolist()
            addresses = [self._state.page_address(self.names, group, page) for page in left]
            found = zip(left, self._state.find(addresses), strict=True)
            of_group = self.pages.setdefault(group, {})
            of_group.update({page: at for page, at in found if at is not None})
        for group in snapshots:
            self._find_snapshots(group, list(range(max(first, 1), depth + 1)))

    def _find_snapshots(self, group: int, boundaries: list[int]) -> bool:
        """Look for state at boundaries; whether all of them are on the device or were found."""
        missing = [b for b in boundaries if not self.has_snapshot(group, b)]
        addresses = [self._state.snapshot_address(self.names, group, b) for b in missing]
        for boundary, at in zip(missing, self._state.find(addresses), strict=True):
            if at is not None:
                self.snapshots[group, boundary] = at
        return all((group, boundary) in self.snapshots for boundary in missing)

    def has_snapshot(self, group: int, boundary: int) -> bool:
        """Whether the device has state at a boundary."""
        position = boundary * self._size
        if any(v.group == group and v.position == position for v in self._faults):
            return False
        snapshot = self._match.snapshot_at(position)
        held = None if snapshot is None else snapshot.block_of(group)
        return held is not None and held.stamp == self._match.stamps[group]
