"""The cost model: more work never costs less, and nothing costs nothing."""

from __future__ import annotations

import numpy as np
import pytest

from statewise.radix import CostModel, Tier, TierCost


def test_a_uniform_model_costs_tokens_times_depth() -> None:
    cost = CostModel.uniform(8, 100.0, step_s=0.0)
    assert cost.prefill_s(0, 500) == pytest.approx(5.0)
    assert cost.prefill_s(100, 600, 4) == pytest.approx(2.5)
    assert cost.prefill_s(0, 500, 1) == pytest.approx(5.0 / 8)
    assert cost.prefill_s(7, 7) == 0.0


def test_every_chunk_costs_its_overhead() -> None:
    cost = CostModel.uniform(8, 100.0, step_s=0.5, chunk=100)
    assert cost.prefill_s(0, 250) == pytest.approx(2.5 + 3 * 0.5)
    assert cost.prefill_s(0, 200) == pytest.approx(2.0 + 2 * 0.5)


def test_attention_makes_later_tokens_dearer() -> None:
    cost = CostModel.uniform(8, 100.0, step_s=0.0, pair_s=1e-4)
    early, late = cost.prefill_s(0, 100), cost.prefill_s(900, 1000)
    assert late - early == pytest.approx(8 * 1e-4 * 100 * 900)
    shallow = cost.prefill_s(900, 1000, 2) - cost.prefill_s(0, 100, 2)
    assert shallow == pytest.approx(2 * 1e-4 * 100 * 900)


@pytest.mark.parametrize("seed", range(20))
def test_more_tokens_or_layers_never_cost_less_whatever_was_measured(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rates = tuple(tuple(row) for row in rng.uniform(10.0, 1000.0, (4, 4)).tolist())
    cost = CostModel(8, rates, chunk=256)
    tokens = [cost.prefill_s(0, n) for n in range(0, 1200, 7)]
    layers = [cost.prefill_s(0, 300, depth) for depth in range(1, 9)]
    assert tokens == sorted(tokens)
    assert layers == sorted(layers)


@pytest.mark.parametrize("seed", range(10))
def test_between_measurements_times_are_interpolated_in_depth_and_tokens(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rates = rng.uniform(10.0, 1000.0, (4, 4))
    cost = CostModel(40, tuple(map(tuple, rates.tolist())), chunk=3000, step_s=0.0)
    times = np.array(cost.batches) / rates
    times = np.maximum.accumulate(np.maximum.accumulate(times, axis=0), axis=1)
    for tokens, depth in [(1, 3), (16, 10), (100, 17), (700, 31), (2048, 40), (2900, 25)]:
        share = depth / 40
        column = [np.interp(share, (0.0, *cost.depths), (0.0, *row)) for row in times.T]
        expected = np.interp(min(tokens, 2048), (0, *cost.batches), (0.0, *column))
        expected *= max(tokens, 2048) / 2048
        assert cost.prefill_s(0, tokens, depth) == pytest.approx(expected)


def test_loads_cost_latency_queue_and_bytes_per_tier_and_nothing_for_nothing() -> None:
    tiers = {Tier.HOST: TierCost(100.0, 0.5), Tier.DISK: TierCost(10.0, 1.0, queue_s=2.0)}
    cost = CostModel.uniform(1, 1.0, tiers=tiers)  # type: ignore[arg-type]
    assert cost.load_s({Tier.HOST: 200.0}) == pytest.approx(2.5)
    assert cost.load_s({Tier.HOST: 200.0, Tier.DISK: 50.0}) == pytest.approx(2.5 + 8.0)
    assert cost.load_s({Tier.HOST: 0.0}) == 0.0


@pytest.mark.parametrize(
    "change",
    [
        {"tokens_per_s": ((1.0,),)},
        {"tokens_per_s": ((1.0,) * 4,) * 3 + ((0.0,) * 4,)},
        {"depths": (0.5, 0.25, 0.75, 1.0)},
        {"depths": (0.2, 0.4, 0.6, 0.8)},
        {"chunk": 0},
    ],
)
def test_a_model_that_means_nothing_is_refused(change: dict[str, object]) -> None:
    good: dict[str, object] = {"num_layers": 4, "tokens_per_s": ((1.0,) * 4,) * 4}
    with pytest.raises(ValueError, match=r"tokens_per_s|depths|rates"):
        CostModel(**(good | change))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(5))
def test_many_spans_at_once_cost_what_each_costs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rates = tuple(map(tuple, rng.uniform(10.0, 1000.0, (4, 4)).tolist()))
    cost = CostModel(8, rates, chunk=int(rng.integers(100, 3000)), pair_s=1e-5)
    starts = rng.integers(0, 5000, 50)
    ends = starts + rng.integers(-10, 5000, 50)
    one_by_one = [cost.prefill_s(int(a), int(b)) for a, b in zip(starts, ends, strict=True)]
    assert cost.spans_s(starts, ends).tolist() == pytest.approx(one_by_one)
    table = cost.reads_s(20, 16, 3)
    assert table[20] - table[3] == pytest.approx(1e-5 * cost.num_pairs(48, 320, 3))
