"""What of a match is worth a copy: what somebody could resume from later."""

from __future__ import annotations

import numpy as np
import pytest

from statewise.radix import Match, Namespace, RadixTree, TokenKey
from statewise.radix.lasting import lasting_pages, lasting_snapshots
from statewise.radix.results import Written
from support.sim_schema import make_schema

PAGE = 4
TOKENS = list(range(1, 1 + 10 * PAGE))
KEY = TokenKey(TOKENS)


def published(
    shape: str, num_pages: int, *, keep: int = 0, snapshots: tuple[int, ...] = ()
) -> RadixTree:
    """A tree with pages of every paged group; a checkpoint after `keep` pages."""
    tree = RadixTree(make_schema(shape, PAGE, 6))
    groups = tree.schema.groups
    lease = tree.lease(tree.match(Namespace(), KEY), 0)
    tables = [np.arange(20 * g, 20 * g + 10, dtype=np.int32) for g in range(len(groups))]
    written = Written(tree.stamps, 1)
    tree.publish(lease, KEY, num_pages, tables, written, num_pages * PAGE)
    if keep:
        tree.keep(lease, keep * PAGE)
    for position in snapshots:
        for g, spec in enumerate(groups):
            if spec.kind.is_snapshot:
                tree.add_snapshot(lease, KEY, position, g, 300 + position, written)
    tree.release(lease)
    return tree


def match_of(tree: RadixTree) -> Match:
    return tree.match(Namespace(), KEY)


def pages_of(tree: RadixTree, group: str, resume_at: int = 0) -> list[int]:
    good = lasting_pages(match_of(tree), tree.schema.index_of(group), resume_at)
    return np.flatnonzero(good).tolist()


def test_all_of_the_history_lasts() -> None:
    tree = published("CFW", 6)
    for group in ("full", "entries", "index"):
        assert pages_of(tree, group) == list(range(6)), group


def test_what_is_not_valid_does_not_last() -> None:
    """Damaged layers, dropped pages, other stamps: nothing that could not be used now."""
    tree = published("F", 6)
    tree.drop(match_of(tree), 0, [2])
    tree.mark_invalid(match_of(tree), 0, {4: 1})
    assert pages_of(tree, "full") == [0, 1, 3, 5]


@pytest.mark.parametrize(
    ("resume_at", "expected"),
    [(0, []), (4, [0]), (8, [0, 1]), (24, [4, 5]), (27, [4, 5]), (40, [])],
)
def test_of_a_window_what_a_resume_needs_lasts(resume_at: int, expected: list[int]) -> None:
    """Six tokens of window over pages of four: the two pages before the position."""
    assert pages_of(published("FW", 6), "window", resume_at) == expected


def test_of_a_window_what_a_checkpoint_keeps_lasts() -> None:
    tree = published("FW", 6, keep=4)
    assert pages_of(tree, "window") == [2, 3]
    assert pages_of(tree, "window", 24) == [2, 3, 4, 5]


def test_sinks_last_with_their_window() -> None:
    assert pages_of(published("FS", 6), "sinks", 24) == [0, 4, 5]


def test_snapshots_last_at_page_boundaries_only() -> None:
    tree = published("FR", 6, snapshots=(8, 20, 22))
    found = lasting_snapshots(match_of(tree))
    assert [(position, held.block) for position, held in found] == [(8, 308), (20, 320)]


def test_a_match_that_ends_inside_a_node_lasts_up_to_there() -> None:
    tree = published("FW", 6, keep=6)
    key = TokenKey([*TOKENS[: 3 * PAGE], *([96] * 8)])
    match = tree.match(Namespace(), key)
    assert lasting_pages(match, 0).tolist() == [True] * 3
    assert lasting_pages(match, 1).tolist() == [False] * 3, "kept is what the end needs"
