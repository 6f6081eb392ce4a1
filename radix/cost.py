"""What recovering costs: measured seconds, frozen for planning.

    seconds of a forward      steps * step_s
      over tokens [a, b)    + time of b - a tokens in chunks, by depth and chunk size (measured)
      of d layers           + pair_s * entries that these tokens read in these layers (`pairs`)

    seconds of a load         latency + queue + bytes / bandwidth, per tier used

The time of tokens is that of everything but reading earlier state. A layer with a window stops
paying for context where the window ends, a compressed one pays for its entries: what each layer
reads is data of the schema.

A value: plans made with it can be compared and repeated. `observe` refines it.

This module does not know residency, does not choose, and reads no clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from statewise.radix.pairs import Pairs, full_pairs
from statewise.radix.segment import Tier

Float = NDArray[np.float64]
Int64 = NDArray[np.int64]
DEPTHS = (0.25, 0.5, 0.75, 1.0)
BATCHES = (16, 128, 512, 2048)
MAX_KNOWN = 1 << 14  # spans whose seconds are kept: damage has the same sizes again and again


@dataclass(frozen=True, slots=True)
class TierCost:
    """One slower tier: bytes per second, seconds until the first byte, seconds of queue now."""

    bytes_per_s: float
    latency_s: float = 0.0
    queue_s: float = 0.0

    def seconds(self, num_bytes: float) -> float:
        """Time to copy `num_bytes`; nothing for nothing."""
        if num_bytes <= 0:
            return 0.0
        return self.latency_s + self.queue_s + num_bytes / self.bytes_per_s


DEFAULT_TIERS: Mapping[Tier, TierCost] = {
    Tier.HOST: TierCost(8e9, 2e-5),
    Tier.DISK: TierCost(1e9, 2e-4),
    Tier.REMOTE: TierCost(1e8, 2e-2),
}


@dataclass(frozen=True)
class CostModel:
    """Frozen figures. `tokens_per_s[i][j]` was measured at depth `depths[i]`, `batches[j]` tokens.

    `depths` are fractions of the model's layers, ascending, the last 1.0; `batches` are tokens
    of one row and step, ascending. `chunk` is how many tokens one step computes at most. `pairs`
    counts what attention reads; None: every layer reads every token before.
    """

    num_layers: int
    tokens_per_s: tuple[tuple[float, ...], ...]
    depths: tuple[float, ...] = DEPTHS
    batches: tuple[int, ...] = BATCHES
    chunk: int = 2048
    step_s: float = 1e-3
    pair_s: float = 0.0  # seconds per entry that a token reads in one layer
    pairs: Pairs | None = field(default=None, repr=False, compare=False)
    tiers: Mapping[Tier, TierCost] = field(default_factory=lambda: dict(DEFAULT_TIERS))
    _times: Float = field(init=False, repr=False, compare=False)
    _by_depth: dict[int, list[float]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    _known: dict[tuple[int, int], float] = field(  # of (tokens, layers), nothing read
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        """Check the tables and turn rates into times that never fall with more work."""
        if len(self.tokens_per_s) != len(self.depths) or any(
            len(row) != len(self.batches) for row in self.tokens_per_s
        ):
            raise ValueError("tokens_per_s must be [len(depths)][len(batches)]")
        if list(self.depths) != sorted(self.depths) or self.depths[-1] != 1.0:
            raise ValueError("depths must ascend to 1.0")
        rates = np.array(self.tokens_per_s, dtype=np.float64)
        if not (rates > 0).all() or self.chunk < 1:
            raise ValueError("rates and chunk must be positive")
        times = np.array(self.batches, dtype=np.float64)[None, :] / rates
        times = np.maximum.accumulate(np.maximum.accumulate(times, axis=0), axis=1)
        object.__setattr__(self, "_times", times)

    @classmethod
    def uniform(cls, num_layers: int, tokens_per_s: float, **more: float | int) -> CostModel:
        """Build a model whose forward costs tokens x depth and nothing else."""
        rows = tuple((tokens_per_s / depth,) * len(BATCHES) for depth in DEPTHS)
        return cls(num_layers, rows, **more)  # type: ignore[arg-type]

    def _at_depth(self, depth: float) -> Float:
        """[batches] times at a depth; proportional below the first measured one."""
        if depth <= self.depths[0]:
            low: Float = self._times[0] * (depth / self.depths[0])
            return low
        return np.array([np.interp(depth, self.depths, column) for column in self._times.T])

    def prefill_s(self, start: int, end: int, num_layers: int | None = None) -> float:
        """Seconds of a forward over [start, end) at a depth (all layers by default)."""
        if end <= start:
            return 0.0
        depth = self.num_layers if num_layers is None else num_layers
        seconds = self._known.get((end - start, depth))
        if seconds is None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            steps = -(-(end - start) // self.chunk)
            seconds = steps * self.step_s + self.tokens_s(end - start, depth)
            self._known[end - start, depth] = seconds
        return seconds + self.pair_s * self.num_pairs(start, end, depth) if self.pair_s else seconds

    def tokens_s(self, num_tokens: int, num_layers: int) -> float:
        """Seconds of that many tokens in chunks, nothing read and no steps counted."""
        full, rest = divmod(num_tokens, self.chunk)
        seconds = full * self._one_chunk_s(self.chunk, num_layers) if full else 0.0
        return seconds + self._one_chunk_s(rest, num_layers) if rest else seconds

    def num_pairs(self, start: int, end: int, num_layers: int) -> float:
        """Entries that tokens [start, end) read in the first layers."""
        pairs = self.pairs or full_pairs(self.num_layers)
        return pairs.count(start, end, num_layers)

    def spans_s(self, starts: Int64, ends: Int64) -> Float:
        """`prefill_s` of many spans [start, end) at full depth; nothing for empty ones."""
        tokens = np.maximum(ends - starts, 0)
        full, rest = np.divmod(tokens, self.chunk)
        seconds: Float = (full + (rest > 0)) * self.step_s
        self._one_chunk_s(1, self.num_layers)
        times = self._by_depth[self.num_layers]
        sizes = (0, *self.batches)
        last = np.where(
            rest > sizes[-1], times[-1] * rest / sizes[-1], np.interp(rest, sizes, times)
        )
        seconds += full * self._one_chunk_s(self.chunk, self.num_layers) + last
        if self.pair_s:
            pairs = self.pairs or full_pairs(self.num_layers)
            read = [
                pairs.before_all(at.astype(np.float64), self.num_layers) for at in (starts, ends)
            ]
            seconds += self.pair_s * np.where(tokens > 0, read[1] - read[0], 0.0)
        return seconds

    def reads_s(self, num_pages: int, page_size: int, num_layers: int) -> Float:
        """[num_pages + 1] seconds of reading, for the tokens before each boundary of a page."""
        at = np.arange(num_pages + 1, dtype=np.float64) * page_size
        pairs = self.pairs or full_pairs(self.num_layers)
        return self.pair_s * pairs.before_all(at, num_layers) if self.pair_s else np.zeros_like(at)

    def _one_chunk_s(self, num_tokens: int, num_layers: int) -> float:
        """Seconds of one chunk by bilinear interpolation; planning asks this thousands of times."""
        times = self._by_depth.get(num_layers)
        if times is None:
            measured = self._at_depth(num_layers / self.num_layers)
            times = self._by_depth[num_layers] = [0.0, *measured.tolist()]
        sizes = (0, *self.batches)
        if num_tokens > sizes[-1]:
            return times[-1] * num_tokens / sizes[-1]
        i = max(bisect_left(sizes, num_tokens), 1)
        slope = (times[i] - times[i - 1]) / (sizes[i] - sizes[i - 1])
        return slope * (num_tokens - sizes[i - 1]) + times[i - 1]

    def load_s(self, bytes_by_tier: Mapping[Tier, float]) -> float:
        """Seconds to copy from every tier named, one after the other."""
        return sum(self.tiers[tier].seconds(size) for tier, size in bytes_by_tier.items())
