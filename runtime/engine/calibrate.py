"""Measures what a forward costs here, before the first request: the cost model's first figures.

    by batch     full-depth forwards of 1, 16, 64 ... tokens, until the time is up
    by context   the same tokens behind a long context: seconds per (token, context token)
    by depth     one batch size at a quarter, half and three quarters of the layers

What there was no time for is filled in from the nearest figure; serving refines all of it. Depth
matters because a partial rebuild runs only as deep as the damage.

This module does not choose anything by these figures.
"""

from __future__ import annotations

from typing import Any

from statewise.radix.cost import CostModel
from statewise.radix.schema import CacheSchema
from statewise.runtime.clock import Clock
from statewise.runtime.engine.trial import Trials
from statewise.runtime.scheduler.batch import Worker

DEPTHS = (0.25, 0.5, 0.75, 1.0)
BATCHES = (1, 16, 64, 256, 512, 1024, 2048)
CONTEXT = 2048  # tokens
FEWEST = 64  # tokens of a step behind a context that tell what a pair costs
BUDGET_S = 2.0
LONGEST_SHARE = 0.5  # of the time that is left, for one measurement
INITIAL_TOKENS_PER_S = 1000.0  # where nothing was measured
SMALLEST_S = 1e-7


def guess(num_layers: int, chunk: int) -> CostModel:
    """Return a cost model for where nothing is measured."""
    return CostModel.uniform(num_layers, INITIAL_TOKENS_PER_S, chunk=chunk)


def calibrate(
    worker: Worker,
    schema: CacheSchema,
    num_blocks: tuple[int, ...],
    chunk: int,
    clock: Clock,
    budget_s: float = BUDGET_S,
) -> CostModel:
    """Measure for about `budget_s`, on blocks nobody owns; `chunk` is the tokens of one step."""
    watch = _Stopwatch(Trials(worker, schema, num_blocks), clock, budget_s)
    batches = [b for b in BATCHES if b <= min(chunk, watch.room)] or [1]
    by_batch = _by_batch(watch, batches)
    if not by_batch:
        return guess(schema.num_layers, chunk)
    pair_s = _pair_seconds(watch, by_batch)
    shares = _by_depth(watch, schema.num_layers, by_batch)
    alone = {size: _without_pairs(size, s, pair_s) for size, s in by_batch.items()}
    rates = tuple(
        tuple(size / (seconds * share) for size, seconds in alone.items()) for share in shares
    )
    return CostModel(
        schema.num_layers,
        rates,
        depths=DEPTHS,
        batches=tuple(by_batch),
        chunk=chunk,
        pair_s=pair_s,
    )


class _Stopwatch:
    """Times trials while there is time."""

    def __init__(self, trials: Trials, clock: Clock, budget_s: float) -> None:
        self._trials = trials
        self._clock = clock
        self._end = clock.monotonic() + budget_s
        self.room = trials.room

    @property
    def left_s(self) -> float:
        """Time that is left."""
        return self._end - self._clock.monotonic()

    def allows(self, expected_s: float) -> bool:
        """Whether something that takes `expected_s` may be measured."""
        return expected_s <= self.left_s * LONGEST_SHARE

    def seconds(self, start: int, count: int, num_layers: int = 0, *, twice: bool = False) -> float:
        """Time of one trial: the better of two, if there is time for a second or it must be."""
        best = self._once(start, count, num_layers)
        if twice or self.allows(best):
            best = min(best, self._once(start, count, num_layers))
        return max(best, SMALLEST_S)

    def _once(self, start: int, count: int, num_layers: int) -> float:
        began = self._clock.monotonic()
        self._trials.run(start, count, num_layers)
        return self._clock.monotonic() - began


def _by_batch(watch: _Stopwatch, batches: list[int]) -> dict[int, float]:
    """Batch size -> seconds at full depth; what is too long for the time left is left out.

    From the second size on: a single token, which mostly reads weights, says little about many.
    """
    found: dict[int, float] = {}
    expected = 0.0
    for i, size in enumerate(batches):
        if i == 0 and len(batches) > 1:
            continue
        if not watch.allows(expected):
            break
        found[size] = watch.seconds(0, size)
        growth = batches[i + 1] / size if i + 1 < len(batches) else 1.0
        expected = found[size] * growth
    first = found.get(batches[min(1, len(batches) - 1)], 0.0)
    if batches[0] not in found and watch.allows(first):
        found[batches[0]] = watch.seconds(0, batches[0])
    return dict(sorted(found.items()))


def _by_depth(watch: _Stopwatch, num_layers: int, by_batch: dict[int, float]) -> list[float]:
    """Share of a full forward's time at each of `DEPTHS`."""
    sizes = [size for size, seconds in by_batch.items() if watch.allows(seconds)]
    size = sizes[len(sizes) // 2] if sizes else 0
    shares = []
    for depth in DEPTHS:
        share = depth
        if depth < 1.0 and size and watch.allows(by_batch[size] * depth):
            layers = max(1, round(num_layers * depth))
            measured = watch.seconds(0, size, layers) / by_batch[size]
            share = measured * depth * num_layers / layers
        shares.append(min(share, 1.0))
    return shares


def _pair_seconds(watch: _Stopwatch, by_batch: dict[int, float]) -> float:
    """Seconds per token and context token at full depth, from a batch behind a long context.

    Twice in any case: the first run touches memory that nothing has touched before, and what it
    takes would count for every pair of a long prompt. Few tokens are not asked: the difference
    between two short steps is mostly noise.
    """
    sizes = [
        s for s, seconds in by_batch.items() if FEWEST <= s <= 256 and watch.allows(2 * seconds)
    ]
    if not sizes:
        return 0.0
    size = sizes[-1]
    context = min(CONTEXT, watch.room - size)
    if context < 4 * size:
        return 0.0
    more = watch.seconds(context, size, twice=True) - by_batch[size]
    return max(more, 0.0) / (size * context)


def _without_pairs(size: int, seconds: float, pair_s: float) -> float:
    """Time of a batch without the attention among its own tokens, which the model adds."""
    return max(seconds - pair_s * size * (size + 1) / 2, 0.1 * seconds)


def describe(model: CostModel) -> dict[str, Any]:
    """JSON form of a cost model, for server info."""
    return {
        "depths": list(model.depths),
        "batches": list(model.batches),
        "tokens_per_s": [[round(rate, 1) for rate in row] for row in model.tokens_per_s],
        "chunk": model.chunk,
        "step_s": model.step_s,
        "pair_s": model.pair_s,
        "tiers": {
            tier.name.lower(): {
                "bytes_per_s": cost.bytes_per_s,
                "latency_s": cost.latency_s,
                "queue_s": cost.queue_s,
            }
            for tier, cost in model.tiers.items()
        },
    }
