"""Observations move a cost model towards what happened, and outliers do not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from statewise.radix import CacheSchema, CostModel, CostObserver, GroupKind, StateGroupSpec, Tier
from statewise.radix.pairs import pairs_of

CHUNK, LONG = 512, 8192


def hybrid() -> CacheSchema:
    """Two full layers among eight windowed ones."""
    full = StateGroupSpec("f", GroupKind.FULL, (4, 9), "l", "v", entry_bytes=8)
    others = (0, 1, 2, 3, 5, 6, 7, 8)
    window = StateGroupSpec("w", GroupKind.WINDOW, others, "l", "v", entry_bytes=8, window=512)
    return CacheSchema(16, 10, (full, window), "m")


def model_of(tokens_per_s: float, pair_s: float) -> CostModel:
    more = {"pair_s": pair_s, "chunk": CHUNK, "step_s": 0.0, "pairs": pairs_of(hybrid())}
    return CostModel.uniform(10, tokens_per_s, **more)  # type: ignore[arg-type]


def serve(observer: CostObserver, truth: CostModel, tokens: int, noise: list[float]) -> None:
    """One prompt in chunks; each takes as long as it truly does times the next noise."""
    for i, start in enumerate(range(0, tokens, CHUNK)):
        end = min(start + CHUNK, tokens)
        seconds = truth.prefill_s(start, end) * noise[i % len(noise)]
        observer.observe_prefill(start, end, 10, seconds)


def test_an_observer_comes_near_the_truth() -> None:
    truth = CostModel.uniform(8, 50.0, step_s=0.0)
    observer = CostObserver(CostModel.uniform(8, 500.0, step_s=0.0), weight=0.3)
    for _ in range(40):
        for end, depth in ((512, 8), (2048, 8), (512, 4)):
            observer.observe_prefill(0, end, depth, truth.prefill_s(0, end, depth))
    for end, depth in ((512, 8), (2048, 8), (512, 4)):
        assert observer.model.prefill_s(0, end, depth) == pytest.approx(
            truth.prefill_s(0, end, depth), rel=0.1
        )


def test_one_outlier_moves_no_figure_far_and_nonsense_none() -> None:
    start = CostModel.uniform(8, 100.0)
    observer = CostObserver(start)
    observer.observe_prefill(0, 512, 8, 1e9)
    assert observer.model.prefill_s(0, 512) < 2 * start.prefill_s(0, 512)
    before = observer.model
    observer.observe_prefill(0, 0, 8, 1.0)
    observer.observe_prefill(0, 8, 8, 0.0)
    observer.observe_load(Tier.HOST, 0, 1.0)
    assert observer.model is before


def test_loads_refine_the_bandwidth_and_the_queue_is_set() -> None:
    observer = CostObserver(CostModel.uniform(1, 1.0), weight=0.5)
    for _ in range(30):
        observer.observe_load(Tier.DISK, 10_000_000, 0.1)
    disk = observer.model.tiers[Tier.DISK]
    assert disk.bytes_per_s == pytest.approx(1e8, rel=0.05)
    observer.observe_queue(Tier.DISK, 3.0)
    assert observer.model.tiers[Tier.DISK].seconds(1) > 3.0


@pytest.mark.parametrize("seed", range(20))
def test_a_few_prompts_beside_other_work_make_a_long_estimate_right(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rate, pair_s = 10 ** rng.uniform(2, 5), 10 ** rng.uniform(-9, -7)
    truth = model_of(rate, pair_s)
    off = np.exp(rng.uniform(-1.5, 1.5, 2))
    first = model_of(rate * off[0], 0.0 if seed % 4 == 0 else pair_s * off[1])
    observer = CostObserver(first)
    for _ in range(3):
        noise = np.where(rng.random(16) < 0.25, rng.uniform(1.5, 6.0, 16), rng.normal(1, 0.05, 16))
        serve(observer, truth, LONG, noise.tolist())
    assert observer.model.prefill_s(0, LONG) == pytest.approx(truth.prefill_s(0, LONG), rel=0.2)


def test_short_prompts_tell_how_fast_the_machine_is_and_leave_the_rest_in_proportion() -> None:
    truth = model_of(1000.0, 1e-8)
    observer = CostObserver(model_of(3000.0, 1e-8 / 3))
    for _ in range(6):
        serve(observer, truth, CHUNK, [1.0])
    assert observer.model.prefill_s(0, LONG) == pytest.approx(truth.prefill_s(0, LONG), rel=0.1)


def test_a_machine_that_changes_is_followed() -> None:
    truth = model_of(1000.0, 1e-8)
    observer = CostObserver(truth)
    for _ in range(4):
        serve(observer, truth, LONG, [1.0])
    slower = replace(model_of(500.0, 2e-8))
    for _ in range(4):
        serve(observer, slower, LONG, [1.0])
    assert observer.model.prefill_s(0, LONG) == pytest.approx(slower.prefill_s(0, LONG), rel=0.1)


def test_estimates_stay_monotone_whatever_was_seen() -> None:
    rng = np.random.default_rng(3)
    observer = CostObserver(model_of(1000.0, 1e-8))
    for _ in range(200):
        start, size, layers = (int(n) for n in rng.integers(1, [4000, 600, 11]))
        observer.observe_prefill(start, start + size, layers, float(10 ** rng.uniform(-4, 1)))
        model = observer.model
        assert model.pair_s >= 0
        costs = [model.prefill_s(0, n) for n in range(0, 2000, 130)]
        assert costs == sorted(costs)
