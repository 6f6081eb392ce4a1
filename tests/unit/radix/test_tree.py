"""The tree's promises one by one: protection, order of eviction, checkpoints, faults by number."""

from __future__ import annotations

import json
from itertools import product
from xml.etree import ElementTree

import numpy as np
import pytest

from statewise.radix import GroupKind, Namespace, RadixTree, StaleMatchError, TokenKey, Written
from support.radix_oracle import FULL, RECURRENT, SCHEMAS, Harness, Request, group, schema, window

NS = Namespace()


def run(harness: Harness, tokens: list[int], keep: bool = True) -> Request:
    """One whole request, finished."""
    request = harness.start(NS, tokens)
    harness.compute(request, len(tokens))
    if keep:
        assert harness.tree.keep(request.lease, len(tokens))
    harness.finish(request)
    return request


def reuse(harness: Harness, tokens: list[int]) -> int:
    return harness.match(NS, tokens).reuse_position()


def test_second_request_reuses_the_first() -> None:
    harness = Harness(SCHEMAS["full_window"])
    tokens = list(range(20))
    run(harness, tokens)
    assert reuse(harness, tokens) == 20
    assert reuse(harness, [*tokens[:13], 99, 98]) == 12
    assert harness.match(Namespace("other"), tokens).logical_pages == 0
    harness.drain()


def test_match_changes_nothing() -> None:
    harness = Harness(SCHEMAS["full_window"])
    run(harness, list(range(20)))
    before = json.dumps(harness.tree.dump()), harness.tree.trailing.tick
    for cut in range(20):
        harness.match(NS, [*range(cut), 99]).intersection()
    assert (json.dumps(harness.tree.dump()), harness.tree.trailing.tick) == before


def test_match_is_a_snapshot() -> None:
    harness = Harness(SCHEMAS["full_window"])
    run(harness, list(range(20)))
    match = harness.match(NS, list(range(20)))
    harness.evict(1, 100)
    harness.evict(0, 3)
    assert (match.blocks(0) >= 0).all()
    assert (match.blocks(1) >= 0).all()
    assert match.intersection() == (10, 10)


@pytest.mark.slow
def test_one_long_request_does_not_pay_for_its_length() -> None:
    """Appending makes at most one node per bounded run, and each step touches one node."""
    harness = Harness(SCHEMAS["full"])
    request = harness.start(NS, list(range(4000)))
    for _ in range(40):
        harness.compute(request, 100)
    nodes = sum(1 for _ in harness.tree.topology.nodes())
    assert nodes <= 2 + 2000 // 256
    harness.drain()


@pytest.mark.parametrize(
    ("page_size", "num_pages"), [(1, 3), (2, 3), (4, 3), pytest.param(2, 4, marks=pytest.mark.slow)]
)
def test_f2_reuse_is_the_intersection_for_every_subset_of_blocks(
    page_size: int, num_pages: int
) -> None:
    """Every residency pattern of three groups over the pages, against the literal check."""
    spec = schema(page_size, FULL, window(page_size + 1), group("c", GroupKind.CHUNKED, window=6))
    tokens = list(range(num_pages * page_size))
    for pattern in product((0, 1), repeat=3 * num_pages):
        harness = Harness(spec)
        request = harness.start(NS, tokens)
        request.position = len(tokens)
        for g in range(3):
            for page in range(num_pages):
                if pattern[g * num_pages + page]:
                    place = request.place((page + 1) * page_size)
                    request.tables[g][page] = harness.pools[g].alloc(place, 0)
        harness.publish(request, num_pages)
        match = harness.match(NS, tokens)
        assert match.reuse_position() == harness.best(NS, tokens, page_size)
        for g in range(3):
            for boundary in range(num_pages + 1):
                able = harness.can_resume(NS, tokens, g, boundary * page_size)
                assert match.resumable(g)[boundary] == able


def test_f5_diverging_before_the_window_costs_at_most_the_checkpoint_spacing() -> None:
    harness = Harness(SCHEMAS["full_window"])  # pages of 2, window of 5
    tokens, spacing = list(range(64)), 8
    request = harness.start(NS, tokens)
    for end in range(spacing, 65, spacing):
        harness.compute(request, spacing)
        assert harness.tree.keep(request.lease, end)
    harness.finish(request)
    transient = harness.tree.trailing.transient[0]
    harness.evict(1, sum(pins.num_transient for pins in transient))
    for diverge in range(64):
        key = [*tokens[:diverge], 999, 999]
        match = harness.match(NS, key)
        lost = match.logical_tokens - match.reuse_position()
        assert lost < spacing
        if lost:
            assert match.limiting_group(match.logical_pages) == 1
            assert match.branch_position == match.logical_tokens


def test_f6_transient_pages_go_before_any_checkpoint() -> None:
    harness = Harness(SCHEMAS["full_window"])
    first, second = list(range(40)), list(range(100, 140))
    run(harness, first)
    streaming = harness.start(NS, second)
    for _ in range(10):
        harness.compute(streaming, 4)
    pages = sum(p.num_transient for p in harness.tree.trailing.transient[0])
    freed = harness.evict(1, pages)
    assert freed.num(1) == pages
    assert freed.num(0) == 0
    assert reuse(harness, first) == 40, "the checkpoint is still whole"
    harness.drain()


def test_f7_shared_prefix_with_unique_tails_is_reused_at_the_branch() -> None:
    harness = Harness(schema(2, FULL, RECURRENT))
    shared = list(range(20))

    def serve(tail: int) -> int:
        tokens = [*shared, *[tail] * 6]
        match = harness.match(NS, tokens)
        branch = match.branch_position
        request = harness.start(NS, tokens)
        reused = request.position
        if branch is not None:
            harness.compute(request, branch - reused)
            harness.snapshot(request)
        harness.compute(request, len(tokens))
        harness.snapshot(request)
        harness.finish(request)
        return reused

    assert serve(100) == 0
    assert serve(200) == 0, "the only snapshot lies in tokens of the first request alone"
    assert serve(300) == 20, "the second one left a checkpoint where they branch"
    assert serve(400) == 20
    harness.drain()


def test_f7_window_at_the_branch_is_reused_by_the_second_request() -> None:
    harness = Harness(SCHEMAS["full_window"])
    shared = list(range(20))
    run(harness, [*shared, 100, 100, 100, 100])
    assert reuse(harness, [*shared, 200, 200]) == 20


@pytest.mark.parametrize("group_index", [0, 1])
def test_f8_eviction_between_match_and_lease_is_noticed(group_index: int) -> None:
    harness = Harness(SCHEMAS["full_window"])
    tokens = list(range(20))
    run(harness, tokens)
    match = harness.match(NS, tokens)
    harness.evict(group_index, 10)
    with pytest.raises(StaleMatchError):
        harness.tree.lease(match, 20)
    harness.check()
    assert harness.tree.evictable(0) == len(harness.held[0]), "nothing stayed protected"


def test_f8_unrelated_eviction_does_not_disturb() -> None:
    harness = Harness(SCHEMAS["full_window"])
    run(harness, list(range(100, 120)))
    tokens = list(range(20))
    run(harness, tokens)
    match = harness.match(NS, tokens)
    harness.evict(0, 10)  # the older request's
    lease = harness.tree.lease(match, 20)
    assert harness.tree.pages(lease, 0)[0].tolist() == match.blocks(0).tolist()
    harness.tree.release(lease)


def test_f26_a_match_refreshes_only_what_it_needs() -> None:
    """Windows of a long sequence that a lease passes over stay as old as they were."""
    harness = Harness(SCHEMAS["full_window"])
    a, b = [*range(40)], [*range(100, 140)]
    for tokens in (a, b):  # a checkpoint in the middle and one at the end
        request = harness.start(NS, tokens)
        harness.compute(request, 20)
        harness.tree.keep(request.lease, 20)
        harness.compute(request, 20)
        harness.tree.keep(request.lease, 40)
        harness.finish(request)
    harness.evict(1, sum(p.num_transient for p in harness.tree.trailing.transient[0]))
    request = harness.start(NS, [*a, 7, 7])  # uses the end of `a`, not its middle
    harness.finish(request)
    middle_of_a, middle_of_b = a[:20], b[:20]
    harness.evict(1, 1)
    assert reuse(harness, middle_of_a) == 0, "the oldest checkpoint is the one passed over"
    assert reuse(harness, middle_of_b) == 20
    harness.evict(1, 4)
    assert reuse(harness, a) == 40


def test_f34_each_group_frees_its_own() -> None:
    harness = Harness(SCHEMAS["full_window"])
    run(harness, list(range(40)))
    freed = harness.evict(1, 5)
    assert (freed.num(0), freed.num(1)) == (0, 5)
    freed = harness.evict(0, 3)
    assert freed.num(0) == 3


def test_leased_state_is_never_evicted() -> None:
    harness = Harness(SCHEMAS["hybrid"])
    tokens = list(range(21))
    request = harness.start(NS, tokens)
    harness.compute(request, 21)
    harness.snapshot(request)
    harness.finish(request)
    lease = harness.start(NS, [*tokens, 5])
    assert lease.position == 21
    for g in range(3):
        harness.evict(g, 100)
    assert reuse(harness, [*tokens, 5]) == 21
    harness.drain()


def test_lease_protects_only_below_its_position() -> None:
    harness = Harness(SCHEMAS["full"])
    run(harness, list(range(20)))
    lease = harness.tree.lease(harness.match(NS, list(range(20))), 12)
    assert harness.tree.evictable(0) == 4
    assert harness.tree.evict(0, 100).num(0) == 4
    harness.tree.release(lease)
    assert harness.tree.evictable(0) == 6


def test_lease_where_a_group_cannot_resume_is_refused_and_repair_allows_it() -> None:
    harness = Harness(SCHEMAS["full_window"])
    tokens = list(range(20))
    run(harness, tokens)
    harness.evict(1, 9)
    match = harness.match(NS, tokens)
    with pytest.raises(ValueError, match="'window' cannot resume at 20"):
        harness.tree.lease(match, 20)
    lease = harness.tree.lease(match, 20, repairing=(1,))
    assert match.blocks(1).tolist()[:9] == [-1] * 9
    assert harness.tree.evict(1, 100).num(1) == 0, "what is left of the window is protected"
    blocks = np.array([-1] * 7 + [50, 51, 52], dtype=np.int32)
    none = np.full(10, -1, dtype=np.int32)
    done = harness.tree.restore(lease, 7, 10, [none, blocks], Written((0, 0), 9))
    again = harness.match(NS, tokens)
    assert again.reuse_position() == 20
    assert again.blocks(1)[7:].tolist() == [50, 51, match.blocks(1)[9]]
    assert [t.own_blocks.tolist() for t in done.duplicates] == [[52]]
    harness.tree.release(lease)


def test_release_happens_exactly_once() -> None:
    tree = RadixTree(SCHEMAS["full"])
    lease = tree.lease(tree.match(NS, TokenKey([1, 2])), 0)
    tree.release(lease)
    with pytest.raises(AssertionError, match="exactly once"):
        tree.release(lease)
    assert not tree.topology.roots


def test_f23_new_stamps_make_old_state_unusable_at_once() -> None:
    harness = Harness(SCHEMAS["full_window"])
    tokens = list(range(20))
    run(harness, tokens)
    old = harness.start(NS, [*tokens, 1, 2, 3, 4])
    harness.tree.expect([1, 1])
    assert reuse(harness, tokens) == 0
    old.position = 24
    done = harness.tree.publish(
        old.lease, old.key, 12, old.tables, harness.written(old), old.position
    )
    assert done.num_pages == 10, "state of old weights is not taken"
    run(harness, tokens)
    assert reuse(harness, tokens) == 20
    harness.drain()


def test_dropped_state_is_not_found_and_freed_when_unleased() -> None:
    harness = Harness(SCHEMAS["full_window"])
    tokens = list(range(20))
    run(harness, tokens)
    request = harness.start(NS, [*tokens, 1])
    match = harness.match(NS, tokens)
    assert not harness.tree.drop(match, 0, [4])
    assert harness.match(NS, tokens).intersection()[0] == 4
    assert len(harness.tree.blocks(0)) == 10, "a lease may still read it"
    harness.requests.remove(request)
    freed = harness.tree.release(request.lease)
    assert freed.blocks[0].tolist() == [match.blocks(0)[4]]


def test_pictures_show_every_node_and_checkpoint() -> None:
    harness = Harness(SCHEMAS["full_window"])
    run(harness, list(range(20)))
    run(harness, [*range(8), *range(50, 60)])
    harness.evict(1, 4)
    text = harness.tree.show()
    assert text.count("[") == 3
    assert "@20" in text
    dumped = json.loads(json.dumps(harness.tree.dump()))
    root = dumped["namespaces"][0]["root"]
    assert [len(n["children"]) for n in (root, root["children"][0])] == [1, 2]
    assert ElementTree.fromstring(harness.tree.svg()).tag.endswith("svg")
    assert RadixTree(SCHEMAS["full"]).show() == "(empty)\n"


def test_wrong_number_of_stamps_is_refused() -> None:
    with pytest.raises(ValueError, match="1 stamps for 2 groups"):
        RadixTree(SCHEMAS["full_window"], [0])
    with pytest.raises(ValueError, match="3 stamps for 2 groups"):
        RadixTree(SCHEMAS["full_window"]).expect([0, 0, 0])
