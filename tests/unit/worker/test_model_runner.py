"""The model runner against a dense oracle: pages, chunks, windows, replay, depth, copies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from statewise.runtime.scheduler.batch import BlockCopy, RowKind, RowResult
from support.runner import Driver, spec
from support.toy_model import ToyModel

TOLERANCE = 1e-4
KINDS = [
    ("full", "full"),
    ("full", "window", "window"),
    ("window", "window"),
    ("window", "full", "shared", "window", "shared"),
]


def prompt(length: int, seed: int = 0, vocab: int = 37) -> list[int]:
    return np.random.default_rng(seed).integers(1, vocab, length).tolist()


def decode(driver: Driver, tables, tokens, count, **fields) -> list[int]:
    """`count` greedy tokens after `tokens`, whose last token is not computed yet."""
    out: list[int] = []
    for _ in range(count):
        at = len(tokens) + len(out) - 1
        last = (tokens + out)[at]
        row = driver.row("r", tables, [last], at, kind=RowKind.DECODE, sample=spec())
        (result,) = driver.step(row, **fields)
        assert result.error == ""
        out.append(result.token_id)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("chunk", [1, 3, 8, 40])
def test_chunked_prefill_and_decode_equal_the_dense_oracle(kinds, chunk):
    model = ToyModel(kinds)
    driver, tokens = Driver(model), prompt(29)
    tables = driver.tables(64)
    for start in range(0, len(tokens) - 1, chunk):
        part = tokens[start : min(start + chunk, len(tokens) - 1)]
        (result,) = driver.step(driver.row("r", tables, part, start))
        assert result == RowResult("r")
    assert decode(driver, tables, tokens, 20) == model.greedy(tokens, 20)


def test_rows_of_one_step_do_not_touch_each_other():
    model = ToyModel()
    driver = Driver(model)
    prompts = [prompt(n, seed=n) for n in (1, 5, 17, 30)]
    tables = [driver.tables(40) for _ in prompts]
    rows = [
        driver.row(f"r{i}", tables[i], tokens, 0, sample=spec()) for i, tokens in enumerate(prompts)
    ]
    results = driver.step(*rows)
    assert [r.token_id for r in results] == [model.greedy(p, 1)[0] for p in prompts]


def test_pages_left_behind_by_a_window_may_be_absent():
    model = ToyModel(("full", "window", "window"), window=6, page_size=4)
    driver, tokens = Driver(model), prompt(33)
    tables = driver.tables(64)
    driver.step(driver.row("r", tables, tokens[:-1], 0))
    window = model.schema.index_of("window")
    first = (len(tokens) - 1 - (6 - 1)) // 4  # page of the oldest position still read
    driver.store.fill_blocks(window, tables[window][:first].tolist(), float("nan"))
    tables[window][:first] = -1
    assert decode(driver, tables, tokens, 8) == model.greedy(tokens, 8)


def test_a_replay_rebuilds_the_window_without_writing_the_history():
    model = ToyModel(("full", "window", "window"), window=6)
    driver, tokens = Driver(model), prompt(40)
    tables = driver.tables(64)
    driver.step(driver.row("r", tables, tokens[:-1], 0))
    full, window = model.schema.index_of("full"), model.schema.index_of("window")
    history = driver.store.digests(full, tables[full])
    driver.store.fill_blocks(window, tables[window].tolist(), float("nan"))
    start = len(tokens) - 1 - 2 * (6 - 1) - 4  # receptive field of two windowed layers, and a bit
    starts = [0, 0]
    starts[window] = start
    row = driver.row(
        "r",
        tables,
        tokens[start:-1],
        start,
        kind=RowKind.REPLAY,
        write_groups=1 << window,
        context_starts=tuple(starts),
    )
    driver.step(row)
    assert (driver.store.digests(full, tables[full]) == history).all()
    assert decode(driver, tables, tokens, 8) == model.greedy(tokens, 8)


def test_rows_of_different_depth_share_a_step():
    model = ToyModel(("full", "window", "window"))
    driver, tokens = Driver(model), prompt(12)
    shallow, deep = driver.tables(16), driver.tables(16)
    rows = (
        driver.row("deep", deep, tokens, 0, sample=spec()),
        driver.row("shallow", shallow, tokens, 0, num_layers=2),
    )
    results = driver.step(*rows)
    assert results[0].token_id == model.greedy(tokens, 1)[0]
    assert results[1] == RowResult("shallow")
    window = model.schema.index_of("window")
    used = -(-len(tokens) // model.schema.page_size)
    first, second = driver.store.groups[window].layers
    assert torch.isfinite(first[shallow[window][:used]]).all()
    assert torch.isnan(second[shallow[window]]).all()  # layer 2 did not run


def test_copies_run_before_and_after_the_rows():
    model = ToyModel(("full", "full"))
    driver, tokens = Driver(model), prompt(9)
    tables = driver.tables(16)
    driver.step(driver.row("r", tables, tokens[:-1], 0))
    clone = [t.copy() for t in tables]
    spare = driver.tables(16)
    clone[0][1:3] = spare[0][1:3]
    before = tuple(BlockCopy(0, int(tables[0][p]), int(clone[0][p])) for p in (1, 2))
    kept = int(spare[0][3])
    after = (BlockCopy(0, int(clone[0][2]), kept),)
    row = driver.row("c", clone, tokens[-1:], len(tokens) - 1, sample=spec())
    (result,) = driver.step(row, copies_before=before, copies_after=after)
    assert result.token_id == model.greedy(tokens, 1)[0]
    written = np.array([clone[0][2], kept, tables[0][2]], dtype=np.int32)
    digests = driver.store.digests(0, written)
    assert (digests[0] == digests[1]).all()  # copied after the row wrote
    assert (digests[0] != digests[2]).all()  # the source page has not got the row's token


def test_deterministic_logits_do_not_depend_on_other_rows():
    model = ToyModel(seed=3)
    tokens = prompt(21)
    seen = []
    for others in ((), (3,), (8, 1, 19)):
        driver = Driver(model)
        mine = driver.tables(32)
        rows = [driver.row(f"o{n}", driver.tables(32), prompt(n, n), 0) for n in others]
        ask = spec(return_logprob=True, top_logprobs=5)
        rows.insert(len(rows) // 2, driver.row("r", mine, tokens, 0, sample=ask))
        results = driver.step(*rows, deterministic=True)
        seen.append(next(r.logprob for r in results if r.request_id == "r"))
    assert seen[0] == seen[1] == seen[2]  # bit-equal floats


def test_not_finite_logits_end_their_own_row_only():
    model = ToyModel()
    model.poisoned_tokens = {36}
    driver, good = Driver(model), prompt(10, vocab=36)
    rows = (
        driver.row("bad", driver.tables(16), [1, 2, 36], 0, sample=spec()),
        driver.row("good", driver.tables(16), good, 0, sample=spec()),
        driver.row("late", driver.tables(16), [36, 2, 3], 0, prompt_logprobs_from=0, next_token=4),
    )
    bad, fine, late = driver.step(*rows)
    assert "not finite" in bad.error
    assert not bad.is_invalid
    assert bad.token_id == -1
    assert fine.error == ""
    assert fine.token_id == model.greedy(good, 1)[0]
    assert "not finite" in late.error
    assert late.prompt_logprobs == ()


def test_a_block_outside_the_pool_is_a_programmer_error():
    driver = Driver(ToyModel(("full",)))
    tables = driver.tables(8)
    tables[0][0] = 9999
    with pytest.raises(IndexError, match="9999"):
        driver.step(driver.row("r", tables, [1, 2], 0))
    with pytest.raises(AssertionError, match="outside the pool"):
        driver.step(
            driver.row("r", driver.tables(8), [1], 0), copies_before=(BlockCopy(0, 0, 9999),)
        )


@pytest.mark.parametrize("first", [0, 4, 11])
@pytest.mark.parametrize("with_next", [True, False])
def test_prompt_logprobs_equal_the_dense_oracle(first, with_next):
    model = ToyModel()
    driver, tokens = Driver(model), prompt(13)
    tables = driver.tables(16)
    cut = 12  # the row computes 0..11, token 12 follows
    row = driver.row(
        "r",
        tables,
        tokens[:cut],
        0,
        prompt_logprobs_from=first,
        prompt_top_logprobs=3,
        prompt_logprob_token_ids=(5, 6),
        next_token=tokens[cut] if with_next else -1,
    )
    (result,) = driver.step(row)
    raw = torch.log_softmax(model.dense_logits(tokens), dim=-1)
    targets = tokens[first + 1 : cut + 1 if with_next else cut]
    assert [e.token_id for e in result.prompt_logprobs] == targets
    for i, entry in enumerate(result.prompt_logprobs):
        expected = raw[first + i]
        assert entry.logprob == pytest.approx(float(expected[targets[i]]), abs=TOLERANCE)
        best, ids = expected.topk(3)
        assert [i for _, i in entry.top] == ids.tolist()
        assert [p for p, _ in entry.top] == pytest.approx(best.tolist(), abs=TOLERANCE)
        assert [i for _, i in entry.chosen] == [5, 6]
        assert [p for p, _ in entry.chosen] == pytest.approx(
            expected[[5, 6]].tolist(), abs=TOLERANCE
        )


def test_sampled_logprobs_are_of_the_raw_distribution():
    from statewise.runtime.sampling_params import SamplingParams

    model = ToyModel()
    driver, tokens = Driver(model), prompt(7)
    params = SamplingParams(temperature=3.0, logit_bias=((4, 50.0),), top_p=0.9)
    ask = spec(params, return_logprob=True, top_logprobs=2, logprob_token_ids=(9,))
    (result,) = driver.step(driver.row("r", driver.tables(8), tokens, 0, sample=ask))
    raw = torch.log_softmax(model.dense_logits(tokens)[-1], dim=-1)
    assert result.token_id == 4
    assert result.logprob is not None
    assert result.logprob.logprob == pytest.approx(float(raw[4]), abs=TOLERANCE)
    assert result.logprob.top[0][1] == int(raw.argmax())
    assert result.logprob.chosen == ((pytest.approx(float(raw[9]), abs=TOLERANCE), 9),)


def test_many_sampling_rows_are_cut_into_slices(monkeypatch):
    from statewise.runtime.worker import model_runner

    monkeypatch.setattr(model_runner, "LOGIT_ROWS", 2)
    model = ToyModel()
    driver = Driver(model)
    prompts = [prompt(n, seed=n) for n in (2, 3, 4, 5, 6)]
    rows = [
        driver.row(f"r{i}", driver.tables(8), p, 0, sample=spec(), prompt_logprobs_from=0)
        for i, p in enumerate(prompts)
    ]
    results = driver.step(*rows)
    assert [r.token_id for r in results] == [model.greedy(p, 1)[0] for p in prompts]
    assert [len(r.prompt_logprobs) for r in results] == [1, 2, 3, 4, 5]
