"""How many earlier entries attention reads: exact sums in closed form, per layer, from the schema.

    state that a layer reads        entries that the token at t reads
    FULL                            t + 1
    WINDOW W, s sinks               min(t + 1, W)      + min(s, tokens before the window)
    CHUNKED W                       t % W + 1
    COMPRESSED m                    (t + 1) // m       at most `top_k` where an index routes into it
    INDEX m                         (t + 1) // m       each a fraction of an entry it routes into
    TAIL, RECURRENT                 none: their work is that of the token itself

A layer reads all groups that it owns or shares state of. What an index entry weighs is its bytes
beside those of the entry it stands for.

This module does not know seconds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from statewise.radix.schema import CacheSchema, GroupKind, StateGroupSpec

Float = NDArray[np.float64]
MAX_KNOWN = 1 << 16  # sums kept


@dataclass(frozen=True, slots=True)
class Reads:
    """What one token's attention reads of one layer's state; the numbers are those of the group."""

    window: int = 0  # tokens; 0: all before
    is_chunked: bool = False
    sinks: int = 0
    ratio: int = 1
    most: int = 0  # entries; 0: all there are
    weight: float = 1.0

    def before(self, position: int) -> float:
        """Entries that the tokens [0, position) read, together."""
        if self.is_chunked:
            chunks, rest = divmod(position, self.window)
            return self.weight * (chunks * _sum_to(self.window) + _sum_to(rest))
        if self.window:
            past = max(position - self.window, 0)
            read = _capped(position, self.window) + _capped(past, self.sinks)
            return self.weight * read
        whole = min(position, self.most * self.ratio) if self.most else position
        entries, rest = divmod(whole, self.ratio)
        read = self.ratio * _sum_to(entries - 1) + entries * (rest + 1)
        return self.weight * (read + self.most * (position - whole))

    def before_all(self, positions: Float) -> Float:
        """`before` of many positions at once."""
        if self.is_chunked:
            chunks, rest = np.divmod(positions, self.window)
            read: Float = chunks * _sum_to(self.window) + rest * (rest + 1) / 2
        elif self.window:
            past = np.maximum(positions - self.window, 0)
            read = _all_capped(positions, self.window) + _all_capped(past, self.sinks)
        else:
            most = self.most * self.ratio or np.inf
            entries, rest = np.divmod(np.minimum(positions, most), self.ratio)
            read = self.ratio * entries * (entries - 1) / 2 + entries * (rest + 1)
            read += self.most * np.maximum(positions - most, 0)
        read *= self.weight
        return read


def _all_capped(n: Float, limit: int) -> Float:
    least = np.minimum(n, limit)
    total: Float = least * (least + 1) / 2 + limit * np.maximum(n - limit, 0)
    return total


def _sum_to(n: int) -> int:
    """Return 1 + 2 + ... + n."""
    return n * (n + 1) // 2


def _capped(n: int, limit: int) -> int:
    """Return the sum of min(i, limit) for i in 1..n."""
    return _sum_to(min(n, limit)) + limit * max(n - limit, 0)


class Pairs:
    """Entries read by spans of tokens, for every depth of a forward. Immutable."""

    def __init__(self, layers: tuple[tuple[Reads, ...], ...]) -> None:
        """`layers[l]`: what layer l reads."""
        self.num_layers = len(layers)
        seen: Counter[Reads] = Counter()
        by_depth: list[tuple[tuple[Reads, int], ...]] = [()]
        for reads in layers:
            seen.update(reads)
            by_depth.append(tuple(seen.items()))
        self._by_depth = by_depth
        self._known: dict[tuple[int, int], float] = {}

    def count(self, start: int, end: int, num_layers: int) -> float:
        """Entries read by tokens [start, end) in the first `num_layers` layers."""
        return self._before(end, num_layers) - self._before(start, num_layers)

    def _before(self, position: int, num_layers: int) -> float:
        """Entries read by tokens [0, position); planning asks for the same ones again and again."""
        known = self._known.get((position, num_layers))
        if known is None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            every = self._by_depth[num_layers]
            known = float(sum(times * reads.before(position) for reads, times in every))
            self._known[position, num_layers] = known
        return known

    def before_all(self, positions: Float, num_layers: int) -> Float:
        """Entries read by the tokens before each of many positions."""
        total = np.zeros_like(positions)
        for reads, times in self._by_depth[num_layers]:
            total += times * reads.before_all(positions)
        return total


@lru_cache(maxsize=64)
def full_pairs(num_layers: int) -> Pairs:
    """Layers that all read every token before."""
    return Pairs(((Reads(),),) * num_layers)


@lru_cache(maxsize=64)
def pairs_of(schema: CacheSchema) -> Pairs:
    """What the layers of a model read, from its state groups."""
    layers: list[list[Reads]] = [[] for _ in range(schema.num_layers)]
    for spec in schema.groups:
        if not spec.kind.is_snapshot:
            for layer in (*spec.layers, *(reader for reader, _ in spec.shared_layers)):
                layers[layer].append(_reads_of(schema, spec))
    return Pairs(tuple(map(tuple, layers)))


def _reads_of(schema: CacheSchema, spec: StateGroupSpec) -> Reads:
    if spec.kind.is_window:
        return Reads(spec.window, spec.kind is GroupKind.CHUNKED, spec.sinks)
    if spec.depends_on is not None:
        source = schema.groups[schema.index_of(spec.depends_on)]
        return Reads(ratio=spec.ratio, weight=min(spec.entry_bytes / source.entry_bytes, 1.0))
    most = max((g.top_k for g in schema.groups if g.depends_on == spec.name), default=0)
    return Reads(ratio=spec.ratio, most=most)
