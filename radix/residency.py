"""What a planner needs to know about a match: which pages are usable, from where, how deep broken.

    tier[g][page]    0 device, 1.. slower, NOWHERE      after validation's verdicts
    broken[g][page]  1 + deepest layer whose state must be written again, where tier is NOWHERE
    snapshot_tier[g][boundary]   tier of a snapshot group's state there; DEVICE where none is needed
    exact[g]         boundaries at which a snapshot group can resume as it stands

A *reach* per group says how slow a tier a plan is willing to read: pages beyond it count as
missing. Sums of bytes by tier are kept so that any range is priced by two look-ups.

This module does not choose.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from statewise.radix import rows
from statewise.radix.match import Match
from statewise.radix.need import needed_ranges, snapshot_boundaries, trailing_starts
from statewise.radix.schema import StateGroupSpec
from statewise.radix.segment import BLOCK, DEPENDENCY, SEQ, STAMP, Tier
from statewise.radix.validation import Condition, Verdict

Int8 = NDArray[np.int8]
Int16 = NDArray[np.int16]
Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]

NOWHERE = 100
SLOW = (Tier.HOST, Tier.DISK, Tier.REMOTE)


class Residency:
    """Usable state along a match, verdicts taken out. Immutable once made."""

    def __init__(self, match: Match, verdicts: Iterable[Verdict] = ()) -> None:
        self.match = match
        self.schema = match.schema
        self.num_pages = match.logical_pages
        self.page_size = match.schema.page_size
        self.faults = [v for v in verdicts if v.is_fault]
        groups = range(match.schema.num_groups)
        self.paged = [g for g in groups if not match.schema.groups[g].kind.is_snapshot]
        self.history = [g for g in groups if match.schema.groups[g].kind.is_history]
        self.trailing = [g for g in groups if not match.schema.groups[g].kind.is_history]
        self.tier: dict[int, Int8] = {g: self._tiers(g) for g in self.paged}
        self.broken: dict[int, Int16] = {g: self._broken(g) for g in self.history}
        self.snapshot_tier: dict[int, Int8] = {
            g: self._snapshots(g) for g in self.trailing if g not in self.tier
        }
        self.exact: dict[int, Bool] = {
            g: tier <= Tier.DEVICE for g, tier in self.snapshot_tier.items()
        }
        self._sums: dict[tuple[int, Tier], Int64] = {}

    def _tiers(self, group: int) -> Int8:
        """[num_pages] fastest tier whose copy is usable."""
        tier = np.full(self.num_pages, NOWHERE, dtype=np.int8)
        after_load = self.match.resident(group, after_load=True)
        now = self.match.resident(group)
        failed = self._failed_pages(group)
        if not now.all() or failed.any():
            slow = rows.slow_tiers(self.match, group)
            loadable = after_load & (slow >= 0)
            tier[loadable] = slow[loadable]
        tier[now & ~failed] = Tier.DEVICE
        return tier

    def _failed_pages(self, group: int) -> Bool:
        failed = np.zeros(self.num_pages, dtype=np.bool_)
        for verdict in self.faults:
            if verdict.group == group:
                failed[[p for p in verdict.pages if p < self.num_pages]] = True
        return failed

    def _broken(self, group: int) -> Int16:
        """[num_pages] 1 + deepest broken layer of each page that is nowhere."""
        layers = self.schema.groups[group].layers
        broken = np.where(self.tier[group] == NOWHERE, max(layers) + 1, 0).astype(np.int16)
        for page, mask in self._partial(group).items():
            if broken[page]:
                broken[page] = 1 + max(la for i, la in enumerate(layers) if mask >> i & 1)
        return broken

    def _partial(self, group: int) -> dict[int, int]:
        """Page -> mask of broken layers, where the page's other layers are good."""
        whole_failures: set[int] = set()
        masks = dict(self.match.invalid_layers(group))
        for verdict in self.faults:
            if verdict.group != group:
                continue
            if verdict.condition in (Condition.LAYERS, Condition.CHECKSUM):
                for page in verdict.pages:
                    masks[page] = masks.get(page, 0) | verdict.layers
            else:
                whole_failures.update(verdict.pages)
        good = self._written_well(group)
        return {
            page: mask
            for page, mask in masks.items()
            if mask and page not in whole_failures and page < len(good) and good[page]
        }

    def _written_well(self, group: int) -> Bool:
        """[num_pages] pages on the device, of the current stamp, over what they depend on."""
        table = rows.table(self.match, group)
        good: Bool = (table[BLOCK] >= 0) & (table[STAMP] == self.match.stamps[group])
        depends_on = self.schema.groups[group].depends_on
        if depends_on is not None:
            source = rows.table(self.match, self.schema.index_of(depends_on))
            good &= table[DEPENDENCY] == source[SEQ]
        return good

    def _snapshots(self, group: int) -> Int8:
        """[num_pages + 1] fastest tier whose snapshot is usable; DEVICE where none is needed."""
        spec = self.schema.groups[group]
        failed = {v.position for v in self.faults if v.group == group and v.position >= 0}
        needed = snapshot_boundaries(spec, self.num_pages, self.page_size)
        out = np.where(needed, NOWHERE, Tier.DEVICE).astype(np.int8)
        for (of_group, page), tier in self.match.slow_snapshots.items():
            if of_group == group and page <= self.num_pages:
                out[page] = min(int(out[page]), tier)
        for snapshot in self.match.snapshots:
            held = snapshot.block_of(group)
            usable = held is not None and held.stamp == self.match.stamps[group]
            if usable and not snapshot.is_terminal and snapshot.position not in failed:
                out[snapshot.page] = Tier.DEVICE
        return out

    # ---------------------------------------------------------------- questions

    @property
    def slow_tiers(self) -> dict[int, list[Tier]]:
        """Per group the slower tiers that hold something the device does not."""
        every = {**self.tier, **self.snapshot_tier}
        return {g: [t for t in SLOW if (tier == t).any()] for g, tier in every.items()}

    def good(self, group: int, reach: Tier) -> Bool:
        """[num_pages] pages usable when tiers up to `reach` are read."""
        return self.tier[group] <= reach

    def resumable(self, group: int, reach: Tier) -> Bool:
        """[num_pages + 1] boundaries at which the group could resume."""
        spec = self.schema.groups[group]
        if spec.kind.is_snapshot:
            there: Bool = self.snapshot_tier[group] <= reach
            return there
        good = self.good(group, reach)
        if spec.kind.is_history:
            running = np.logical_and.accumulate(good)
            return np.concatenate((np.ones(1, dtype=np.bool_), running))
        return self._window_resumable(spec, good)

    def _window_resumable(self, spec: StateGroupSpec, good: Bool) -> Bool:
        total = np.zeros(self.num_pages + 1, dtype=np.int64)
        np.cumsum(good, out=total[1:])
        starts = trailing_starts(spec, self.num_pages, self.page_size)
        boundaries = np.arange(self.num_pages + 1, dtype=np.int64)
        enough: Bool = total - total[starts] == boundaries - starts
        if spec.sinks:
            sinks = np.minimum(-(-spec.sinks // self.page_size), boundaries)
            enough &= total[sinks] == sinks
        return enough

    def needed(self, group: int, page: int) -> list[tuple[int, int]]:
        """Ranges of pages that a paged group needs at boundary `page`."""
        return needed_ranges(self.schema.groups[group], page * self.page_size, self.page_size)

    def changes(self) -> set[int]:
        """Boundaries at which some group's tier changes."""
        out: set[int] = set()
        for tier in self.tier.values():
            out.update((np.flatnonzero(tier[1:] != tier[:-1]) + 1).tolist())
        return out

    def page_sums(self, group: int, tier: Tier) -> Int64:
        """[num_pages + 1] pages below each boundary whose fastest usable copy is on `tier`."""
        known = self._sums.get((group, tier))
        if known is None:
            known = np.zeros(self.num_pages + 1, dtype=np.int64)
            np.cumsum(self.tier[group] == tier, out=known[1:])
            self._sums[group, tier] = known
        return known
