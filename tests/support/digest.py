"""The digest model: a fake worker whose state is integer digests, exact and order-sensitive.

A stack of layers, each owned by one state group, computes over uint64 (wrapping):

    entry[l, t]   = mix(hidden[l, t], t, l)                 written to the group's block
    readout[l, t] = sum of entry[l, i] * odd(i) over what the group may see at t
    hidden[l+1]   = mix(hidden[l], readout[l], l)
    next token    = mix(hidden[L]) % vocab

FULL sees 0..t, WINDOW sees t-W+1..t. The dependency structure is that of a transformer: a missing,
stale, misplaced, half-written or foreign block changes the output at once, and a window layer is
exact only W-1 tokens after its inputs are. Integer sums make every chunking bit-equal.

`cold_output` runs the same arithmetic without any cache: the oracle.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from statewise.radix.schema import CacheSchema, GroupKind, StateGroupSpec
from statewise.runtime.scheduler.batch import (
    BatchRow,
    RowResult,
    ScheduledBatch,
    StepResult,
)

U64 = NDArray[np.uint64]
Int32 = NDArray[np.int32]
POISON = np.uint64(0xDEADBEEFDEADBEEF)


def mix(*parts: U64 | np.uint64 | int) -> U64:
    """A 64-bit avalanche of all parts, elementwise."""
    with np.errstate(over="ignore"):
        h = np.uint64(0x9E3779B97F4A7C15)
        out: U64 = np.asarray(h)
        for part in parts:
            x = np.asarray(part).astype(np.uint64)
            out = (out ^ x) * np.uint64(0xBF58476D1CE4E5B9)
            out = (out ^ (out >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
            out = out ^ (out >> np.uint64(32))
        return out


def odd(positions: NDArray[np.int64]) -> U64:
    """An odd multiplier per position: a sum of entries depends on where each stands."""
    return mix(positions, 77) | np.uint64(1)


def layer_groups(schema: CacheSchema) -> list[int]:
    """Group index of each layer."""
    owner = [-1] * schema.num_layers
    for g, group in enumerate(schema.groups):
        for layer in group.layers:
            owner[layer] = g
    return owner


def readout(group: StateGroupSpec, entries: U64, first: int, start: int, end: int) -> U64:
    """Readouts of positions start..end-1 over `entries` of positions first..end-1."""
    with np.errstate(over="ignore"):
        total = np.cumsum(entries * odd(np.arange(first, end)), dtype=np.uint64)
        here = total[start - first :]
        if group.kind is GroupKind.FULL:
            return here
        before = np.arange(start, end) - group.window - first
        return here - np.where(before >= 0, total[np.maximum(before, 0)], np.uint64(0))


def first_readable(group: StateGroupSpec, start: int) -> int:
    """First position that a token at `start` reads in this group."""
    return 0 if group.kind is GroupKind.FULL else max(0, start - group.window + 1)


def next_token(hidden: np.uint64, vocab: int) -> int:
    """Greedy choice from the last hidden digest."""
    return int(mix(hidden, 5) % np.uint64(vocab))


def cold_hidden(schema: CacheSchema, tokens: Int32) -> U64:
    """Final digests of every position, computed without a cache."""
    positions = np.arange(len(tokens))
    hidden = mix(np.asarray(tokens, dtype=np.int64), positions)
    for layer, g in enumerate(layer_groups(schema)):
        entries = mix(hidden, positions, layer)
        hidden = mix(hidden, readout(schema.groups[g], entries, 0, 0, len(tokens)), layer)
    return hidden


def cold_output(
    schema: CacheSchema, prompt: Int32, max_new: int, vocab: int, eos: frozenset[int] = frozenset()
) -> list[int]:
    """Tokens that a run without any cache generates."""
    tokens = [int(t) for t in prompt]
    out: list[int] = []
    while len(out) < max_new:
        token = next_token(cold_hidden(schema, np.array(tokens, dtype=np.int32))[-1], vocab)
        out.append(token)
        tokens.append(token)
        if token in eos:
            break
    return out


class DigestWorker:
    """Implements the worker protocol over pools of digests."""

    def __init__(self, schema: CacheSchema, num_blocks: tuple[int, ...], vocab: int) -> None:
        self.schema = schema
        self.vocab = vocab
        self.owner = layer_groups(schema)
        page = schema.page_size
        self.pools: dict[int, U64] = {
            layer: np.full((num_blocks[g], page), POISON) for layer, g in enumerate(self.owner)
        }
        self.tokens_computed = 0
        self.released: list[str] = []

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Run every row; rows of one step see each other's writes only after it."""
        for copy in batch.copies_before:
            self._copy(copy.group, copy.src, copy.dst)
        rows = tuple(self._run(row) for row in batch.rows)
        for copy in batch.copies_after:
            self._copy(copy.group, copy.src, copy.dst)
        return StepResult(batch.step_id, rows)

    def _copy(self, group: int, src: int, dst: int) -> None:
        for layer in self.schema.groups[group].layers:
            self.pools[layer][dst] = self.pools[layer][src]

    def _run(self, row: BatchRow) -> RowResult:
        self.tokens_computed += len(row.tokens)
        positions = np.arange(row.start, row.end)
        hidden = mix(np.asarray(row.tokens, dtype=np.int64), positions)
        for layer in range(row.num_layers):
            g = self.owner[layer]
            table = row.page_tables[g]
            if row.write_groups >> g & 1:
                self._write(layer, table, positions, mix(hidden, positions, layer))
            spec = self.schema.groups[g]
            first = max(first_readable(spec, row.start), row.context_starts[g])
            entries = self._read(layer, table, first, row.end)
            hidden = mix(hidden, readout(spec, entries, first, row.start, row.end), layer)
        if row.sample is None:
            return RowResult(row.request_id)
        return RowResult(row.request_id, next_token(hidden[-1], self.vocab))

    def _slots(self, table: Int32, positions: NDArray[np.int64]) -> tuple[Int32, NDArray[np.int64]]:
        page = self.schema.page_size
        blocks = table[positions // page]
        assert (blocks >= 0).all(), "a row touched a page without a block"
        return blocks, positions % page

    def _write(self, layer: int, table: Int32, positions: NDArray[np.int64], values: U64) -> None:
        blocks, slots = self._slots(table, positions)
        self.pools[layer][blocks, slots] = values

    def _read(self, layer: int, table: Int32, first: int, end: int) -> U64:
        blocks, slots = self._slots(table, np.arange(first, end))
        return self.pools[layer][blocks, slots]

    def checksums(self, group: int, blocks: Int32) -> U64:
        """Digest per block and layer."""
        layers = self.schema.groups[group].layers
        with np.errstate(over="ignore"):
            return np.stack(
                [self.pools[la][blocks].sum(axis=1, dtype=np.uint64) for la in layers], axis=1
            )

    def release(self, request_id: str) -> None:
        """Count releases: each request exactly once."""
        assert request_id not in self.released
        self.released.append(request_id)
