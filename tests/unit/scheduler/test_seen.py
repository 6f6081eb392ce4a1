"""Tokens seen so far: each once, and penalties are the same as from all of them sorted anew."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from statewise.runtime.sampling_params import SamplingParams
from statewise.runtime.scheduler.batch import SampleSpec
from statewise.runtime.scheduler.seen import SeenTokens
from statewise.runtime.worker.sampler import adjusted


def no_mask(spec: SampleSpec) -> torch.Tensor:
    raise AssertionError(spec)


@pytest.mark.parametrize("seed", range(10))
def test_logits_are_the_same_as_from_all_tokens_anew(seed: int) -> None:
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 60, rng.integers(1, 40)).astype(np.int32)
    seen, output = SeenTokens(prompt), []
    params = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=0.1)
    for _ in range(30):
        output += rng.integers(0, 60, rng.integers(0, 4)).tolist()
        anew = SampleSpec(params, 0, len(output), prompt, output)
        row = torch.randn(60, generator=torch.Generator().manual_seed(seed))
        kept = adjusted(row, replace(anew, seen=seen), no_mask)
        assert torch.equal(kept, adjusted(row, anew, no_mask))
        ids = seen.ids(output)
        assert sorted(ids.tolist()) == sorted({*prompt.tolist(), *output})


def test_output_is_never_taken_back() -> None:
    seen = SeenTokens(np.array([1, 2], dtype=np.int32))
    seen.ids([5, 6])
    with pytest.raises(AssertionError, match="taken back"):
        seen.ids([5])


def test_the_prompt_is_sorted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sorted_lengths: list[int] = []
    real = np.unique
    monkeypatch.setattr(
        np, "unique", lambda a, **k: (sorted_lengths.append(len(a)), real(a, **k))[1]
    )
    seen = SeenTokens(np.arange(500, dtype=np.int32))
    for count in range(50):
        seen.ids(list(range(600, 600 + count)))
    assert sorted_lengths == [500]
