"""Demand: which tokens must run through which layers so that given state becomes exact.

Worked out backwards, from the deepest layer up to the embeddings:

    layer l   the state of layer l is to be written at tokens S, or its output is needed at S
              -> its input must be exact at S: layer l-1 must have run there
    window    an output at t reads the W-1 tokens before it: those on pages that are not usable
              must be written by this replay too, so their inputs are needed as well
    history   read from the cache; broken pages below are damage of their own
    recurrent an output at t needs every token since the latest snapshot at or below
    entries   the first entry of a page is made from `overlap` tokens before it as well

    tokens        ........................................ p
    window page missing at p, layer 4                  ####        depth 5
                                        layer 2    ########        depth 3
                                        layer 0 ###########        depth 1

What results is the least that any replay must compute: nothing before a demanded token is needed,
and where usable state is met the demand ends.

This module does not know costs or tiers, and does not cut the demand into steps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from statewise.radix.schema import CacheSchema, GroupKind, StateGroupSpec

Span = tuple[int, int]  # half-open
Spans = tuple[Span, ...]  # ascending, disjoint
MANY = 64  # spans that are worth an array


@dataclass(frozen=True, slots=True)
class Offer:
    """What a replay may read or start from.

    `unusable[g]`: pages of a window group that a replay finds nothing on; `restarts[g]`: tokens at
    which a recurrent group has a snapshot, 0 included, ascending.
    """

    unusable: Mapping[int, Spans]
    restarts: Mapping[int, Sequence[int]]


@dataclass(frozen=True, slots=True)
class Demand:
    """`inputs[l]`: tokens at which the input of layer l must be exact, and layer l runs."""

    inputs: tuple[Spans, ...]
    restarts: frozenset[int] = field(default=frozenset())  # tokens where a snapshot is restored

    @property
    def is_empty(self) -> bool:
        """Nothing is demanded."""
        return not any(self.inputs)

    def depths(self, num_pages: int, page_size: int) -> list[int]:
        """[num_pages] layers that must run on each page; 0 for none."""
        depth = [0] * num_pages
        deeper = (*self.inputs[1:], ())
        for layer, spans in enumerate(self.inputs):
            for lo, hi in spans if spans is not deeper[layer] else ():
                first, stop = lo // page_size, min(-(-hi // page_size), num_pages)
                depth[first:stop] = [layer + 1] * (stop - first)
        return depth


def union(spans: Iterable[Span]) -> Spans:
    """Sort and join; empty spans vanish."""
    out: list[Span] = []
    first = end = -1
    for lo, hi in sorted(spans):
        if hi <= lo:
            continue
        if lo > end:
            if end > first:
                out.append((first, end))
            first, end = lo, hi
        elif hi > end:
            end = hi
    if end > first:
        out.append((first, end))
    return tuple(out)


def within(spans: Spans, parts: Sequence[Span]) -> list[Span]:
    """What of `spans` lies in any of `parts`, which ascend by both ends and may overlap.

    Some of what is found may be empty; `union` drops it.
    """
    if len(spans) + len(parts) > MANY and spans and parts:
        return _many_within(spans, parts)
    out: list[Span] = []
    at = done = 0
    num = len(spans)
    for lo, hi in parts:
        first = lo if lo > done else done
        done = hi
        while at < num and spans[at][1] <= first:
            at += 1
        i = at
        while i < num:
            a, b = spans[i]
            if a >= hi:
                break
            out.append((a if a > first else first, b if b < hi else hi))
            i += 1
    return out


def _many_within(spans: Spans, parts: Sequence[Span]) -> list[Span]:
    """`within`, by arrays."""
    begin, end = np.array(spans, dtype=np.int64).T
    first, stop = np.array(parts, dtype=np.int64).T
    first = np.maximum(first, np.concatenate(([0], stop[:-1])))  # nothing twice
    at = np.searchsorted(end, first, side="right")
    num = np.maximum(np.searchsorted(begin, stop) - at, 0)  # spans that each part meets
    part = np.repeat(np.arange(len(num)), num)
    met = np.arange(len(part)) + np.repeat(at - np.cumsum(num) + num, num)
    lo, hi = np.maximum(begin[met], first[part]), np.minimum(end[met], stop[part])
    return list(zip(lo.tolist(), hi.tolist(), strict=True))


@lru_cache(maxsize=64)
def _readers(schema: CacheSchema) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Per layer: (group, layer that owns the state it reads), for windows and recurrent groups."""
    out: list[list[tuple[int, int]]] = [[] for _ in range(schema.num_layers)]
    for group, spec in enumerate(schema.groups):
        if spec.kind.is_window or spec.kind is GroupKind.RECURRENT:
            for layer in spec.layers:
                out[layer].append((group, layer))
            for layer, owner in spec.shared_layers:
                out[layer].append((group, owner))
    return tuple(tuple(row) for row in out)


def demand_of(schema: CacheSchema, written: Mapping[int, Spans], offer: Offer) -> Demand:
    """Work out what must run so that layer l's state is exact at tokens `written[l]`."""
    size = schema.page_size
    tokens = {g: tuple((a * size, b * size) for a, b in s) for g, s in offer.unusable.items()}
    extra: dict[int, list[Span]] = {}
    restarts: set[int] = set()
    inputs: list[Spans] = [()] * schema.num_layers
    outputs: Spans = ()
    taken: Spans = ()
    closed: dict[int, Spans] = {}  # outputs whose reads of a window group are among them
    readers = _readers(schema)
    for layer in reversed(range(schema.num_layers)):
        own = written.get(layer, ())
        needed: list[Span] = [*(own if own is not taken else ()), *extra.pop(layer, [])]
        taken = own or taken  # of layers alike it is the very same tuple
        for group, owner in readers[layer]:
            spec = schema.groups[group]
            if spec.kind is GroupKind.RECURRENT:
                spans = outputs if layer not in spec.layers else union([*outputs, *needed])
                needed += _since_restart(spans, offer.restarts[group], restarts)
            else:
                if owner == layer:
                    if closed.get(group) is not outputs:
                        needed += _window_reads(spec, outputs, tokens[group])
                    closed[group] = outputs
                else:
                    reads = _window_reads(spec, outputs, tokens[group])
                    extra.setdefault(owner, []).extend(reads)
        if needed:  # else the very same tuple: whoever compares layers sees it at once
            joined = union([*outputs, *needed])
            outputs = outputs if joined == outputs else joined
        inputs[layer] = outputs
    return Demand(tuple(inputs), frozenset(restarts))


def _since_restart(spans: Spans, restarts: Sequence[int], used: set[int]) -> list[Span]:
    """Every token since the latest snapshot at or below each span."""
    out = []
    for lo, hi in spans:
        at = restarts[bisect_right(restarts, lo) - 1]
        used.add(at)
        out.append((at, hi))
    return out


def _window_reads(spec: StateGroupSpec, outputs: Spans, unusable: Spans) -> list[Span]:
    """Tokens on unusable pages that outputs of these tokens read."""
    if not unusable or not outputs:
        return []
    if spec.kind is GroupKind.CHUNKED:
        parts = [(lo - lo % spec.window, hi) for lo, hi in outputs]
    else:
        parts = [(max(0, lo - spec.window + 1), hi) for lo, hi in outputs]
    out = within(unusable, parts)
    if spec.sinks:
        out += within(unusable, [(0, min(spec.sinks, outputs[-1][1]))])
    return out


def overlap_of(schema: CacheSchema, group: int) -> int:
    """Tokens before a page that writing its first entry needs (an overlapping compressor)."""
    return max((schema.groups[g].overlap for g in feeding_tails(schema, group)), default=0)


def feeding_tails(schema: CacheSchema, group: int) -> list[int]:
    """Tail groups whose raw projections become the entries of `group`."""
    spec = schema.groups[group]
    if spec.kind not in (GroupKind.COMPRESSED, GroupKind.INDEX):
        return []
    return [
        g
        for g, other in enumerate(schema.groups)
        if other.kind is GroupKind.TAIL
        and other.ratio == spec.ratio
        and set(other.layers) & set(spec.layers)
    ]
