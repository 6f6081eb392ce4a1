"""The order of eviction against a sorted dictionary, and that it holds on to nothing."""

from __future__ import annotations

import random

import pytest

from statewise.radix.order import SLACK, ScoreOrder


@pytest.mark.parametrize("seed", range(20))
def test_the_first_is_the_least_whatever_was_put_and_taken(seed: int) -> None:
    rng = random.Random(seed)
    order: ScoreOrder[str] = ScoreOrder()
    known: dict[str, float] = {}
    for _ in range(800):
        item = f"item {rng.randrange(40)}"
        if rng.random() < 0.6:
            known[item] = float(rng.randrange(30))
            order.put(item, known[item])
        else:
            order.discard(item)
            known.pop(item, None)
        assert len(order) == len(known)
        assert set(order) == set(known)
        first = order.first()
        if not known:
            assert first is None
        else:
            assert first is not None
            assert known[first] == order.score_of(first) == min(known.values())
        assert (item in order) == (item in known)


def test_equal_scores_leave_in_the_order_of_arrival() -> None:
    order: ScoreOrder[int] = ScoreOrder()
    for item in (5, 3, 9, 1):
        order.put(item, 1.0)
    left = []
    while (first := order.first()) is not None:
        left.append(first)
        order.discard(first)
    assert left == [5, 3, 9, 1]


def test_what_was_taken_out_is_not_held() -> None:
    """Dead entries stay within a factor of the living, so objects are let go."""
    order: ScoreOrder[int] = ScoreOrder()
    for item in range(3000):
        order.put(item, float(-item))
        order.put(item, float(item))
        if item % 3:
            order.discard(item)
        assert order.num_entries <= 3 * len(order) + 3 * SLACK
    for item in range(3000):
        order.discard(item)
    assert not order
    assert order.num_entries <= 2 * SLACK


def test_the_first_stays_the_least_while_the_old_heap_is_drained() -> None:
    order: ScoreOrder[int] = ScoreOrder()
    for item in range(500):
        order.put(item, float(item))
    for item in range(0, 500, 2):
        order.put(item, float(1000 + item))  # 250 dead entries
    drained = []
    for item in range(1, 500, 2):
        drained.append(order.num_entries)
        assert order.first() == item
        order.discard(item)
    assert order.first() == 0
    assert drained[-1] < drained[0]
