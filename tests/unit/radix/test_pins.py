"""Counts of window pages, kept by runs: beside the same counts kept page by page."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from statewise.radix.node import ABSENT, Node, WindowPins
from statewise.radix.segment import Segment, new_columns, of_table


def segment(blocks: list[int]) -> Segment:
    return of_table(new_columns(np.array(blocks, dtype=np.int32), None, 0, 1))


def node_of(blocks: list[int]) -> tuple[Node, WindowPins]:
    node = Node(None, b"", 0, len(blocks), (segment(blocks),))
    pins = WindowPins(node, 0)
    node.pins = (pins,)
    assert pins.grow() == sum(block >= 0 for block in blocks)
    return node, pins


def check(pins: WindowPins, locks: list[int], needs: list[int]) -> None:
    assert pins.per_page() == (locks, needs)
    assert pins.is_kept() == [need > lock for lock, need in zip(locks, needs, strict=True)]
    for start in range(len(locks) + 1):
        expected = (locks[start:].count(0), needs[start:].count(0))
        assert pins.tally(start) == expected
    if 0 in needs:
        start, stop = pins.first_transient(3)
        assert start == needs.index(0)
        assert needs[start:stop] == [0] * (stop - start)
        assert stop - start == 3 or stop == len(needs) or needs[stop]
    runs = list(zip(pins.locks, pins.needs, strict=True))
    assert all(a != b for a, b in pairwise(runs))


@pytest.mark.parametrize("seed", range(20))
def test_runs_count_what_pages_would(seed: int) -> None:
    rng = random.Random(seed)
    blocks = [rng.choice([-1, page]) for page in range(12)]
    node, pins = node_of(blocks)
    locks = [0 if block >= 0 else ABSENT for block in blocks]
    needs = list(locks)
    held: list[tuple[int, int, int]] = []
    for _ in range(30):
        if held and rng.random() < 0.5:
            start, stop, lock = held.pop(rng.randrange(len(held)))
            lock, need = -lock, -1
        else:
            start = rng.randrange(len(locks))
            stop = rng.randint(start + 1, len(locks))
            lock, need = rng.randrange(2), 1
            held.append((start, stop, lock))
        before = (locks.count(0), needs.count(0))
        for page in range(start, stop):
            locks[page] += lock
            needs[page] += need
        after = (locks.count(0), needs.count(0))
        changed = pins.add(start, stop, lock, need)
        assert changed == (after[0] - before[0], after[1] - before[1])
        check(pins, locks, needs)
    other = [rng.choice([-1, page]) for page in range(12)]
    node.segments = (segment(other),)
    pins.follow()
    for page, (old, new) in enumerate(zip(blocks, other, strict=True)):
        change = ((new < 0) - (old < 0)) * ABSENT
        locks[page] += change
        needs[page] += change
    check(pins, locks, needs)


def test_a_node_grows_splits_and_is_trimmed() -> None:
    node, pins = node_of([-1, -1, 5])
    pins.add(2, 3, 1, 1)
    node.segments = (segment([-1, -1, 5, -1, 7, 8]),)
    assert pins.grow() == 2
    check(pins, [ABSENT, ABSENT, 1, ABSENT, 0, 0], [ABSENT, ABSENT, 1, ABSENT, 0, 0])
    upper, _ = node_of([-1, -1, 5, -1, 7])
    above = pins.split(upper, 5)
    check(above, [ABSENT, ABSENT, 1, ABSENT, 0], [ABSENT, ABSENT, 1, ABSENT, 0])
    check(pins, [0], [0])
    above.trim(3)
    check(above, [ABSENT, ABSENT, 1], [ABSENT, ABSENT, 1])
