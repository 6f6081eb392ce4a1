"""What recovering costs: measured seconds, frozen for planning, refined while running.

    seconds of a forward      steps * step_s
      of n tokens           + time of n tokens in chunks, by depth and chunk size (measured)
      ending at e           + pair_s * depth * sum of context lengths     (attention)

    seconds of a load         latency + queue + bytes / bandwidth, per tier used

`CostModel` is a value: plans made with it can be compared and repeated. `CostObserver` is told
durations by whoever measured them; neither reads a clock.

This module does not know residency, and does not choose.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from statewise.radix.segment import Tier

Float = NDArray[np.float64]
DEPTHS = (0.25, 0.5, 0.75, 1.0)
BATCHES = (16, 128, 512, 2048)


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
    of one row and step, ascending. `chunk` is how many tokens one step computes at most.
    """

    num_layers: int
    tokens_per_s: tuple[tuple[float, ...], ...]
    depths: tuple[float, ...] = DEPTHS
    batches: tuple[int, ...] = BATCHES
    chunk: int = 2048
    step_s: float = 1e-3
    pair_s: float = 0.0  # seconds per (token, context token) at full depth
    tiers: Mapping[Tier, TierCost] = field(default_factory=lambda: dict(DEFAULT_TIERS))
    _times: Float = field(init=False, repr=False, compare=False)
    _by_depth: dict[int, list[float]] = field(
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
        full, rest = divmod(end - start, self.chunk)
        seconds = full * (self._one_chunk_s(self.chunk, depth) + self.step_s)
        if rest:
            seconds = seconds + self._one_chunk_s(rest, depth) + self.step_s
        if self.pair_s:
            pairs = (end - start) * (start + end + 1) / 2.0
            seconds += pairs * (self.pair_s * depth / self.num_layers)
        return seconds

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


class CostObserver:
    """Refines a cost model from what really happened, by exponential averages.

    A forward's duration moves the nearest measured cell, and all cells by a little, so that one
    kind of observation corrects the others before they are seen.
    """

    def __init__(self, model: CostModel, weight: float = 0.1) -> None:
        if not 0.0 < weight <= 1.0:
            raise ValueError(f"weight {weight} outside (0, 1]")
        self._model = model
        self._weight = weight
        self.num_observed = 0

    @property
    def model(self) -> CostModel:
        """Current figures."""
        return self._model

    def observe_prefill(self, start: int, end: int, num_layers: int, seconds: float) -> None:
        """Learn that a forward over [start, end) alone in its step took `seconds`."""
        if end <= start or seconds <= 0:
            return
        model = self._model
        expected = model.prefill_s(start, end, num_layers)
        ratio = min(max(expected / seconds, 0.05), 20.0)  # one outlier moves no figure far
        near = self._cell(min(end - start, model.chunk), num_layers)
        rates = [list(row) for row in model.tokens_per_s]
        for i, row in enumerate(rates):
            for j, rate in enumerate(row):
                weight = self._weight if (i, j) == near else self._weight / 4
                row[j] = rate * ratio**weight
        self._model = replace(model, tokens_per_s=tuple(tuple(row) for row in rates))
        self.num_observed += 1

    def _cell(self, num_tokens: int, num_layers: int) -> tuple[int, int]:
        model = self._model
        depth = num_layers / model.num_layers
        i = min(range(len(model.depths)), key=lambda k: abs(model.depths[k] - depth))
        j = min(range(len(model.batches)), key=lambda k: abs(model.batches[k] - num_tokens))
        return i, j

    def observe_load(self, tier: Tier, num_bytes: int, seconds: float) -> None:
        """Learn that copying `num_bytes` from `tier` took `seconds`, its latency included."""
        if num_bytes <= 0 or seconds <= 0:
            return
        old = self._model.tiers[tier]
        rate = num_bytes / max(seconds - old.latency_s, seconds * 0.1)
        bandwidth = old.bytes_per_s ** (1 - self._weight) * rate**self._weight
        self._set_tier(tier, replace(old, bytes_per_s=bandwidth))
        self.num_observed += 1

    def observe_queue(self, tier: Tier, seconds: float) -> None:
        """Set how long a new copy from `tier` would wait now."""
        self._set_tier(tier, replace(self._model.tiers[tier], queue_s=max(seconds, 0.0)))

    def _set_tier(self, tier: Tier, cost: TierCost) -> None:
        self._model = replace(self._model, tiers={**self._model.tiers, tier: cost})
