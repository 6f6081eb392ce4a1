"""Least seconds of resuming at each of many positions: what need not be looked at closely.

    history    every page that is missing below must run, as deep as it is broken; pages on which
               other groups are missing are other steps (`replays`), and each step has its overhead
    windows    missing pages of the window before the position must run through all its layers
    recurrent  everything since the latest snapshot must run
    loads      what the position needs and a slower tier within reach has: exactly its price
    prefill    from the position to the end of the prompt: exactly its price

Of the first three the largest counts, since one step may serve them all. A page in a step costs at
least its tokens at the best rate of any step that could hold it. All positions are priced at once,
from sums over pages; nothing here is larger than what any plan at the position costs, but for
rounding, which `MARGIN` allows for.

This module does not make plans.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from statewise.radix.cost import CostModel
from statewise.radix.need import trailing_starts
from statewise.radix.residency import NOWHERE, SLOW, Residency
from statewise.radix.schema import GroupKind
from statewise.radix.segment import Tier

Bool = NDArray[np.bool_]
Int64 = NDArray[np.int64]
Float = NDArray[np.float64]
Reach = tuple[Tier, ...]
MARGIN = 1 - 1e-9


class Prices:
    """Seconds per page, by depth, shared by all reaches of one planning."""

    def __init__(self, have: Residency, cost: CostModel, prompt_len: int) -> None:
        self._have, self._cost = have, cost
        starts = np.arange(have.num_pages + 1) * have.page_size
        self.prefill = cost.spans_s(starts, np.full_like(starts, prompt_len))
        self._fronts: dict[int, Float] = {}
        self._rates: dict[tuple[int, int], float] = {}
        self._tables: dict[int, Float] = {}

    def computed(self, direct: int) -> Float:
        """[num_pages + 1] seconds of computing from page `direct` up to each boundary."""
        known = self._fronts.get(direct)
        if known is None:
            size = self._have.page_size
            ends = np.arange(self._have.num_pages + 1) * size
            known = self._cost.spans_s(np.full_like(ends, direct * size), ends)
            self._fronts[direct] = known
        return known

    def rate(self, num_pages: int, depth: int) -> float:
        """Least seconds per token in a step of 1 to `num_pages` pages, nothing read."""
        most = 1 << (num_pages - 1).bit_length()  # few different ones; more pages are no dearer
        known = self._rates.get((most, depth))
        if known is None:
            size, cost = self._have.page_size, self._cost
            longest = min(most * size, cost.chunk)
            shortest = 1 if most * size > cost.chunk else size
            shortest = min(shortest, longest)
            sizes = {shortest, longest, *(b for b in cost.batches if shortest < b < longest)}
            known = min(cost.tokens_s(n, depth) / n for n in sizes)
            self._rates[most, depth] = known
        return known

    def reads(self, depth: int) -> Float:
        """[num_pages + 1] seconds of reading, for all tokens before each boundary."""
        known = self._tables.get(depth)
        if known is None:
            pages, size = self._have.num_pages, self._have.page_size
            known = self._tables[depth] = self._cost.reads_s(pages, size, depth)
        return known

    def pages(self, depth: Int64) -> Float:
        """[num_pages] seconds of reading of each page at its depth."""
        out = np.zeros(len(depth))
        if self._cost.pair_s:
            for d in _different(depth[depth > 0]):
                at = depth == d
                out[at] = np.diff(self.reads(d))[at]
        return out


class Bounds:
    """What positions cost at least, reading from tiers within one reach.

    `seconds[page]` is for plans that load and replay, `front[page]` for those that compute from
    `direct` while later pages are loaded; infinite where there is none. `steps[page]`: replays that
    history alone takes.
    """

    def __init__(self, have: Residency, reach: Reach, prices: Prices, cost: CostModel) -> None:
        self._have, self._reach, self._prices, self._cost = have, reach, prices, cost
        self._size = have.page_size
        depth, mask = self._broken()
        history, self.steps = self._history(depth, mask)
        trailing, self.is_trailing_damaged = self._trailing()
        self.is_history_damaged = np.concatenate(([False], np.logical_or.accumulate(depth > 0)))
        self.loads = self._loads()
        self._depth = depth
        self.seconds = MARGIN * (np.maximum(history, trailing) + self.loads + prices.prefill)

    # ---------------------------------------------------------------- history

    def _broken(self) -> tuple[Int64, Int64]:
        """[num_pages] layers that must run, and the groups that are missing, of history."""
        have = self._have
        depth = np.zeros(have.num_pages, dtype=np.int64)
        mask = np.zeros(have.num_pages, dtype=np.int64)
        lost = {g: have.tier[g] > self._reach[g] for g in have.history}
        for g, missing in lost.items():
            spec = have.schema.groups[g]
            whole = max(spec.layers) + 1
            deep = np.where(have.tier[g] == NOWHERE, have.broken[g], whole)
            if spec.depends_on is not None:
                outdated = lost[have.schema.index_of(spec.depends_on)]
                missing = missing | outdated
                deep = np.where(outdated, whole, deep)
            depth = np.maximum(depth, np.where(missing, deep, 0))
            mask |= missing.astype(np.int64) << g
        return depth, mask

    def _history(self, depth: Int64, mask: Int64) -> tuple[Float, Int64]:
        """[num_pages + 1] (seconds, steps) of running all broken pages below each boundary."""
        num_pages = self._have.num_pages
        if not mask.any():
            return np.zeros(num_pages + 1), np.zeros(num_pages + 1, dtype=np.int64)
        begins = np.flatnonzero(np.diff(mask, prepend=-1))  # runs of pages alike
        lengths = np.diff(begins, append=num_pages)
        starts = np.zeros(num_pages, dtype=np.int64)
        starts[begins] = mask[begins] > 0
        per_page = self._prices.pages(depth)
        bucket = np.repeat(lengths, lengths)
        combined = bucket * (self._have.schema.num_layers + 1) + depth
        broken = depth > 0
        combined = combined[broken]
        unit = self._have.schema.num_layers + 1
        rates = np.zeros(int(combined.max()) + 1)
        for kind in _different(combined):
            rates[kind] = self._prices.rate(*divmod(kind, unit))
        per_page[broken] += self._size * rates[combined]
        seconds = np.cumsum(per_page + starts * self._cost.step_s)
        return _from_zero(seconds), _from_zero(np.cumsum(starts)).astype(np.int64)

    # ---------------------------------------------------------------- trailing state

    def _trailing(self) -> tuple[Float, Bool]:
        """[num_pages + 1] (seconds, whether anything is missing) of windows and snapshots."""
        num_pages = self._have.num_pages
        seconds, damaged = np.zeros(num_pages + 1), np.zeros(num_pages + 1, dtype=np.bool_)
        for g in self._have.trailing:
            spec = self._have.schema.groups[g]
            runs = self._running(max(spec.layers) + 1)
            if not spec.kind.is_snapshot:
                able = self._have.resumable(g, self._reach[g])
                missing = self._have.tier[g] > self._reach[g]
                lost = _from_zero(np.cumsum(np.where(missing, np.diff(runs), 0.0)))
                starts = trailing_starts(spec, num_pages, self._size)
                seconds = np.maximum(seconds, lost - lost[starts])
                damaged |= ~able
                continue
            lacking = self._have.snapshot_tier[g] > self._reach[g]
            damaged |= lacking
            if spec.kind is GroupKind.RECURRENT:
                since = runs - runs[self._restarts()]
                seconds = np.maximum(seconds, np.where(lacking, since, 0.0))
        return seconds + damaged * self._cost.step_s, damaged

    def _running(self, depth: int) -> Float:
        """[num_pages + 1] least seconds of running every page below at a depth."""
        pages = np.arange(self._have.num_pages + 1)
        every = max(self._have.num_pages, 1)
        return pages * (self._size * self._prices.rate(every, depth)) + self._prices.reads(depth)

    def _restarts(self) -> Int64:
        """[num_pages + 1] latest boundary below each at which all recurrent state can begin."""
        exact = np.ones(self._have.num_pages + 1, dtype=np.bool_)
        for g, spec in enumerate(self._have.schema.groups):
            if spec.kind is GroupKind.RECURRENT:
                exact &= self._have.exact[g]
        boundaries = np.arange(self._have.num_pages + 1)
        latest = np.maximum.accumulate(np.where(exact, boundaries, 0))
        return np.concatenate(([0], latest[:-1]))

    # ---------------------------------------------------------------- loading

    def _loads(self) -> Float:
        """[num_pages + 1] seconds of loading what each boundary needs."""
        have, size = self._have, self._size
        total = np.zeros(have.num_pages + 1)
        for tier in SLOW:
            count = np.zeros(have.num_pages + 1)
            for g, spec in enumerate(have.schema.groups):
                if tier > self._reach[g]:
                    continue
                if spec.kind.is_snapshot:
                    pages = (have.snapshot_tier[g] == tier).astype(np.int64)
                else:
                    pages = self._pages_needed(g, tier)
                count += pages * float(spec.block_bytes(size))
            if count.any():
                total += np.where(count > 0, self._seconds(tier, count), 0.0)
        return total

    def _seconds(self, tier: Tier, num_bytes: Float) -> Float:
        cost = self._cost.tiers[tier]
        return cost.latency_s + cost.queue_s + num_bytes / cost.bytes_per_s

    def _pages_needed(self, group: int, tier: Tier) -> Int64:
        spec, sums = self._have.schema.groups[group], self._have.page_sums(group, tier)
        if spec.kind.is_history:
            return sums
        boundaries = np.arange(self._have.num_pages + 1)
        starts = trailing_starts(spec, self._have.num_pages, self._size)
        sinks = np.minimum(-(-spec.sinks // self._size), starts)
        return sums[boundaries] - sums[starts] + sums[sinks]

    # ---------------------------------------------------------------- computing meanwhile

    def front(self, direct: int) -> Float:
        """[num_pages + 1] least seconds of computing from `direct` past the last broken page."""
        num_pages = self._have.num_pages
        if max(self._reach) is Tier.DEVICE:
            return np.full(num_pages + 1, np.inf)
        pages = np.arange(num_pages)
        last = np.maximum.accumulate(np.where(self._depth > 0, pages, -1))
        first = np.maximum(_from_zero(last + 1), direct + 1).astype(np.int64)
        possible = ~self.is_trailing_damaged & (first < np.arange(num_pages + 1))
        computed = self._prices.computed(direct)[np.minimum(first, num_pages)]
        seconds = MARGIN * (computed + self._prices.prefill)
        return np.where(possible, seconds, np.inf)


def _different(numbers: Int64) -> list[int]:
    """Which small natural numbers occur, ascending."""
    found: list[int] = np.flatnonzero(np.bincount(numbers)).tolist()
    return found


def _from_zero(sums: NDArray[np.generic]) -> Float:
    out = np.zeros(len(sums) + 1)
    out[1:] = sums
    return out
