"""Sparse kernels against one query and one key at a time, in float64, over poisoned pools."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from statewise.kernels import native
from statewise.kernels.interface import BatchLayout, EntryGeometry, SparseKernels
from statewise.kernels.select import select_sparse
from statewise.kernels.sparse_reference import TorchSparse
from support.native_kernels import INSTRUCTION_SETS, native_setting, needs_native
from support.sparse_cases import (
    EntryGroup,
    Rows,
    expected_attention,
    expected_scores,
    make_group,
)

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float64: 1e-12}
PAGE = 8
# Rows: prefill from nothing, a suffix of one token, chunks that straddle pages and entries, a
# replay that may not read before 9.
ROWS = Rows([(0, 13), (20, 1), (7, 30), (15, 4), (3, 1)], [0, 0, 0, 9, 0])
MANY = Rows([(300, 1), (0, 150), (129, 70)], [0, 0, 0])


def kernels() -> Iterator[SparseKernels]:
    yield TorchSparse()
    if native.is_available():
        yield select_sparse("cpu")


KERNELS = list(kernels())
IDS = [k.name for k in KERNELS]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def group(
    rows: Rows = ROWS, dim: int = 24, ratio: int = 4, window: int = 0,
    dtype: torch.dtype = torch.float32, seed: int = 0, mask: list[int] | None = None,
) -> EntryGroup:  # fmt: skip
    geometry = EntryGeometry(dim, PAGE, dtype, ratio, window)
    generator = torch.Generator().manual_seed(seed)
    return make_group(geometry, rows, generator, mask or [1] * len(rows.spans))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS, ids=IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("parts", ["window", "entries", "both"])
def test_attention_equals_one_key_at_a_time(
    kernel: SparseKernels, dtype: torch.dtype, has_sinks: bool, parts: str
) -> None:
    window = group(ratio=1, window=5, dtype=dtype) if parts != "entries" else None
    entries = group(seed=1, dtype=dtype, ratio=2) if parts != "window" else None
    rows = ROWS
    if parts == "entries":  # every query must see something
        rows = Rows([(2, 13), (20, 1), (7, 30)], [0, 0, 0])
        entries = group(rows, seed=1, dtype=dtype, ratio=2)
    q = random(rows.num_tokens, 6, 24, seed=2, dtype=dtype)
    sinks = random(6, seed=3) if has_sinks else None
    ours = kernel.attend(
        q,
        None if window is None else (kernel.plan(window.geometry, window.layout), window.pool),
        None if entries is None else (kernel.plan(entries.geometry, entries.layout), entries.pool),
        None,
        sinks,
        scale=0.3,
        value_dim=16,
    )
    expected = expected_attention(rows, q, window, entries, None, sinks, 0.3, 16)
    assert ours.dtype == dtype
    assert float((ours.double() - expected).abs().max()) <= TOLERANCES[dtype]


@pytest.mark.parametrize("kernel", KERNELS, ids=IDS)
@pytest.mark.parametrize(("rows", "ratio", "top_k"), [(ROWS, 2, 5), (ROWS, 1, 7), (MANY, 4, 20)])
def test_selected_entries_score_highest_and_are_attended(
    kernel: SparseKernels, rows: Rows, ratio: int, top_k: int
) -> None:
    index = group(rows, dim=16, ratio=ratio, seed=4)
    q, weights = random(rows.num_tokens, 8, 16, seed=5), random(rows.num_tokens, 8, seed=6)
    plan = kernel.plan(index.geometry, index.layout)
    chosen = kernel.select(plan, index.pool, q, weights, top_k)
    assert chosen is not None
    assert chosen.dtype == torch.int32
    for ids, scores in zip(chosen.tolist(), expected_scores(index, rows, q, weights), strict=True):
        kept = [i for i in ids if i >= 0]
        assert len(kept) == min(top_k, len(scores))
        assert kept == sorted(set(kept))
        assert ids[len(kept) :] == [-1] * (top_k - len(kept))
        if len(kept) < len(scores):
            left = torch.ones(len(scores), dtype=torch.bool)
            left[kept] = False
            assert float(scores[kept].min()) >= float(scores[left].max()) - 1e-4
    window = group(rows, ratio=1, window=6, seed=7)
    entries = group(rows, ratio=ratio, seed=8)
    queries = random(rows.num_tokens, 4, 24, seed=9)
    ours = kernel.attend(
        queries,
        (kernel.plan(window.geometry, window.layout), window.pool),
        (kernel.plan(entries.geometry, entries.layout), entries.pool),
        chosen,
        None,
        scale=0.2,
        value_dim=24,
    )
    expected = expected_attention(rows, queries, window, entries, chosen, None, 0.2, 24)
    assert float((ours.double() - expected).abs().max()) <= 2e-5


@pytest.mark.parametrize("kernel", KERNELS, ids=IDS)
def test_of_equal_scores_the_lower_entry_wins(kernel: SparseKernels) -> None:
    index = group(MANY, dim=16, ratio=4)
    q, weights = torch.zeros(MANY.num_tokens, 2, 16), torch.ones(MANY.num_tokens, 2)
    plan = kernel.plan(index.geometry, index.layout)
    chosen = kernel.select(plan, index.pool, q, weights, 9)
    assert chosen is not None
    for ids, (_, position) in zip(chosen.tolist(), MANY.queries(), strict=True):
        count = min(9, (position + 1) // 4)
        assert ids == [*range(count), *[-1] * (9 - count)]


@pytest.mark.parametrize("kernel", KERNELS, ids=IDS)
def test_nothing_is_chosen_where_all_fit(kernel: SparseKernels) -> None:
    index = group(dim=16, ratio=4)
    q, weights = random(ROWS.num_tokens, 2, 16), random(ROWS.num_tokens, 2)
    plan = kernel.plan(index.geometry, index.layout)
    assert kernel.select(plan, index.pool, q, weights, 9) is None  # 37 tokens: 9 entries
    assert kernel.select(plan, index.pool, q, weights, 8) is not None


@pytest.mark.parametrize("kernel", KERNELS, ids=IDS)
@pytest.mark.parametrize("ratio", [1, 4])
def test_appended_entries_lie_where_their_last_token_does(
    kernel: SparseKernels, ratio: int
) -> None:
    made = group(ratio=ratio, mask=[1, 1, 0, 1, 1])
    plan = kernel.plan(made.geometry, made.layout)
    counts = [(first + n) // ratio - first // ratio for first, n in ROWS.spans]
    values = random(sum(counts), 24, seed=3)
    pool = torch.full_like(made.pool, float("nan"))
    kernel.append(plan, pool, values)
    at, written = 0, 0
    for r, ((first, _), count) in enumerate(zip(ROWS.spans, counts, strict=True)):
        for i in range(count):
            entry = first // ratio + i
            block = made.layout.page_table[r, entry * ratio // PAGE]
            slot = pool[block, entry % made.geometry.entries_per_page]
            if made.layout.write_mask[r]:
                assert torch.equal(slot, values[at])
                written += 1
            else:
                assert slot.isnan().all()
            at += 1
    assert int((~pool.isnan().all(-1)).sum()) == written
    with pytest.raises(ValueError, match="entries have shape"):
        kernel.append(plan, pool, values[1:])


@pytest.mark.parametrize("kernel", KERNELS, ids=IDS)
def test_a_block_outside_the_pool_is_refused(kernel: SparseKernels) -> None:
    made = group(ratio=1, window=5)
    layout = made.layout
    table = layout.page_table.clone()
    table[2, -1] = made.pool.shape[0]
    broken = BatchLayout(
        layout.query_starts, layout.context_lens, layout.context_starts, table, layout.write_mask
    )
    plan = kernel.plan(made.geometry, broken)
    q = random(ROWS.num_tokens, 2, 24)
    with pytest.raises(IndexError, match=f"block {made.pool.shape[0]}"):
        kernel.attend(q, (plan, made.pool), None, None, None, scale=1.0, value_dim=24)
    with pytest.raises(IndexError, match=f"block {made.pool.shape[0]}"):
        kernel.append(plan, made.pool, random(ROWS.num_tokens, 24))


@pytest.mark.parametrize(
    "geometry",
    [
        EntryGeometry(8, 8, torch.float32, ratio=3),
        EntryGeometry(0, 8, torch.float32),
        EntryGeometry(8, 8, torch.float32, ratio=2, window=4),
    ],
)
def test_geometries_that_make_no_sense_are_refused(geometry: EntryGeometry) -> None:
    with pytest.raises(ValueError, match=r"page must hold whole|can have a window"):
        TorchSparse().plan(geometry, group().layout)


@needs_native
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_instruction_set_and_thread_count(instruction_set: str, dtype: torch.dtype) -> None:
    """Odd sizes, all dtypes; threads change no bit."""
    window = group(MANY, dim=37, ratio=1, window=70, dtype=dtype)
    entries = group(MANY, dim=37, ratio=4, dtype=dtype, seed=1)
    index = group(MANY, dim=19, ratio=4, dtype=dtype, seed=2)
    q = random(MANY.num_tokens, 19, 37, seed=3, dtype=dtype)
    index_q = random(MANY.num_tokens, 5, 19, seed=4, dtype=dtype)
    weights, sinks = random(MANY.num_tokens, 5, seed=5), random(19, seed=6)

    def run(kernel: SparseKernels) -> tuple[torch.Tensor, torch.Tensor]:
        plans = [kernel.plan(g.geometry, g.layout) for g in (window, entries, index)]
        chosen = kernel.select(plans[2], index.pool, index_q, weights, 24)
        assert chosen is not None
        parts = ((plans[0], window.pool), (plans[1], entries.pool))
        return chosen, kernel.attend(q, *parts, chosen, sinks, scale=0.3, value_dim=21)

    expected_chosen, expected = run(TorchSparse())
    results = []
    for threads in (1, 3):
        with native_setting(instruction_set, threads):
            results.append(run(select_sparse("cpu")))
    for chosen, out in results:
        if dtype == torch.float32:  # rounding decides between near equals
            assert torch.equal(chosen, expected_chosen)
            assert float((out - expected).abs().max()) <= 2e-5
        assert torch.equal(out, results[0][1])
        assert torch.equal(chosen, results[0][0])
    if dtype != torch.float32:
        same = (results[0][0] == expected_chosen).all(1)
        assert float(same.float().mean()) > 0.9
        difference = (results[0][1].float() - expected.float()).abs()[same]
        assert float(difference.max()) <= 2e-2


@needs_native
def test_a_query_does_not_depend_on_how_its_prompt_is_cut() -> None:
    """Whole prompt or last token alone: the same bits."""
    kernel = select_sparse("cpu")
    whole, last = Rows([(0, 150)], [0]), Rows([(149, 1)], [0])
    made = group(whole, ratio=4)
    alone = BatchLayout(
        torch.tensor([0, 1], dtype=torch.int32),
        made.layout.context_lens,
        made.layout.context_starts,
        made.layout.page_table,
        made.layout.write_mask,
    )
    q = random(150, 6, 24)
    results = []
    for layout, queries in ((made.layout, q), (alone, q[149:])):
        part = (kernel.plan(made.geometry, layout), made.pool)
        results.append(kernel.attend(queries, None, part, None, random(6), scale=0.2, value_dim=24))
    assert last.num_tokens == 1
    assert torch.equal(results[0][149:], results[1])
