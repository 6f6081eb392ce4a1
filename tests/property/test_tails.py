"""Tails under any chunking equal plain slices of the whole sequence (Hypothesis)."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from statewise.runtime.worker.tails import plan_tails

NAN = float("nan")


def raw_of(length: int, width: int, seed: int) -> Tensor:
    """Raw rows of a sequence; never zero, so that an empty slot can be told."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(length, width, generator=generator) + 0.5


def expected_block(raw: Tensor, ratio: int, overlap: int, halo: int) -> Tensor:
    """What a block must hold after the sequence, by its definition."""
    length, width = raw.shape
    base = length - length % ratio
    kept = torch.zeros(overlap, halo)
    for j in range(overlap):
        if base - overlap + j >= 0:
            kept[j] = raw[base - overlap + j, :halo]
    opened = torch.zeros(ratio - 1, width)
    opened[: length - base] = raw[base:]
    return torch.cat([kept.flatten(), opened.flatten()])


@settings(max_examples=60, deadline=None)
@given(
    ratio=st.integers(2, 9),
    has_overlap=st.booleans(),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 11), min_size=1, max_size=30),
)
def test_any_chunking_gives_the_same_windows_and_blocks(
    ratio: int, has_overlap: bool, lengths: list[int], cuts: list[int]
) -> None:
    overlap, halo, width = (ratio, 2, 3) if has_overlap else (0, 0, 3)
    num_values = overlap * halo + (ratio - 1) * width
    pool = torch.full((2 * len(lengths) + 1, num_values), NAN)
    blocks = [2 * i + 1 for i in range(len(lengths))]
    raws = [raw_of(n, width, i) for i, n in enumerate(lengths)]
    at = [0] * len(lengths)
    step = 0
    while any(a < n for a, n in zip(at, lengths, strict=True)):
        live = [i for i, n in enumerate(lengths) if at[i] < n]
        spans = []
        for order, i in enumerate(live):
            size = cuts[(step + order) % len(cuts)]
            spans.append((at[i], min(lengths[i], at[i] + size)))
        step += 1
        plan = plan_tails(spans, [blocks[i] for i in live], [True] * len(live), ratio, overlap)
        raw = torch.cat([raws[i][a:b] for i, (a, b) in zip(live, spans, strict=True)])
        windows = plan.exchange(pool, raw, halo)
        n = 0
        for i, (a, b) in zip(live, spans, strict=True):
            for w in range(a // ratio, b // ratio):
                assert int(windows.starts[n]) == w * ratio
                assert torch.equal(windows.current[n], raws[i][w * ratio : (w + 1) * ratio])
                assert bool(windows.has_previous[n]) == (w > 0)
                if has_overlap and w:
                    before = raws[i][(w - 1) * ratio : w * ratio, :halo]
                    assert torch.equal(windows.previous[n], before)
                n += 1
            at[i] = b
            block = pool[blocks[i]]
            assert torch.equal(block, expected_block(raws[i][:b], ratio, overlap, halo))
        assert n == plan.num_windows
    assert pool[0::2].isnan().all()  # blocks of nobody


def test_rows_that_do_not_write_leave_their_block() -> None:
    pool = torch.zeros(2, 3 * 2)
    plan = plan_tails([(0, 6), (0, 6)], [0, 1], [False, True], 4, 0)
    windows = plan.exchange(pool, raw_of(12, 2, 0), 0)
    assert len(windows.current) == 2
    assert (pool[0] == 0).all()
    assert (pool[1, :4] != 0).all()
