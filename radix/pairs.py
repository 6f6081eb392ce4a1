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

from statewise.radix.schema import CacheSchema, GroupKind, StateGroupSpec


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

    def count(self, start: int, end: int, num_layers: int) -> float:
        """Entries read by tokens [start, end) in the first `num_layers` layers."""
        return sum(
            times * (reads.before(end) - reads.before(start))
            for reads, times in self._by_depth[num_layers]
        )


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
