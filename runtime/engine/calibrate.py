"""Measures what a forward costs here, before the first request: the cost model's first figures.

    by batch     full-depth forwards of 1, 16, 64 ... tokens
    by context   a long one behind a long context: seconds per entry that a token reads
    by depth     one batch size at a quarter, half and three quarters of the layers

Every trial is run in turn, then all of them again, while there is time: the machine's moods hit all
alike, and the middle one of several is taken. A run that goes further than any before it, in
tokens, positions or layers, touches memory that nothing has touched; it counts only where there was
no time for another. So the largest comes before those of which one run may have to do.

What an entry costs is a small difference between two long times. The batch behind the context runs
after the same batch without, once a single token has touched what it reads; as many runs count of
either; and a batch is taken of which there is time for more than one. What there was no time for at
all is filled in from the nearest figure; serving refines all of it. Depth matters because a partial
rebuild runs only as deep as the damage.

This module does not choose anything by these figures.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from statewise.radix.cost import CostModel
from statewise.radix.pairs import pairs_of
from statewise.radix.schema import CacheSchema
from statewise.runtime.clock import Clock
from statewise.runtime.engine.trial import Trials
from statewise.runtime.scheduler.batch import Worker

DEPTHS = (0.25, 0.5, 0.75, 1.0)
BATCHES = (1, 16, 64, 256, 512, 1024, 2048)
CONTEXT = 4096  # tokens
FEWEST = 64  # tokens of a step behind a context: less says more of noise than of context
BUDGET_S = 2.0
TIERS_BUDGET_S = 4.0  # where a prefix may be loaded instead: three runs of everything
CONTEXT_FACTOR = 3  # of a batch's time that it takes behind a context, at most
LONGEST_SHARE = 0.5  # of the time that is left, for something that was not measured yet
MAX_ROUNDS = 8
INITIAL_TOKENS_PER_S = 1000.0  # where nothing was measured
SMALLEST_S = 1e-7

Trial = tuple[int, int, int]  # tokens of context, tokens computed, layers


def guess(schema: CacheSchema, chunk: int) -> CostModel:
    """Return a cost model for where nothing is measured."""
    rates: dict[str, Any] = {"chunk": chunk, "pairs": pairs_of(schema)}
    return CostModel.uniform(schema.num_layers, INITIAL_TOKENS_PER_S, **rates)


def calibrate(
    worker: Worker,
    schema: CacheSchema,
    num_blocks: tuple[int, ...],
    chunk: int,
    clock: Clock,
    budget_s: float = BUDGET_S,
    longest: int = 0,
) -> CostModel:
    """Measure for about `budget_s`, on blocks nobody owns; `chunk` is the tokens of one step.

    `longest` is the model's context, in tokens; 0: any.
    """
    watch = _Stopwatch(Trials(worker, schema, num_blocks, longest), clock, budget_s)
    batches = [b for b in BATCHES if b <= min(chunk, watch.room)] or [1]
    _first_round(watch, batches, schema.num_layers)
    watch.repeat()
    by_batch = {
        size: seconds
        for (context, size, layers), seconds in watch.figures().items()
        if not context and layers == schema.num_layers
    }
    if not by_batch:
        return guess(schema, chunk)
    pair_s = _pair_seconds(watch, schema)
    shares = _shares(watch, schema.num_layers)
    pairs = pairs_of(schema)
    alone = {
        size: max(seconds - pair_s * pairs.count(0, size, schema.num_layers), 0.1 * seconds)
        for size, seconds in sorted(by_batch.items())
    }
    rates = tuple(tuple(rate / share for rate in _rates(alone)) for share in shares)
    return CostModel(
        schema.num_layers,
        rates,
        depths=DEPTHS,
        batches=tuple(alone),
        chunk=chunk,
        pair_s=pair_s,
        pairs=pairs,
    )


class _Stopwatch:
    """Times trials while there is time."""

    def __init__(self, trials: Trials, clock: Clock, budget_s: float) -> None:
        self._trials = trials
        self._clock = clock
        self._end = clock.monotonic() + budget_s
        self._runs: dict[Trial, list[_Run]] = {}
        self._furthest: Trial = (0, 0, 0)  # tokens before the end, tokens computed, layers
        self.room = trials.room

    def allows(self, expected_s: float, share: float = LONGEST_SHARE) -> bool:
        """Whether what takes `expected_s` takes no more than a share of the time left."""
        return expected_s <= (self._end - self._clock.monotonic()) * share

    def run(self, trial: Trial) -> float:
        """Run a trial; seconds that it took."""
        context, size, layers = trial
        reach = (context + size, size, layers)
        is_new = any(mine > before for mine, before in zip(reach, self._furthest, strict=True))
        began = self._clock.monotonic()
        self._trials.run(*trial)
        seconds = max(self._clock.monotonic() - began, SMALLEST_S)
        self._reached(*reach)
        self._runs.setdefault(trial, []).append(_Run(seconds, is_new))
        return seconds

    def touch(self, num_tokens: int, num_layers: int) -> None:
        """Read the state of so many tokens, for a single one of them."""
        self._trials.run(num_tokens - 1, 1, num_layers)
        self._reached(num_tokens, 1, num_layers)

    def _reached(self, *reach: int) -> None:
        tokens, size, layers = map(max, self._furthest, reach)
        self._furthest = tokens, size, layers

    def repeat(self) -> None:
        """Run all trials again and again, in their order, while there is time."""
        for _ in range(MAX_ROUNDS):
            before = sum(map(len, self._runs.values()))
            for trial, runs in list(self._runs.items()):
                if self.allows(min(run.seconds for run in runs), share=1.0):
                    self.run(trial)
            if sum(map(len, self._runs.values())) == before:
                return

    def figures(self) -> dict[Trial, float]:
        """Seconds of each trial: the middle of its runs, those on new memory left out.

        As requests will meet them, in the machine's mood of now; not the least, that none has.
        """
        return {trial: statistics.median(_settled(runs)) for trial, runs in self._runs.items()}

    def ratio(self, trial: Trial, other: Trial) -> float:
        """A trial's seconds to those of another, by as many runs of either, from the first on.

        Of two runs the quicker one, which less has disturbed: a ratio wants both undisturbed.
        """
        mine, others = _settled(self._runs[trial]), _settled(self._runs[other])
        both = min(len(mine), len(others))
        return statistics.median_low(mine[:both]) / statistics.median_low(others[:both])


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of a trial."""

    seconds: float
    is_new: bool  # it touched memory that nothing had touched


def _settled(runs: list[_Run]) -> list[float]:
    """Seconds of the runs on memory in use, or of all where there are none."""
    settled = [run.seconds for run in runs if not run.is_new]
    return settled or [run.seconds for run in runs]


def _first_round(watch: _Stopwatch, batches: list[int], num_layers: int) -> None:
    """Find out which trials there is time for, each once.

    Batches ascend from the second size on: a single token, which mostly reads weights, says little
    about many. What is too long for the time left is left out.
    """
    found: dict[int, float] = {}
    expected = 0.0
    for i, size in enumerate(batches):
        if i == 0 and len(batches) > 1:
            continue
        if not watch.allows(expected):
            break
        found[size] = watch.run((0, size, num_layers))
        growth = batches[i + 1] / size if i + 1 < len(batches) else 1.0
        expected = found[size] * growth
    _behind_context(watch, found, num_layers)
    if batches[0] not in found and watch.allows(found.get(batches[1], 0.0)):
        watch.run((0, batches[0], num_layers))
    sizes = [size for size, seconds in found.items() if watch.allows(seconds)]
    for depth in DEPTHS[:-1]:
        layers = max(1, round(num_layers * depth))
        size = sizes[len(sizes) // 2] if sizes else 0
        if size and watch.allows(found[size] * depth):
            watch.run((0, size, layers))


def _behind_context(watch: _Stopwatch, found: dict[int, float], num_layers: int) -> None:
    """Run the largest batch behind a context that there is time for twice, or else the smallest.

    Prompts are computed a chunk at a time: an entry is read once for many of its tokens, and so
    costs each of them far less than it would a few.
    """
    places = {size: min(CONTEXT, watch.room - size) for size in sorted(found, reverse=True)}
    telling = [size for size, at in places.items() if size >= FEWEST and at >= 4 * size]
    for size in telling:
        once, twice = ((times * CONTEXT_FACTOR + 1) * found[size] for times in (1, 2))
        if watch.allows(once if size == telling[-1] else twice, share=1.0):
            watch.touch(places[size] + size, num_layers)
            watch.run((0, size, num_layers))
            watch.run((places[size], size, num_layers))
            return


def _pair_seconds(watch: _Stopwatch, schema: CacheSchema) -> float:
    """Seconds per entry read in one layer, from a batch behind a long context."""
    figures, pairs = watch.figures(), pairs_of(schema)
    for trial in figures:
        context, size, layers = trial
        more = pairs.count(context, context + size, layers) - pairs.count(0, size, layers)
        if context and more > 0:
            alone = (0, size, layers)
            return max(watch.ratio(trial, alone) - 1, 0.0) * figures[alone] / more
    return 0.0


def _rates(alone: dict[int, float]) -> list[float]:
    """Tokens per second by batch size, never fewer for a larger batch: others' load only adds."""
    return list(accumulate((size / seconds for size, seconds in alone.items()), max))


def _shares(watch: _Stopwatch, num_layers: int) -> list[float]:
    """Share of a full forward's time at each of `DEPTHS`."""
    shares = []
    for depth in DEPTHS:
        share, layers = depth, max(1, round(num_layers * depth))
        for (context, size, of_layers), seconds in watch.figures().items():
            if not context and of_layers == layers < num_layers:
                whole = watch.figures()[0, size, num_layers]
                share = seconds / whole * depth * num_layers / layers
        shares.append(min(share, 1.0))
    return shares


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
