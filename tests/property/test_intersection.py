"""F2: reuse equals the brute-force intersection, for all residency patterns of small prefixes.

Six pages, three groups, three states per page (device, slower tier, absent). Whether one group can
resume depends on that group alone, so each kind is tried over all 3^6 patterns at every boundary.
The combination depends on the groups' answers alone: all combinations of different answers of
three groups are tried over four pages, and a sample of them over six.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

from statewise.radix import CacheSchema, GroupKind, StateGroupSpec, Tier
from statewise.radix.residency import Residency
from support.recovery_oracle import (
    Pages,
    World,
    build_match,
    needed_pages,
)

P, N = 2, 6
ABSENT, DEVICE, HOST = -1, 0, 1


def group(name: str, kind: GroupKind, **more: object) -> StateGroupSpec:
    size = "snapshot_bytes" if kind.is_snapshot else "entry_bytes"
    return StateGroupSpec(name, kind, (0,), "layout", "v1", **{size: 8, **more})  # type: ignore[arg-type]


KINDS = {
    "full": group("a", GroupKind.FULL),
    "compressed": group("a", GroupKind.COMPRESSED, ratio=2),
    "window1": group("a", GroupKind.WINDOW, window=1),
    "window4": group("a", GroupKind.WINDOW, window=4),
    "window5": group("a", GroupKind.WINDOW, window=5),
    "sinks": group("a", GroupKind.WINDOW, window=3, sinks=3),
    "chunked": group("a", GroupKind.CHUNKED, window=4),
    "chunked_odd": group("a", GroupKind.CHUNKED, window=6),
}


def patterns(n: int = N) -> Iterator[tuple[int, ...]]:
    return product((DEVICE, HOST, ABSENT), repeat=n)


def literal(schema: CacheSchema, g: int, tiers: tuple[int, ...], worst: int) -> list[bool]:
    """Boundaries at which the group can resume from tiers up to `worst`, page by page."""
    return [
        all(0 <= tiers[p] <= worst for p in needed_pages(schema, g, boundary))
        for boundary in range(len(tiers) + 1)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(KINDS))
def test_f2_one_group_resumes_where_each_needed_page_is_there_for_all_patterns(name: str) -> None:
    schema = CacheSchema(P, 1, (KINDS[name],), "m")
    for tiers in patterns():
        match = build_match(World(schema, N, {0: Pages(tiers)}))
        now, later = literal(schema, 0, tiers, DEVICE), literal(schema, 0, tiers, HOST)
        assert match.resumable(0).tolist() == now, tiers
        assert match.resumable(0, after_load=True).tolist() == later, tiers
        have = Residency(match)
        assert have.resumable(0, Tier.DEVICE).tolist() == now, tiers
        assert have.resumable(0, Tier.HOST).tolist() == later, tiers


SCHEMA = CacheSchema(
    P,
    1,
    (
        group("full", GroupKind.FULL),
        group("window", GroupKind.WINDOW, window=4),
        group("state", GroupKind.RECURRENT),
    ),
    "m",
)


Answers = tuple[tuple[int, ...], list[np.ndarray]]


def distinct(g: int, n: int) -> list[Answers]:
    """One pattern, and the answers, for each different pair of answers (now, after a load)."""
    found: dict[tuple[bool, ...], Answers] = {}
    for tiers in patterns(n):
        now, later = literal(SCHEMA, g, tiers, DEVICE), literal(SCHEMA, g, tiers, HOST)
        found.setdefault((*now, *later), (tiers, [np.array(now), np.array(later)]))
    return list(found.values())


def check(full: Answers, window: Answers, bits: tuple[bool, ...]) -> None:
    """The intersection of three groups, against the AND of their literal answers."""
    n = len(bits)
    exact = np.array([True, *bits])
    expected = tuple(
        int(np.flatnonzero(f & w & exact)[-1]) for f, w in zip(full[1], window[1], strict=True)
    )
    at = frozenset(p for p, bit in enumerate(bits, start=1) if bit)
    world = World(SCHEMA, n, {0: Pages(full[0]), 1: Pages(window[0])}, {2: at})
    assert build_match(world).intersection() == expected, (full[0], window[0], sorted(at))


@pytest.mark.slow
def test_f2_three_groups_intersect_for_every_combination_of_answers_over_four_pages() -> None:
    for full, window in product(distinct(0, 4), distinct(1, 4)):
        for bits in product((False, True), repeat=4):
            check(full, window, bits)


@pytest.mark.slow
def test_f2_three_groups_intersect_for_a_sample_of_combinations_over_six_pages() -> None:
    full, window = distinct(0, N), distinct(1, N)
    rng = np.random.default_rng(2)
    for f, w in zip(
        rng.integers(len(full), size=3000), rng.integers(len(window), size=3000), strict=True
    ):
        bits = tuple(bool(b) for b in rng.integers(2, size=N))
        check(full[f], window[w], bits)
