"""Refines a cost model by what really happened: a robust fit over the last forwards.

    seconds of a forward  ~  scale * time of its tokens  +  pair_s * entries it reads

Both factors are those with the least sum of |seconds / estimate - 1| over what was seen lately,
later ones counting more. An absolute difference, not a square: a step beside other work is far off
and moves nothing, as long as most are not. What the calibration measured counts as a forward or
two, so that few observations, or such that are all alike, do not tear the two factors apart. What
is left is a matter of depth and chunk size, and moves the nearest measured cell a little.

This module does not read a clock: it is told durations by whoever measured them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from statewise.radix.cost import CostModel, TierCost
from statewise.radix.segment import Tier

SEEN = 64  # forwards remembered
FADE = 0.985  # weight of a forward relative to that of the next
ROUNDS = 8  # of reweighting
SLACK = 0.05  # relative difference below which all are as good as equal
TRUST = 1.5  # what calibration measured counts as so many forwards
SPLIT = 0.2  # and its ratio of the two factors as so many
LONG = 8192  # tokens before a chunk of which reading might be a good part
LEAST_SCALE = 0.02


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward that was alone in its step."""

    start: int
    end: int
    num_layers: int
    seconds: float


class CostObserver:
    """Holds the current figures of one engine."""

    def __init__(self, model: CostModel, weight: float = 0.1) -> None:
        """`weight` is that of one observation of a load, and of a cell."""
        if not 0.0 < weight <= 1.0:
            raise ValueError(f"weight {weight} outside (0, 1]")
        self._base = model
        self._model = model
        self._is_fitted = True
        self._weight = weight
        self._seen: deque[Forward] = deque(maxlen=SEEN)
        self.num_observed = 0

    @property
    def model(self) -> CostModel:
        """Current figures."""
        if not self._is_fitted:
            self._fit()
        return self._model

    def observe_prefill(self, start: int, end: int, num_layers: int, seconds: float) -> None:
        """Learn that a forward over [start, end) alone in its step took `seconds`."""
        if end <= start or seconds <= 0:
            return
        self._seen.append(Forward(start, end, num_layers, seconds))
        self._is_fitted = False
        self.num_observed += 1

    # ---------------------------------------------------------------- fitting

    def _fit(self) -> None:
        """Work out both factors anew, then let the newest forward move its cell."""
        self._is_fitted = True
        scale, pair_s = fit(self._base, tuple(self._seen))
        self._correct_cell(self._seen[-1], scale, pair_s)
        rates = tuple(tuple(rate / scale for rate in row) for row in self._base.tokens_per_s)
        self._model = replace(self._base, tokens_per_s=rates, pair_s=pair_s)

    def _correct_cell(self, seen: Forward, scale: float, pair_s: float) -> None:
        model = self._base
        tokens_s, pairs = _features(model, seen)
        ratio = (scale * tokens_s + pair_s * pairs) / seen.seconds
        ratio = min(max(ratio, 0.5), 2.0)  # one outlier moves no figure far
        depth = seen.num_layers / model.num_layers
        size = min(seen.end - seen.start, model.chunk)
        i = min(range(len(model.depths)), key=lambda k: abs(model.depths[k] - depth))
        j = min(range(len(model.batches)), key=lambda k: abs(model.batches[k] - size))
        rates = [list(row) for row in model.tokens_per_s]
        rates[i][j] *= ratio**self._weight
        self._base = replace(model, tokens_per_s=tuple(map(tuple, rates)))

    # ---------------------------------------------------------------- tiers

    def observe_load(self, tier: Tier, num_bytes: int, seconds: float) -> None:
        """Learn that copying `num_bytes` from `tier` took `seconds`, its latency included."""
        if num_bytes <= 0 or seconds <= 0:
            return
        old = self._base.tiers[tier]
        rate = num_bytes / max(seconds - old.latency_s, seconds * 0.1)
        bandwidth = old.bytes_per_s ** (1 - self._weight) * rate**self._weight
        self._set_tier(tier, replace(old, bytes_per_s=bandwidth))
        self.num_observed += 1

    def observe_queue(self, tier: Tier, seconds: float) -> None:
        """Set how long a new copy from `tier` would wait now."""
        self._set_tier(tier, replace(self._base.tiers[tier], queue_s=max(seconds, 0.0)))

    def _set_tier(self, tier: Tier, cost: TierCost) -> None:
        tiers = {**self._base.tiers, tier: cost}
        self._base = replace(self._base, tiers=tiers)
        self._model = replace(self._model, tiers=tiers)


def fit(model: CostModel, seen: tuple[Forward, ...]) -> tuple[float, float]:
    """(factor of the tokens' time, seconds per pair) that explain what was seen."""
    rows = [(*_features(model, forward), forward.seconds) for forward in seen]
    ages = [FADE ** (len(rows) - 1 - i) for i in range(len(rows))]
    off = [(1.0, TRUST)]  # seconds beside the calibration's estimate
    off += [(s / (a + model.pair_s * b), age) for (a, b, s), age in zip(rows, ages, strict=True)]
    scale = _median(off)
    pair_s = scale * model.pair_s
    for _ in range(ROUNDS):
        before = scale, pair_s
        scale, pair_s = _solve(model, rows, ages, before)
        if abs(scale / before[0] - 1) < 1e-3 and abs(pair_s - before[1]) <= 1e-3 * pair_s:
            break
    return scale, pair_s


def _median(weighted: list[tuple[float, float]]) -> float:
    """The value of (value, weight) pairs at which half of the weight is reached."""
    half = sum(weight for _, weight in weighted) / 2
    reached = 0.0
    for value, weight in sorted(weighted):
        reached += weight
        if reached >= half:
            return value
    raise AssertionError("nothing to choose from")


def _features(model: CostModel, seen: Forward) -> tuple[float, float]:
    """(seconds of the tokens, entries read) of a forward."""
    tokens_s = model.tokens_s(seen.end - seen.start, seen.num_layers)
    return tokens_s, model.num_pairs(seen.start, seen.end, seen.num_layers)


def _solve(
    model: CostModel,
    rows: list[tuple[float, float, float]],
    ages: list[float],
    now: tuple[float, float],
) -> tuple[float, float]:
    """One round of least squares, each row weighted as an absolute difference would be."""
    aa = ab = bb = at = bt = 0.0
    for weight, a, b, target in _equations(model, rows, ages, now):
        aa += weight * a * a
        ab += weight * a * b
        bb += weight * b * b
        at += weight * a * target
        bt += weight * b * target
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        scale, pair_s = (bb * at - ab * bt) / determinant, (aa * bt - ab * at) / determinant
        if pair_s >= 0 and scale >= LEAST_SCALE:
            return scale, pair_s
        if pair_s >= 0:
            return LEAST_SCALE, max((bt - ab * LEAST_SCALE) / bb, 0.0)
    return max(at / aa, LEAST_SCALE), 0.0


def _equations(
    model: CostModel,
    rows: list[tuple[float, float, float]],
    ages: list[float],
    now: tuple[float, float],
) -> Iterator[tuple[float, float, float, float]]:
    """(weight, factor of scale, factor of pair_s, sum) of what should hold."""
    scale, pair_s = now
    for (tokens_s, pairs, seconds), age in zip(rows, ages, strict=True):
        estimate = scale * tokens_s + pair_s * pairs
        yield age * _weight(estimate, seconds), tokens_s, pairs, seconds
    yield TRUST * _weight(scale, 1.0), 1.0, 0.0, 1.0
    # What reading costs beside the tokens, as it was measured; nothing: beside a long prompt's.
    long = model.num_pairs(LONG, LONG + model.chunk, model.num_layers)
    typical = long / model.tokens_s(model.chunk, model.num_layers)
    before = model.pair_s
    if before:
        yield SPLIT * _weight(scale, pair_s / before), -1.0, 1 / before, 0.0
    elif typical:
        off = max(pair_s * typical / scale, SLACK)
        yield SPLIT / (scale * scale * off), 0.0, typical, 0.0


def _weight(estimate: float, seen: float) -> float:
    """Weight under which squares add up to the relative difference itself."""
    return 1 / (estimate * estimate * max(abs(seen / estimate - 1), SLACK))
