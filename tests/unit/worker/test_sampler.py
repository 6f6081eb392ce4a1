"""The sampler against a slow reference that follows the documented order literally."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from statewise.runtime.errors import OperatingError
from statewise.runtime.sampling_params import SamplingParams
from statewise.runtime.worker import sampler
from statewise.runtime.worker.random import mix64, uniform
from statewise.runtime.worker.sampler import sample
from support.runner import GREEDY, spec

VOCAB = 50


def no_mask(_spec) -> torch.Tensor:
    raise AssertionError("no grammar was asked for")


def logits(rows: int = 1, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator) * 3


def reference_distribution(
    row: list[float], s, allowed: set[int] | None = None
) -> dict[int, float]:
    """Probability of each token, in plain Python floats."""
    p = s.params
    values = {i: float(v) for i, v in enumerate(row)}
    seen = {int(t) for t in s.prompt_ids} | set(s.output_ids)
    for token in seen:
        r = p.repetition_penalty
        values[token] = values[token] / r if values[token] > 0 else values[token] * r
    for token in set(s.output_ids):
        count = list(s.output_ids).count(token)
        values[token] -= p.frequency_penalty * count + p.presence_penalty
    for token, bias in p.logit_bias:
        values[token] += bias
    banned = set(s.forbidden_ids)
    values = {t: v for t, v in values.items() if t not in banned}
    if allowed is not None:
        values = {t: v for t, v in values.items() if t in allowed}
    if p.is_greedy:
        return {max(values, key=values.__getitem__): 1.0}
    top = max(values.values())
    weights = {t: math.exp((v - top) / p.temperature) for t, v in values.items()}
    total = sum(weights.values())
    ranked = sorted(((w / total, t) for t, w in weights.items()), reverse=True)
    kept, before = {}, 0.0
    for rank, (prob, token) in enumerate(ranked):
        inside = (p.top_k < 0 or rank < p.top_k) and (before <= p.top_p or rank == 0)
        if inside and prob >= p.min_p * ranked[0][0]:
            kept[token] = prob
        before += prob
    total = sum(kept.values())
    return {t: w / total for t, w in kept.items()}


def draw(row: torch.Tensor, s, count: int, mask_of=no_mask) -> np.ndarray:
    """How often each token is drawn over `count` draw indices."""
    specs = [replace(s, draw_index=index) for index in range(count)]
    results = sample(row.expand(count, -1), specs, mask_of)
    assert not any(r.error for r in results)
    return np.bincount([r.token_id for r in results], minlength=row.shape[-1])


CASES = [
    SamplingParams(),
    SamplingParams(temperature=0.4),
    SamplingParams(temperature=2.5),
    SamplingParams(top_k=5),
    SamplingParams(top_k=VOCAB + 10),
    SamplingParams(top_p=0.6),
    SamplingParams(top_p=0.01),
    SamplingParams(min_p=0.2),
    SamplingParams(temperature=1.7, top_k=12, top_p=0.8, min_p=0.05),
    SamplingParams(repetition_penalty=1.8, temperature=1.5),
    SamplingParams(repetition_penalty=0.4, temperature=3.0),
    SamplingParams(frequency_penalty=1.5, presence_penalty=-0.7, temperature=2.0),
    SamplingParams(logit_bias=((3, 6.0), (7, -100.0)), temperature=2.0),
]


@pytest.mark.slow
@pytest.mark.parametrize("params", CASES)
def test_draws_follow_the_reference_distribution(params):
    row = logits(seed=len(repr(params)))[0]
    s = spec(params, output_ids=[4, 4, 9, 2], seed=11)
    expected = reference_distribution(row.tolist(), s)
    count = 2000
    seen = draw(row, s, count)
    assert set(np.nonzero(seen)[0].tolist()) <= set(expected)
    # Chi-square over cells of at least 5 expected draws; 5 sigma of its normal approximation.
    cells = [(seen[t], count * p) for t, p in expected.items() if count * p >= 5]
    chi2 = sum((o - e) ** 2 / e for o, e in cells)
    freedom = max(1, len(cells) - 1)
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom) + 5


@pytest.mark.parametrize("seed", range(20))
def test_greedy_equals_the_reference_under_every_modifier(seed):
    rng = np.random.default_rng(seed)
    params = SamplingParams(
        temperature=0.0,
        repetition_penalty=float(rng.choice([1.0, 0.5, 1.9])),
        frequency_penalty=float(rng.choice([0.0, 2.0, -2.0])),
        presence_penalty=float(rng.choice([0.0, 1.0])),
        logit_bias=((int(rng.integers(VOCAB)), 4.0),) if rng.random() < 0.5 else (),
    )
    s = spec(
        params,
        output_ids=rng.integers(0, VOCAB, 12).tolist(),
        forbidden_ids=tuple(rng.integers(0, VOCAB, 3).tolist()),
    )
    row = logits(seed=seed)
    (result,) = sample(row, [s], no_mask)
    assert {result.token_id: 1.0} == reference_distribution(row[0].tolist(), s)


@pytest.mark.parametrize("params", [SamplingParams(top_p=0.9), SamplingParams(min_p=0.5)])
def test_a_flat_distribution_keeps_a_wide_nucleus(params):
    flat = torch.linspace(0, 0.01, VOCAB)
    s = spec(params)
    expected = reference_distribution(flat.tolist(), s)
    seen = draw(flat, s, 800)
    assert set(np.nonzero(seen)[0].tolist()) == set(expected)


@given(seed=st.integers(0, 1000), top_p=st.sampled_from([0.01, 0.5, 0.9, 0.999]))
@settings(max_examples=30)
def test_leaving_out_small_probabilities_changes_no_nucleus(seed, top_p):
    row = logits(seed=seed)[0] * (0.1 + seed % 7)
    s = spec(SamplingParams(top_p=top_p))
    _, ids = sampler._survivors(torch.softmax(row, 0), s.params)
    probs = sorted(torch.softmax(row.double(), 0).tolist(), reverse=True)
    before = np.concatenate([[0.0], np.cumsum(probs)[:-1]])
    assert abs(len(ids) - int((before <= top_p).sum())) <= int(np.isclose(before, top_p).any())


@pytest.mark.parametrize("size", [1, 511, 512, 1023, 1024, 1025, 5000])
def test_drawing_in_two_levels_inverts_the_same_sum(size):
    generator = torch.Generator().manual_seed(size)
    weights = torch.rand(size, generator=generator) * (torch.rand(size, generator=generator) < 0.3)
    weights[size // 2] = 1.0
    for i in range(200):
        u = uniform(size, i)
        index = sampler._draw(weights, u)
        assert weights[index] > 0
        total = weights.double().cumsum(0)
        low = 0.0 if index == 0 else float(total[index - 1])
        target = u * float(total[-1])
        assert low - 1e-4 <= target <= float(total[index]) + 1e-4
    assert weights[sampler._draw(weights, 0.0)] > 0
    assert weights[sampler._draw(weights, 1 - 2**-53)] > 0


def test_a_seeded_row_repeats_in_any_batch():
    rows = logits(6, seed=5)
    mine = spec(SamplingParams(temperature=1.3, top_p=0.9), seed=99, draw_index=7)
    (alone,) = sample(rows[2:3], [mine], no_mask)
    others = [spec(SamplingParams(), seed=i) for i in range(6)]
    others[2] = mine
    together = sample(rows, others, no_mask)
    assert together[2] == alone
    assert sample(rows.flip(0), others[::-1], no_mask)[3] == alone


def test_the_logits_are_not_changed():
    rows = logits(2)
    before = rows.clone()
    params = SamplingParams(logit_bias=((1, 5.0),), repetition_penalty=1.5, top_k=3)
    sample(rows, [spec(params, forbidden_ids=(2,), output_ids=[3]), spec()], no_mask)
    assert torch.equal(rows, before)


def test_a_mask_limits_every_kind_of_choice():
    row = logits(seed=8)[0]
    allowed = {3, 17, 41}
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[list(allowed)] = True
    for params in (GREEDY, SamplingParams(temperature=5.0), SamplingParams(top_k=30)):
        s = spec(params, grammar_key="r")
        expected = reference_distribution(row.tolist(), s, allowed)
        seen = draw(row, s, 300, lambda _: mask)
        assert set(np.nonzero(seen)[0].tolist()) == set(expected)


def test_a_grammar_outranks_forbidden_ids_where_nothing_else_is_left():
    row = logits()
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[7] = True
    s = spec(grammar_key="r", forbidden_ids=(7,))
    (result,) = sample(row, [s], lambda _: mask)
    assert result.token_id == 7
    mask[9] = True
    (result,) = sample(row, [s], lambda _: mask)
    assert result.token_id == 9


def test_no_allowed_token_is_a_row_error():
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    bad, good = sample(logits(2), [spec(grammar_key="r"), spec()], lambda _: mask)
    assert "no token is allowed" in bad.error
    assert bad.token_id == -1
    assert good.error == ""


def test_a_failing_mask_is_a_row_error():
    def failing(_spec) -> torch.Tensor:
        raise OperatingError("grammar: too complex")

    bad, good = sample(logits(2), [spec(grammar_key="r"), spec()], failing)
    assert bad.error == "grammar: too complex"
    assert good.error == ""


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_not_finite_logits_are_a_row_error(value):
    rows = logits(3)
    rows[1, 4] = value
    results = sample(rows, [spec(), spec(), spec(SamplingParams())], no_mask)
    assert [bool(r.error) for r in results] == [False, True, False]


def test_masked_logits_of_the_model_itself_are_fine():
    rows = logits(1)
    rows[0, 10:] = -math.inf
    (result,) = sample(rows, [spec(SamplingParams(temperature=9.0))], no_mask)
    assert 0 <= result.token_id < 10


def test_uniform_is_uniform_and_uncorrelated():
    draws = np.array([[uniform(seed, i) for i in range(64)] for seed in range(64)])
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
    assert len(np.unique(draws)) == draws.size
    counts, _ = np.histogram(draws, bins=16, range=(0, 1))
    expected = draws.size / 16
    assert ((counts - expected) ** 2 / expected).sum() < 15 + 5 * math.sqrt(30)
    for a, b in pairwise(draws):  # neighbouring seeds
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.6
    assert abs(np.corrcoef(draws[:, :-1].ravel(), draws[:, 1:].ravel())[0, 1]) < 0.08


def test_mix64_is_a_bijection_on_a_sample():
    values = [0, 1, 2, (1 << 64) - 1, 1 << 63, *range(1000, 3000)]
    assert len({mix64(v) for v in values}) == len(values)


def test_huge_and_negative_seeds_are_accepted():
    assert 0 <= uniform((1 << 63) - 1, 10**12) < 1
    assert uniform(-1, 0) == uniform((1 << 64) - 1, 0)


def test_a_vanishing_weight_is_never_drawn():
    row = torch.full((VOCAB,), -200.0)
    row[20] = 0.0
    row[49] = -199.0
    assert draw(row, spec(SamplingParams()), 200)[20] == 200
    weights = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0])
    picks = {sampler._draw(weights, u) for u in (0.0, 0.4999, 0.5, 0.75, 1 - 2**-53)}
    assert picks == {1, 3}
