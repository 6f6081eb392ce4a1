"""What each policy lets go first, on the real tree, and where checkpoints are placed."""

from __future__ import annotations

import pytest

from statewise.radix import CheckpointPolicy, Namespace, Prefill, checkpoint_policy, eviction_policy
from statewise.radix.policy import EVICTION_POLICIES, ValuePolicy
from support.radix_oracle import SCHEMAS, Harness

NS = Namespace()
PAGE = SCHEMAS["full"].page_size


def run(harness: Harness, tokens: list[int], times: int = 1) -> None:
    for _ in range(times):
        request = harness.start(NS, tokens)
        harness.compute(request, len(tokens))
        harness.tree.keep(request.lease, len(tokens))
        harness.finish(request)


def taught(harness: Harness, gap: int = 400) -> Harness:
    """With a horizon that makes uses and savings count."""
    for _ in range(1000):
        harness.tree.policy.note_gap(gap)
    return harness


def tokens_of(first: int, pages: int) -> list[int]:
    return list(range(first, first + pages * PAGE))


def cached(harness: Harness, tokens: list[int]) -> int:
    return harness.match(NS, tokens).reuse_position() // PAGE


def test_recency_takes_the_leaf_used_longest_ago() -> None:
    harness = Harness(SCHEMAS["full"], "recency")
    old, new = tokens_of(0, 4), tokens_of(100, 4)
    run(harness, old, times=5)
    run(harness, new)
    harness.evict(0, 4)
    assert (cached(harness, old), cached(harness, new)) == (0, 4)


def test_value_keeps_what_was_used_often_over_what_is_merely_newer() -> None:
    harness = taught(Harness(SCHEMAS["full"], "value"))
    often, once = tokens_of(0, 4), tokens_of(100, 4)
    run(harness, often, times=5)
    run(harness, once)
    harness.evict(0, 4)
    assert (cached(harness, often), cached(harness, once)) == (4, 0)


def test_value_lets_go_of_what_was_used_often_once_it_is_old_enough() -> None:
    harness = Harness(SCHEMAS["full"], "value")
    often = tokens_of(0, 4)
    run(harness, often, times=5)
    for first in range(100, 4000, 100):
        run(harness, tokens_of(first, 4))
        harness.evict(0, max(0, len(harness.held[0]) - 20))
    assert cached(harness, often) == 0


def test_value_prefers_many_short_runs_to_a_long_one_as_old() -> None:
    harness = taught(Harness(SCHEMAS["full"], "value"))
    short, long = tokens_of(0, 2), tokens_of(1000, 60)
    run(harness, short)
    run(harness, long)
    harness.evict(0, 10)
    assert cached(harness, short) == 2
    assert cached(harness, long) == 50, "and only its tail goes"


def test_value_keeps_the_checkpoint_that_saves_more_recompute_for_its_bytes() -> None:
    harness = taught(Harness(SCHEMAS["full_window"], "value"))
    deep, shallow = tokens_of(0, 60), tokens_of(1000, 4)
    run(harness, deep)
    run(harness, shallow)
    transient = sum(pins.num_transient for pins in harness.tree.trailing.transient[0])
    harness.evict(1, transient + 1)
    assert (cached(harness, deep), cached(harness, shallow)) == (60, 0)


@pytest.mark.parametrize(("policy", "history_goes"), [("lru", True), ("recency", False)])
def test_only_lru_takes_the_history_with_a_window(policy: str, history_goes: bool) -> None:
    harness = Harness(SCHEMAS["full_window"], policy)
    old, new = tokens_of(0, 10), tokens_of(100, 10)
    run(harness, old)
    run(harness, new)
    harness.evict(1, 10)
    assert (harness.match(NS, old).logical_pages == 0) == history_goes
    assert cached(harness, new) == 10


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_what_two_prompts_share_goes_after_both_of_them(policy: str) -> None:
    harness = Harness(SCHEMAS["full"], policy)
    shared = tokens_of(0, 6)
    ends = [tokens_of(first, 3) for first in (1000, 2000)]
    for end in ends:
        run(harness, shared + end)
    harness.evict(0, 6)
    assert [cached(harness, shared + end) for end in ends] == [6, 6]
    harness.evict(0, 6)
    assert harness.tree.evictable(0) == 0
    assert not harness.held[0]


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
@pytest.mark.parametrize("schema_name", SCHEMAS)
def test_whatever_the_policy_all_that_is_evictable_can_be_evicted(
    policy: str, schema_name: str
) -> None:
    harness = Harness(SCHEMAS[schema_name], policy)
    for first in (0, 0, 1000, 2000):
        run(harness, list(range(first, first + 24)))
    live = harness.start(NS, list(range(30)))
    harness.compute(live, 20)
    for g in range(harness.schema.num_groups):
        harness.evict(g, harness.tree.evictable(g))
        assert harness.tree.evictable(g) == 0
    harness.check()
    harness.drain()


def test_horizon_follows_the_gaps_and_nothing_moves_it_backwards_in_time() -> None:
    policy = ValuePolicy()
    policy.note_gap(0)
    assert policy.horizon == 0.0
    policy.note_gap(50)
    assert policy.horizon == 50.0
    for _ in range(2000):
        policy.note_gap(200)
    assert policy.horizon == pytest.approx(200.0, rel=0.01)


@pytest.mark.parametrize(
    ("name", "interval", "expected"),
    [
        ("spaced", 100, {150, 200, 250, 300}),
        ("spaced", 0, {150, 250}),
        ("branches", 100, {150, 250}),
        ("ends", 100, {250}),
    ],
)
def test_where_checkpoints_are_placed(name: str, interval: int, expected: set[int]) -> None:
    prefill = Prefill(start=120, length=330, branch=150, marks=(250,))
    assert checkpoint_policy(name, interval).positions(prefill) == expected


def test_nothing_is_placed_below_the_start_or_past_the_end() -> None:
    policy = CheckpointPolicy(True, 64)
    prefill = Prefill(start=128, length=200, branch=0, marks=(128, 200, 201))
    assert policy.positions(prefill) == {192, 200}


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'mru'.*value, recency, lru"):
        eviction_policy("mru")
    with pytest.raises(ValueError, match=r"'dense'.*spaced, branches, ends"):
        checkpoint_policy("dense", 1)
