"""Spans inside other spans: one by one, and by arrays where there are many."""

from __future__ import annotations

import random

import pytest

from statewise.radix.demand import MANY, Span, within


def spans_of(rng: random.Random, num: int, *, apart: bool) -> tuple[Span, ...]:
    """Ascending by both ends; disjoint where they are to be apart."""
    found: list[Span] = []
    at = end = 0
    for _ in range(num):
        at = (end if apart else at) + rng.randint(int(apart), 4)
        end = max(end, at + rng.randint(1, 6))
        found.append((at, end))
    return tuple(found)


@pytest.mark.parametrize("num", [1, 5, MANY])
@pytest.mark.parametrize("seed", range(5))
def test_within_is_what_both_have(seed: int, num: int) -> None:
    rng = random.Random(seed)
    spans, parts = spans_of(rng, num, apart=True), spans_of(rng, num, apart=False)
    found = within(spans, parts)
    tokens = [t for lo, hi in found for t in range(lo, hi)]
    inside = {t for lo, hi in parts for t in range(lo, hi)}
    assert tokens == [t for lo, hi in spans for t in range(lo, hi) if t in inside]
    assert all(lo <= hi for lo, hi in found)
