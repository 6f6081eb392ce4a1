"""What it takes to resume at one position: what to load, what to write again, over which ground.

    usable    what a replay may read: history within reach; window pages on the device, or loaded
              because the position needs them
    loads     what the position needs and a slower tier within reach has
    demand    what the position needs and nothing has, worked out by `demand`

This module does not price, and does not compare positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from statewise.radix.demand import (
    Demand,
    Offer,
    Span,
    Spans,
    demand_of,
    feeding_tails,
    overlap_of,
    union,
)
from statewise.radix.plan import Load
from statewise.radix.replays import Ground
from statewise.radix.residency import NOWHERE, SLOW, Residency
from statewise.radix.schema import GroupKind
from statewise.radix.segment import Tier

Bool = NDArray[np.bool_]
Int64 = NDArray[np.int64]
Reach = tuple[Tier, ...]  # per group: slowest tier read


def runs_of(flags: Bool) -> list[Span]:
    """Half-open runs of true entries."""
    padded = np.concatenate(([False], flags, [False]))
    edges = np.flatnonzero(padded[1:] != padded[:-1]).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


class Target:
    """Resuming at boundary `page` within a reach."""

    def __init__(self, have: Residency, page: int, reach: Reach) -> None:
        self.have, self.page, self.reach = have, page, reach
        self.schema = have.schema
        self.usable = {g: self._usable(g) for g in have.paged}
        for group in have.history:  # writing a source again outdates what was built over it
            depends_on = self.schema.groups[group].depends_on
            if depends_on is not None:
                self.usable[group] = (
                    self.usable[group] & self.usable[self.schema.index_of(depends_on)]
                )
        self.missing = {g: self._missing(g) for g in have.paged}  # pages to be written again
        self.lacking = [  # snapshot groups without a snapshot here
            g for g, tier in have.snapshot_tier.items() if tier[page] > reach[g]
        ]

    def _usable(self, group: int) -> Bool:
        """[page] pages that a replay may read."""
        tier = self.have.tier[group][: self.page]
        if self.schema.groups[group].kind.is_history:
            within: Bool = tier <= self.reach[group]
            return within
        usable: Bool = tier == Tier.DEVICE
        for lo, hi in self.have.needed(group, self.page):
            usable[lo:hi] = tier[lo:hi] <= self.reach[group]
        return usable

    def _missing(self, group: int) -> Bool:
        """[page] pages that the position needs and that are not usable."""
        missing = np.zeros(self.page, dtype=np.bool_)
        for lo, hi in self.have.needed(group, self.page):
            missing[lo:hi] = ~self.usable[group][lo:hi]
        return missing

    @property
    def repairing(self) -> tuple[int, ...]:
        """Groups that cannot resume here before something was written."""
        return tuple(sorted([*(g for g, m in self.missing.items() if m.any()), *self.lacking]))

    @property
    def has_trailing_damage(self) -> bool:
        """Whether a window, tail or recurrent group is among them."""
        return any(not self.schema.groups[g].kind.is_history for g in self.repairing)

    @property
    def has_history_damage(self) -> bool:
        """Whether history is among them."""
        return any(self.schema.groups[g].kind.is_history for g in self.repairing)

    # ---------------------------------------------------------------- writing again

    def demand(self) -> Demand:
        """What must run so that every group can resume here.

        A replay writes every layer it runs: where a page with some good layers is run deeper than
        what is broken on it, its deeper layers are demanded as well, until that changes nothing.
        """
        depth = {g: self._broken_depth(g) for g in self.missing}
        while True:
            found = demand_of(self.schema, self._written(depth), self._offer())
            ran = np.array(found.depths(self.page, self.have.page_size), dtype=np.int64)
            deeper = False
            for group in self.have.history:
                spoiled = self.missing[group] & self._is_deeper(group, depth[group], ran)
                if spoiled.any():
                    depth[group] = np.where(spoiled, ran, depth[group])
                    deeper = True
            if not deeper:
                return found

    def _is_deeper(self, group: int, depth: Int64, ran: Int64) -> Bool:
        """[page] pages where a layer of the group would run without being demanded."""
        layers = np.array(self.schema.groups[group].layers)
        rewritten = (depth[:, None] <= layers) & (layers < ran[:, None])
        found: Bool = np.logical_or.reduce(rewritten, axis=1)
        return found

    def _written(self, depth: dict[int, Int64]) -> dict[int, Spans]:
        """Per layer the tokens whose state must be exact in the end; layers alike share one."""
        written: dict[int, list[Spans]] = {}
        end = self.page * self.have.page_size
        for group in self.lacking:
            spec = self.schema.groups[group]
            back = 1 if spec.kind is GroupKind.RECURRENT else end % spec.ratio + spec.overlap
            last = ((max(0, end - back), end),)
            for layer in spec.layers:
                written.setdefault(layer, []).append(last)
        for group, missing in self.missing.items():
            if missing.any():
                for layer, spans in self._written_pages(group, missing, depth[group]):
                    written.setdefault(layer, []).append(spans)
        joined: dict[tuple[int, ...], Spans] = {}
        for parts in written.values():
            alike = tuple(map(id, parts))
            if alike not in joined:
                joined[alike] = union(chain.from_iterable(parts))
        return {layer: joined[tuple(map(id, parts))] for layer, parts in written.items()}

    def _written_pages(
        self, group: int, missing: Bool, depth: Int64
    ) -> Iterator[tuple[int, Spans]]:
        """Per layer of a paged group the tokens whose state is written again."""
        size = self.have.page_size
        before = overlap_of(self.schema, group)
        bounds = np.unique(depth[missing])
        known: dict[int, Spans] = {}
        for layer in self.schema.groups[group].layers:
            kind = int(np.searchsorted(bounds, layer, side="right"))
            if kind == len(bounds):
                continue
            if kind not in known:
                pages = runs_of(missing & (depth > layer))
                known[kind] = tuple((max(0, a * size - before), b * size) for a, b in pages)
            yield layer, known[kind]

    def _broken_depth(self, group: int) -> Int64:
        """[page] 1 + deepest layer that must be written where the page is missing."""
        whole = max(self.schema.groups[group].layers) + 1
        if group not in self.have.broken:
            return np.full(self.page, whole, dtype=np.int64)
        tier, broken = self.have.tier[group][: self.page], self.have.broken[group][: self.page]
        depth: Int64 = np.where(tier == NOWHERE, broken, whole).astype(np.int64)
        depends_on = self.schema.groups[group].depends_on
        if depends_on is not None:
            depth[~self.usable[self.schema.index_of(depends_on)]] = whole
        return depth

    def _offer(self) -> Offer:
        unusable: dict[int, Spans] = {}
        for group in self.have.trailing:
            if group in self.usable:
                unusable[group] = tuple(runs_of(~self.usable[group]))
        recurrent = [
            g for g in self.have.exact if self.schema.groups[g].kind is GroupKind.RECURRENT
        ]
        common = np.ones(self.page + 1, dtype=np.bool_)
        for group in recurrent:
            common &= self.have.exact[group][: self.page + 1]
        tokens = (np.flatnonzero(common) * self.have.page_size).tolist()
        return Offer(unusable, dict.fromkeys(recurrent, tokens))

    def ground(self, step_pages: int) -> Ground:
        """The pages below, for cutting a demand into steps."""
        mask = np.zeros(self.page, dtype=np.int64)
        for group, usable in self.usable.items():
            mask |= np.where(usable, 0, 1 << group)
        back = {g: np.flatnonzero(m).tolist() for g, m in self.missing.items()}
        return Ground(self.schema, mask.tolist(), back, self._scratch(), step_pages)

    def _scratch(self) -> tuple[int, ...]:
        """Snapshot groups that a replay carries along."""
        groups = set(self.lacking)
        for group in self.repairing:
            groups.update(feeding_tails(self.schema, group))
        groups.update(
            g for g in self.have.exact if self.schema.groups[g].kind is GroupKind.RECURRENT
        )
        return tuple(sorted(groups))

    # ---------------------------------------------------------------- loading

    def load_ranges(self, front: int = 0) -> Iterator[tuple[int, int, int]]:
        """(group, first page, end page) that resuming here reads; history from `front` on."""
        for group in self.have.paged:
            is_history = self.schema.groups[group].kind.is_history
            for lo, hi in self.have.needed(group, self.page):
                yield group, max(lo, front) if is_history else lo, hi

    def snapshot_loads(self) -> list[Load]:
        """Snapshots to copy back: one block each, named by the boundary they stand at."""
        return [
            Load(group, self.page, self.page + 1, Tier(int(tier[self.page])))
            for group, tier in self.have.snapshot_tier.items()
            if Tier.DEVICE < tier[self.page] <= self.reach[group]
        ]

    def load_bytes(self, front: int = 0) -> dict[Tier, float]:
        """Bytes to copy from each slower tier."""
        sizes: dict[Tier, float] = {}
        for load in self.snapshot_loads():
            size = self.schema.groups[load.group].block_bytes(self.have.page_size)
            sizes[load.tier] = sizes.get(load.tier, 0.0) + size
        for group, lo, hi in self.load_ranges(front):
            for tier in SLOW:
                if tier > self.reach[group] or lo >= hi:
                    break
                sums = self.have.page_sums(group, tier)
                pages = int(sums[hi] - sums[lo])
                if pages:
                    block = self.schema.groups[group].block_bytes(self.have.page_size)
                    sizes[tier] = sizes.get(tier, 0.0) + pages * block
        return sizes

    def loads(self, front: int = 0) -> list[Load]:
        """Load steps, each page once."""
        out = self.snapshot_loads()
        for group, lo, hi in self.load_ranges(front):
            tiers = self.have.tier[group][lo:hi]
            for tier in SLOW:
                if tier <= self.reach[group]:
                    out += [Load(group, lo + a, lo + b, tier) for a, b in runs_of(tiers == tier)]
        return out
