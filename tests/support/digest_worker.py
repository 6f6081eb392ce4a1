"""A worker that runs the digest model over block pools, all rows of a step at once.

    pools[g]    [layers of g, blocks x slots]    one word per slot
    slots       page size / ratio for paged groups, ratio + overlap for tails, 1 for recurrent state

Unwritten memory is poison, so whatever is read too early, or from the wrong place, changes the
output. What rows read and write is turned into index arrays once per step and group; a layer is
then a handful of array operations, however many rows there are.

A tail at position p keeps the raw words of [p - p % ratio - overlap, p) and poison elsewhere; the
state at position 0 is empty whatever the block holds.

This module does not choose tokens other than greedily, and injects no faults.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from statewise.radix.schema import CacheSchema, GroupKind, StateGroupSpec
from statewise.runtime.scheduler.batch import (
    BatchRow,
    BlockCopy,
    RowResult,
    ScheduledBatch,
    StepResult,
)
from support.digest import (
    INVERSE_STEPS,
    ODD,
    POISON,
    STEPS,
    U64,
    Compressor,
    Int32,
    Int64,
    key_of,
    layer_plans,
    mix,
    next_token,
)

NO_SLOTS: Int64 = np.empty(0, dtype=np.int64)
ONE = np.uint64(1)


def slots_of(spec: StateGroupSpec, page_size: int) -> int:
    """Words of one layer in one block."""
    if spec.kind is GroupKind.TAIL:
        return spec.ratio + spec.overlap
    return spec.entries_per_page(page_size)


def digests_of(words: U64) -> U64:
    """[num_blocks, layers] digest of each block and layer of [layers, num_blocks, slots] words."""
    total: U64 = (words * ODD[: words.shape[2]]).sum(axis=2, dtype=np.uint64)
    return mix(total.T, 99)


class DigestWorker:
    """Implements the worker protocol over pools of digests."""

    def __init__(
        self,
        schema: CacheSchema,
        num_blocks: tuple[int, ...],
        vocab: int,
        owner_of: Callable[[str], int] = lambda rid: 0,
    ) -> None:
        self.schema = schema
        self.vocab = vocab
        self.owner_of = owner_of  # of the request id
        self.slots = tuple(slots_of(spec, schema.page_size) for spec in schema.groups)
        self.layer_at = tuple(
            {layer: i for i, layer in enumerate(spec.layers)} for spec in schema.groups
        )
        self.pools: list[U64] = [
            np.full((len(spec.layers), count * slots), POISON, dtype=np.uint64)
            for spec, count, slots in zip(schema.groups, num_blocks, self.slots, strict=True)
        ]
        self.tokens_computed = 0
        self.released: set[str] = set()

    def blocks(self, group: int) -> U64:
        """[layers, blocks, slots] view of a pool."""
        pool = self.pools[group]
        return pool.reshape(pool.shape[0], -1, self.slots[group])

    # ---------------------------------------------------------------- the protocol

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Run every row; rows of one step do not see each other's writes in the same layer."""
        self.copy(batch.copies_before)
        results: dict[int, RowResult] = {}
        for depth in {row.num_layers for row in batch.rows}:
            index = [i for i, row in enumerate(batch.rows) if row.num_layers == depth]
            hidden = StepRun(self, [batch.rows[i] for i in index], depth).run()
            for i, last in zip(index, hidden, strict=True):
                row = batch.rows[i]
                token = next_token(last, self.vocab) if row.sample is not None else -1
                results[i] = RowResult(row.request_id, token)
                self.tokens_computed += len(row.tokens)
        self.copy(batch.copies_after)
        return StepResult(batch.step_id, tuple(results[i] for i in range(len(batch.rows))))

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Carry out block copies in order."""
        for copy in copies:
            blocks = self.blocks(copy.group)
            blocks[:, copy.dst] = blocks[:, copy.src]

    def checksums(self, group: int, blocks: Int32) -> U64:
        """[num_blocks, layers of the group] digest of each block and layer."""
        return digests_of(self.blocks(group)[:, blocks])

    def update_weights(self, model_path: str) -> CacheSchema:
        """Nothing to load: whose state a request computes is decided by `owner_of`."""
        return self.schema

    def release(self, request_id: str) -> None:
        """Count releases: each request exactly once."""
        assert request_id not in self.released, f"{request_id} is released twice"
        self.released.add(request_id)


# ------------------------------------------------------------------------- one step


@dataclass(frozen=True)
class Paged:
    """Where rows write and read in one group with an entry per `ratio` tokens.

    Sums over visible entries are differences of running sums over `slots`: token i sees
    running[hi[i]] - running[lo[i]], and the sinks running[sink_hi[i]] - running[sink_lo[i]].
    """

    write_slots: Int64
    writers: Int64  # flat tokens that write
    slots: Int64
    weights: U64
    lo: Int64
    hi: Int64
    sink_lo: Int64 | None
    sink_hi: Int64 | None


@dataclass(frozen=True)
class Tail:
    """Raw words of one tail group: those kept from before the row, and the row's own.

    `extended` is as long as both together. Flat token `completing[i]` closes the window
    [window_lo[i], window_hi[i]) of it.
    """

    size: int
    weights: U64
    own: Int64  # places of the rows' tokens
    kept: Int64  # places of what the working blocks hold
    kept_slots: Int64
    completing: Int64
    window_lo: Int64
    window_hi: Int64
    clear_slots: Int64  # all slots of the blocks written
    end_slots: Int64
    end: Int64  # places of what the blocks hold afterwards


@dataclass(frozen=True)
class Running:
    """Working blocks of one recurrent group."""

    slots: Int64  # one per row
    writes: Int64  # rows that write


class StepRun:
    """Rows of one depth, laid out flat."""

    def __init__(self, worker: DigestWorker, rows: list[BatchRow], depth: int) -> None:
        self.worker, self.rows = worker, rows
        self.schema = worker.schema
        self.plans = layer_plans(self.schema)[:depth]
        sizes = np.array([len(row.tokens) for row in rows])
        self.starts = np.array([row.start for row in rows])
        self.offsets = np.concatenate(([0], np.cumsum(sizes)))
        self.row_of = np.repeat(np.arange(len(rows)), sizes)
        self.positions: Int64 = (
            np.arange(self.offsets[-1]) - self.offsets[self.row_of] + self.starts[self.row_of]
        )
        self.words = self.positions.astype(np.uint64)
        self.paged: dict[int, Paged] = {}
        self.tails: dict[int, Tail] = {}
        self.running: dict[int, Running] = {}
        for g in sorted({g for plan in self.plans for g in plan.groups}):
            spec = self.schema.groups[g]
            if spec.kind is GroupKind.TAIL:
                self.tails[g] = self._tail(g, spec)
            elif spec.kind is GroupKind.RECURRENT:
                self.running[g] = self._running(g)
            else:
                self.paged[g] = self._paged(g, spec)

    # ---------------------------------------------------------------- layout

    def _writes(self, group: int) -> list[bool]:
        return [bool(row.write_groups >> group & 1) for row in self.rows]

    def _paged(self, g: int, spec: StateGroupSpec) -> Paged:
        per_page, ratio = self.worker.slots[g], spec.ratio
        completes = (self.positions + 1) % ratio == 0
        allowed = np.array(self._writes(g))[self.row_of]
        writers = np.flatnonzero(completes & allowed)
        slots, weights = [], []
        bases, firsts, sinks = [], [], []
        write_parts: list[Int64] = []
        base = 0
        for row in self.rows:
            first, end = self._visible_from(g, spec, row), row.end // ratio
            sink = min(spec.sinks, first)
            entries = np.arange(first, end)
            if sink:
                entries = np.concatenate((np.arange(sink), entries))
            table = row.page_tables[g]
            pages = table[entries // per_page].astype(np.int64)
            assert (pages >= 0).all(), f"group {spec.name}: a row reads a page without a block"
            slots.append(pages * per_page + entries % per_page)
            weights.append(ODD[entries])
            bases.append(base + sink)
            firsts.append(first)
            sinks.append(base)
            base += len(entries)
            if row.write_groups >> g & 1:
                own = np.arange(row.start // ratio, end)
                pages = table[own // per_page].astype(np.int64)
                assert (pages >= 0).all(), f"group {spec.name}: a write without a block"
                write_parts.append(pages * per_page + own % per_page)
        write_slots = np.concatenate(write_parts) if write_parts else NO_SLOTS
        assert len(write_slots) == len(writers)
        place = (np.array(bases), np.array(firsts), sinks)
        reads = (np.concatenate(slots), np.concatenate(weights))
        return self._sums(spec, place, (write_slots, writers), reads)

    def _visible_from(self, g: int, spec: StateGroupSpec, row: BatchRow) -> int:
        """First entry that the row's first token may read."""
        if not spec.kind.is_window:
            return 0
        if spec.kind is GroupKind.CHUNKED:
            first = row.start - row.start % spec.window
        else:
            first = max(0, row.start - spec.window + 1)
        return max(first, row.context_starts[g])

    def _sums(
        self,
        spec: StateGroupSpec,
        place: tuple[Int64, Int64, list[int]],
        writes: tuple[Int64, Int64],
        reads: tuple[Int64, U64],
    ) -> Paged:
        bases, firsts, sinks = place
        base, first = bases[self.row_of], firsts[self.row_of]
        t = self.positions
        hi = base + np.maximum((t + 1) // spec.ratio - first, 0)
        if spec.kind is GroupKind.CHUNKED:
            seen = t - t % spec.window
        elif spec.kind is GroupKind.WINDOW:
            seen = np.maximum(0, t - spec.window + 1)
        else:
            seen = np.zeros_like(t)
        lo = base + np.maximum(seen - first, 0)
        sink_lo = sink_hi = None
        if spec.sinks:  # the run before `base` and the ordinary one join where sinks reach so far
            sink_lo = np.array(sinks)[self.row_of]
            sink_hi = sink_lo + np.minimum(spec.sinks, seen)
        return Paged(*writes, *reads, lo, hi, sink_lo, sink_hi)

    def _tail(self, g: int, spec: StateGroupSpec) -> Tail:
        size = self.worker.slots[g]
        weights, own, kept, kept_slots = [], [], [], []
        completing, window_lo, window_hi = [], [], []
        clear, end_slots, end_places = [], [], []
        base = 0
        for i, row in enumerate(self.rows):
            start, end = row.start, row.end
            opened = start - start % spec.ratio - spec.overlap  # may be negative
            lo = max(0, opened)
            block = int(row.page_tables[g][0])
            assert block >= 0, f"group {spec.name}: a row without a working block"
            weights.append(ODD[lo:end])
            own.append(np.arange(base + start - lo, base + end - lo))
            kept.append(np.arange(base, base + start - lo))
            kept_slots.append(block * size + np.arange(lo - opened, start - opened))
            closing = np.arange(start, end)
            closing = closing[(closing + 1) % spec.ratio == 0]
            completing.append(self.offsets[i] + closing - start)
            window_lo.append(base + np.maximum(0, closing + 1 - spec.ratio - spec.overlap) - lo)
            window_hi.append(base + closing + 1 - lo)
            if row.write_groups >> g & 1:
                left = end - end % spec.ratio - spec.overlap
                keep = np.arange(max(0, left), end)
                clear.append(block * size + np.arange(size))
                end_slots.append(block * size + keep - left)
                end_places.append(base + keep - lo)
            base += end - lo
        return Tail(
            base,
            np.concatenate(weights),
            np.concatenate(own),
            np.concatenate(kept),
            np.concatenate(kept_slots),
            np.concatenate(completing),
            np.concatenate(window_lo),
            np.concatenate(window_hi),
            np.concatenate(clear) if clear else NO_SLOTS,
            np.concatenate(end_slots) if end_slots else NO_SLOTS,
            np.concatenate(end_places) if end_places else NO_SLOTS,
        )

    def _running(self, g: int) -> Running:
        slots = np.array([int(row.page_tables[g][0]) for row in self.rows], dtype=np.int64)
        assert (slots >= 0).all(), f"group {self.schema.groups[g].name}: no working block"
        return Running(slots, np.flatnonzero(self._writes(g)))

    # ---------------------------------------------------------------- layers

    def run(self) -> list[int]:
        """Last hidden digest of every row after the last layer."""
        tokens = np.concatenate([row.tokens for row in self.rows]).astype(np.uint64)
        owners = [self.worker.owner_of(row.request_id) for row in self.rows]
        owner = np.array(owners, dtype=np.uint64)[self.row_of]
        hidden = mix(tokens, self.words, owner)
        for layer, plan in enumerate(self.plans):
            parts: list[U64] = []
            for g, of_layer, mine in plan.paged:
                parts.append(self._attend(g, of_layer, hidden if mine else None))
            parts += [self._compressed(c, layer, hidden) for c in plan.compressors]
            parts += [self._recur(g, layer, hidden) for g in plan.recurrent]
            hidden = mix(hidden, *parts, layer)
        return [int(h) for h in hidden[self.offsets[1:] - 1]]

    def _pool(self, g: int, layer: int) -> U64:
        pool: U64 = self.worker.pools[g][self.worker.layer_at[g][layer]]
        return pool

    def _attend(self, g: int, layer: int, hidden: U64 | None) -> U64:
        """[tokens] readout of a group with an entry per token, written first by its owner."""
        at, pool = self.paged[g], self._pool(g, layer)
        if hidden is not None and len(at.writers):
            made = mix(hidden, self.words, key_of(g, layer))
            pool[at.write_slots] = made[at.writers]
        total = running_sum(pool[at.slots] * at.weights)
        out: U64 = total[at.hi] - total[at.lo]
        if at.sink_hi is not None:
            out = out + total[at.sink_hi] - total[at.sink_lo]
        return out

    def _compressed(self, c: Compressor, layer: int, hidden: U64) -> U64:
        """[tokens] readout of compressed entries, routed by their index where there is one."""
        tail = self.tails[c.tail]
        raw = np.empty(tail.size, dtype=np.uint64)
        raw[tail.own] = mix(hidden, self.words, key_of(c.tail, layer))
        pool = self._pool(c.tail, layer)
        raw[tail.kept] = pool[tail.kept_slots]
        sums = running_sum(raw * tail.weights)
        folds = sums[tail.window_hi] - sums[tail.window_lo]
        self._write_entries(c.entries, layer, tail, folds)
        if len(tail.clear_slots):
            pool[tail.clear_slots] = POISON
            pool[tail.end_slots] = raw[tail.end]
        at = self.paged[c.entries]
        entries = self._pool(c.entries, layer)[at.slots] * at.weights
        if c.index < 0:
            total = running_sum(entries)
            plain: U64 = total[at.hi] - total[at.lo]
            return plain
        self._write_entries(c.index, layer, tail, folds)
        routes = self._pool(c.index, layer)[self.paged[c.index].slots]
        by_bit = []
        for bit in (0, 1):
            chosen = (routes >> np.uint64(bit)) & ONE
            total = running_sum(entries * chosen)
            by_bit.append(total[at.hi] - total[at.lo])
        routed: U64 = np.where((hidden & ONE).astype(np.bool_), by_bit[1], by_bit[0])
        return routed

    def _write_entries(self, g: int, layer: int, tail: Tail, folds: U64) -> None:
        at = self.paged[g]
        if len(at.writers):
            chosen = np.searchsorted(tail.completing, at.writers)
            self._pool(g, layer)[at.write_slots] = mix(folds, key_of(g, layer))[chosen]

    def _recur(self, g: int, layer: int, hidden: U64) -> U64:
        """[tokens] readout of a running state; see `STEP` in `digest`."""
        at, pool = self.running[g], self._pool(g, layer)
        entries = mix(hidden, self.words, key_of(g, layer))
        begin = np.where(self.starts > 0, pool[at.slots], np.uint64(0)) * INVERSE_STEPS[self.starts]
        sums = running_sum(entries * INVERSE_STEPS[self.positions + 1])
        shifted = sums[1:] - sums[self.offsets[self.row_of]] + begin[self.row_of]
        states = shifted * STEPS[self.positions + 1]
        if len(at.writes):
            pool[at.slots[at.writes]] = states[self.offsets[at.writes + 1] - 1]
        return mix(states)


def running_sum(values: U64) -> U64:
    """[n + 1] sums of the first i values, wrapping."""
    out = np.zeros(len(values) + 1, dtype=np.uint64)
    np.cumsum(values, out=out[1:])
    return out
