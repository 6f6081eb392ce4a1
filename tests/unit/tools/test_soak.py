"""The soak's judgement: what counts as a leak, and where it finds the server's counts."""

from __future__ import annotations

import random

import pytest

import serving
import soak


def _samples(**series: list[int]) -> list[soak.Sample]:
    base = {"num_processes": 4, "num_fds": 100, "num_threads": 20,
            "rss_bytes": 1 << 30, "pss_bytes": 1 << 30}  # fmt: skip
    length = max(map(len, series.values()), default=40)
    out = []
    for i in range(length):
        values = base | {name: values[i] for name, values in series.items()}
        out.append(soak.Sample(5.0 * i, serving.ProcessFigures(**values)))
    return out


def test_steady_processes_have_no_problem() -> None:
    assert soak.leak_problems(_samples(num_fds=[100 + i % 7 for i in range(40)])) == []


@pytest.mark.parametrize(
    ("series", "word"),
    [
        ({"rss_bytes": [(1 << 30) + i * (10 << 20) for i in range(40)]}, "memory"),
        ({"num_fds": [100 + 3 * i for i in range(40)]}, "num_fds"),
        ({"num_threads": [20 + i for i in range(40)]}, "num_threads"),
        ({"num_processes": [4] * 39 + [5]}, "processes"),
    ],
)
def test_a_trend_is_a_leak(series: dict[str, list[int]], word: str) -> None:
    [problem] = soak.leak_problems(_samples(**series))
    assert word in problem


def test_warming_up_is_no_leak() -> None:
    grows_first = [(1 << 28) + min(i, 9) * (100 << 20) for i in range(40)]
    assert soak.leak_problems(_samples(rss_bytes=grows_first)) == []


def test_counts_are_found_wherever_they_are() -> None:
    pools = {"full": {"free": 5, "evicted": 9}}
    info = {"model": {"a": [1]}, "internal_states": [{"num_open": 0, "pools": pools}]}
    assert soak.pools_of(info) == {"full": {"free": 5}}
    assert soak._find(info, "num_open") == 0
    assert soak._find(info, "absent") is None
    with pytest.raises(AssertionError, match="no pools"):
        soak.pools_of({"model": "m"})


@pytest.mark.parametrize("vocab_size", [4, 259, 600, 49_152])
def test_prompts_fit_any_vocabulary(vocab_size: int) -> None:
    ids = soak.Prompts(vocab_size, max_len=400, seed=1).ids(2000)
    margin = min(300, vocab_size // 4)
    assert min(ids) >= margin > 0
    assert max(ids) < vocab_size - margin
    assert len(set(ids)) > 1


def test_prompts_share_prefixes_and_fit() -> None:
    prompts = soak.Prompts(vocab_size=5000, max_len=400, seed=1)
    chance = random.Random(2)
    made = [prompts.next(chance) for _ in range(200)]
    assert max(map(len, made)) <= 400
    assert all(300 <= i < 4700 for ids in made for i in ids)
    starts = {tuple(ids[:16]) for ids in made}
    assert len(starts) < len(made) / 2
