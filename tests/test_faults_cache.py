"""Fault kinds of the state-aware cache, from a lookup to the end of a request.

Each test is named after the kind's number (docs/faults.md) and fails when the guard is removed.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from statewise.radix import GroupEnv, Namespace, TokenKey, Written
from statewise.radix.schema import CacheSchema, GroupKind
from statewise.radix.stamp import Stamp, StampTable
from statewise.radix.tree import RadixTree
from statewise.runtime.messages import TokenizedRequest, pack_ids
from statewise.runtime.sampling_params import SamplingParams
from statewise.runtime.scheduler.batch import RowResult, ScheduledBatch, StepResult
from support.engine import VOCAB, Driver, Outcome
from support.sim_schema import make_schema

PAGE = 4
ALL_KINDS = ("FWF", "KFK", "FSF", "FR", "CC", "HFC", "FWV")


def tokens(n: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, VOCAB) for _ in range(n)]


def schema_of(shape: str, window: int = 6) -> CacheSchema:
    return make_schema(shape, PAGE, window, ratio=2, long_ratio=4)


def driver_of(shape: str, blocks: int = 64, **args: object) -> Driver:
    schema = schema_of(shape)
    settings = {"chunked_prefill_size": 16, "checkpoint_interval": 8, **args}
    return Driver(schema, (blocks,) * schema.num_groups, **settings)


def report_of(outcome: Outcome) -> tuple[int, int]:
    """(matched, reused) tokens."""
    assert outcome.report is not None
    return outcome.report.matched, outcome.report.reused


@pytest.mark.parametrize("shape", ALL_KINDS)
def test_f1_any_unreadable_block_of_any_group_costs_recomputing_at_most(shape: str) -> None:
    """A block whose generation moved behind the tree's back is found and planned around."""
    prompt = tokens(24, 1)
    num_groups = schema_of(shape).num_groups
    for group in range(num_groups):
        for page in range(6):
            driver = driver_of(shape)
            driver.serve("a", prompt, 1)
            match, pool = driver.match(prompt), driver.cache.pools[group]
            if driver.schema.groups[group].kind.is_snapshot:
                blocks = [b.block for s in match.snapshots for b in s.blocks if b.group == group]
            else:
                blocks = match.blocks(group)[page : page + 1].tolist()
            for block in [b for b in blocks if b >= 0]:
                pool.generations[block] += 1
                driver.worker.poison(group, np.array([block]))
            driver.serve("b", [*prompt, 5, 6], 3)
            driver.serve("c", [*prompt, 7], 3)


@pytest.mark.parametrize("shape", ALL_KINDS)
def test_f2_whatever_groups_lost_what_pages_the_output_is_a_cold_runs(shape: str) -> None:
    rng = random.Random(shape)
    prompt = tokens(32, 2)
    driver = driver_of(shape)
    for round_ in range(12):
        driver.serve(f"a{round_}", [*prompt, round_ + 1], 2)
        for spec in driver.schema.groups:
            if spec.kind.is_snapshot:
                places = [s.position for s in driver.match(prompt).snapshots if rng.random() < 0.5]
            else:
                places = [p for p in range(8) if rng.random() < 0.25]
            driver.lose(prompt, spec.name, places)


def test_f4_groups_of_unlike_geometry_keep_to_their_own_blocks() -> None:
    """Entries per page 4, 2 and 1, snapshots of 1, 4 and 8 words, in one model, on few blocks."""
    schema = make_schema("RCHF", 8, 5, ratio=2, long_ratio=8)
    driver = Driver(schema, (24,) * schema.num_groups, chunked_prefill_size=16)
    for i in range(8):
        driver.worker.poison(0, driver.cache.pools[0].free_blocks())
        driver.serve(f"r{i}", [*tokens(50, i % 3), i + 1], 4)
    for group, spec in enumerate(schema.groups):
        words = driver.worker.blocks(group).shape[2]
        assert words == driver.worker.slots[group]
        assert spec.kind is GroupKind.TAIL or words == spec.entries_per_page(8)


@pytest.mark.parametrize("offset", range(1, 24))
def test_f5_diverging_anywhere_costs_at_most_the_checkpoint_spacing(offset: int) -> None:
    spacing = 8
    driver = driver_of("FWF", checkpoint_interval=spacing)
    prompt = tokens(40, 3)
    driver.serve("a", prompt, 1)
    shared = len(prompt) - offset
    done = driver.serve("b", [*prompt[:shared], 96, 95, 94, 93], 2)
    matched, reused = report_of(done)
    assert done.report is not None
    lost = matched - reused - done.report.repaired
    assert lost <= spacing
    if lost:
        assert done.report.limiting_group == "window"


def test_f6_a_long_requests_window_pages_do_not_push_out_kept_ones() -> None:
    schema = schema_of("FW")
    driver = Driver(schema, (200, 24), chunked_prefill_size=8, checkpoint_interval=1000)
    prompt = tokens(21, 4)
    driver.serve("a", prompt, 1)
    driver.serve("long", tokens(300, 5), 1)  # streams many times the window pool
    done = driver.serve("b", [*prompt, 1, 2], 1)
    matched, reused = report_of(done)
    assert matched == reused == 20


@pytest.mark.parametrize("shape", ALL_KINDS)
def test_f8_what_leaves_between_lookup_and_begin_is_planned_anew(shape: str) -> None:
    driver = driver_of(shape)
    prompt = tokens(24, 6)
    driver.serve("a", prompt, 1)
    real, calls = driver.cache.begin, []

    def begin(lookup: object, capacity: int) -> object:
        calls.append(driver.cache.version)
        if len(calls) == 1:
            driver.free(driver.cache.tree.flush())
        return real(lookup, capacity)  # type: ignore[arg-type]

    driver.cache.begin = begin  # type: ignore[assignment,method-assign]
    driver.serve("b", [*prompt, 1], 3)
    assert len(calls) == 2
    driver.quiesce()


def test_f8_a_match_of_nothing_whole_has_no_nodes_to_count() -> None:
    tree = driver_of("FR").cache.tree
    match = tree.match(Namespace(), TokenKey(tokens(3, 1)))
    assert match.node_sizes() == []
    assert match.tiers(0).tolist() == []
    assert tree.evictable_beside(match) == (0, 0)


def test_f10_the_report_says_why_nothing_is_reused() -> None:
    driver = driver_of("FWF")
    short = driver.serve("a", [1, 2, 3], 1).report
    assert short is not None
    assert f"page of {PAGE} tokens" in short.reason
    prompt = tokens(24, 7)
    driver.serve("b", prompt, 1)
    driver.lose(prompt, "window")
    lost = driver.serve("c", [*prompt, 1], 1).report
    assert lost is not None
    assert lost.limiting_group == "window"
    assert {g.name for g in lost.groups} == {"full", "window"}


def test_f11_every_window_group_keeps_its_own_window() -> None:
    driver = driver_of("FWV")
    live: dict[str, int] = {}

    def count(batch: ScheduledBatch) -> None:
        for spec, table in zip(driver.schema.groups, batch.rows[0].page_tables, strict=True):
            live[spec.name] = int((table >= 0).sum())

    driver.worker.before_step = count
    driver.serve("a", tokens(60, 8), 8)
    assert live["window"] < live["wide"] < live["full"]
    assert live["window"] <= -(-6 // PAGE) + 2


def test_f12_state_of_a_step_that_failed_is_never_found() -> None:
    """The k-th chunk's row fails: what it should have written is no hit, whatever k is."""
    prompt = tokens(48, 9)
    for failing in range(1, 4):
        driver = driver_of("FWF")
        real = driver.worker.execute

        def execute(batch: ScheduledBatch, failing: int = failing, real: Any = real) -> Any:
            if batch.step_id != failing:
                return real(batch)
            return StepResult(batch.step_id, (RowResult("a", error="injected"),))

        driver.worker.execute = execute  # type: ignore[method-assign]
        failed = driver.add("a", prompt, 4)
        driver.run()
        assert failed.finish is not None
        assert failed.finish.kind == "error"
        assert driver.match(prompt).logical_tokens <= (failing - 1) * 16
        driver.worker.execute = real  # type: ignore[method-assign]
        driver.serve("b", prompt, 4)


def test_f15_a_canary_of_its_owner_is_in_every_digest() -> None:
    """The salt enters every digest: state of another conversation would change the output."""
    driver = driver_of("FWF", blocks=40)
    prompt = tokens(24, 10)
    for i in range(12):
        driver.serve(f"r{i}", [*prompt, i % 4 + 1], 3, salt=f"tenant {i % 3}")
        if i % 4 == 3:
            driver.free(driver.cache.tree.evict(i % 2, 3))
    assert len({tuple(driver.outcomes[f"r{i}"].tokens) for i in (0, 4, 8)}) == 3


def test_f19_nothing_is_found_before_its_computation_was_confirmed() -> None:
    driver = driver_of("FWF")
    prompt = tokens(64, 11)
    driver.add("a", prompt, 2)
    confirmed, real = [0], driver.worker.execute

    def execute(batch: ScheduledBatch) -> StepResult:
        assert driver.match(prompt).logical_tokens <= confirmed[0]
        result = real(batch)
        confirmed[0] = batch.rows[0].end
        return result

    driver.worker.execute = execute  # type: ignore[method-assign]
    driver.run()
    driver.check()
    assert driver.match(prompt).logical_tokens == 64


@pytest.mark.parametrize("group", ["entries", "index"])
def test_f24_an_index_without_its_entries_is_no_index(group: str) -> None:
    driver = driver_of("CC")
    prompt = tokens(24, 12)
    driver.serve("a", prompt, 1)
    driver.lose(prompt, group, [1, 3])
    done = driver.serve("b", [*prompt, 1], 3)
    assert done.report is not None
    assert done.report.repaired or done.report.recomputed
    match = driver.match(prompt)
    assert match.is_direct, "what was rebuilt or recomputed fits together again"


def test_f24_an_index_over_replaced_entries_is_not_resident() -> None:
    """The tree alone: entries of one page are written again, their old index stays behind."""
    schema = schema_of("CC")
    tree = RadixTree(schema)
    key = TokenKey(tokens(16, 15))
    lease = tree.lease(tree.match(Namespace(), key), 0)
    tables = [np.arange(4, dtype=np.int32) for _ in schema.groups]
    tree.publish(lease, key, 4, tables, Written(tree.stamps, 1), 16)
    entries, index = schema.index_of("entries"), schema.index_of("index")
    assert tree.match(Namespace(), key).resident(index).all()
    tree.drop(tree.match(Namespace(), key), entries, [1])
    again = [np.full(2, -1, dtype=np.int32) for _ in schema.groups]
    again[entries][1] = 9
    tree.restore(lease, 1, 2, again, Written(tree.stamps, 2))
    match = tree.match(Namespace(), key)
    assert match.resident(entries).tolist() == [True] * 4
    assert match.resident(index).tolist() == [True, False, True, True]


def test_f25_every_request_that_cannot_run_is_answered_once() -> None:
    driver = driver_of("FWF", max_queued_requests=1, max_running_requests=1)
    sent = {
        "long": ([1] * 2100, "prompt_too_long"),
        "empty": ([], "invalid_request"),
        "vocabulary": ([VOCAB], "invalid_request"),
        "negative": ([-1], "invalid_request"),
    }
    for rid, (prompt, _) in sent.items():
        outcome = driver.outcomes[rid] = Outcome(prompt, 1, "")
        driver.core.add_request(TokenizedRequest(rid, pack_ids(prompt), SamplingParams()))
        assert outcome.finish is None
    for i in range(4):
        driver.add(f"q{i}", tokens(8, i), 2)
    driver.run()
    for rid, (_, code) in sent.items():
        finish = driver.outcomes[rid].finish
        assert finish is not None
        assert (finish.kind, finish.code) == ("error", code)
    codes = [o.finish.code for o in driver.outcomes.values() if o.finish is not None]
    assert len(codes) == 8
    assert codes.count("refused") == 2, "two fit into the queue and the running places"


@pytest.mark.parametrize("position", [8, 20, 40])
def test_f26_a_lease_takes_only_the_window_it_needs_out_of_eviction(position: int) -> None:
    driver = driver_of("FWF")
    prompt = tokens(41, 16)
    driver.serve("a", prompt, 1)
    tree, group = driver.cache.tree, driver.schema.index_of("window")
    before = tree.evictable(group)
    lease = tree.lease(driver.match(prompt), position)
    needed = position // PAGE - (position - 6 + 1) // PAGE  # pages of the last 5 tokens
    assert before - tree.evictable(group) == needed
    driver.free(tree.release(lease))
    assert tree.evictable(group) == before


@pytest.mark.parametrize("short", ["full", "window"])
def test_f34_the_short_pool_is_named_and_evicted_from(short: str) -> None:
    schema = schema_of("FWF")
    sizes = tuple(12 if s.name == short else 200 for s in schema.groups)
    driver = Driver(schema, sizes, chunked_prefill_size=8, max_running_requests=4)
    for i in range(6):
        driver.serve(f"r{i}", tokens(30, 20 + i), 1)
    evicted = {name: pool["evicted"] for name, pool in driver.cache.pool_stats().items()}
    assert evicted[short] > 0
    if short == "window":
        assert evicted["full"] == 0, "history does not go for want of window blocks"
    for i in range(3):
        driver.add(f"p{i}", tokens(28, 40 + i), 8)
    driver.step()
    reasons = list(driver.core.stats()["blocked"].values())
    if reasons and any(r.startswith("blocks") for r in reasons):
        assert all(repr(short) in r for r in reasons if r.startswith("blocks"))
    driver.run()
    driver.check()


STAMP_PARTS = ("model_fingerprint", "version", "layout_id", "weights_epoch", "boundary")


@pytest.mark.parametrize("part", STAMP_PARTS)
def test_f35_a_difference_in_any_part_of_the_stamp_is_a_miss(part: str) -> None:
    """Weights, attention configuration (rope, window), dtype and layout, epoch, window boundary."""
    schema, table = schema_of("FWF"), StampTable()
    tree = RadixTree(schema, table.of_schema(schema))
    key = TokenKey(tokens(16, 13))
    lease = tree.lease(tree.match(Namespace(), key), 0)
    blocks = [np.arange(4, dtype=np.int32)] * schema.num_groups
    tree.publish(lease, key, 4, blocks, Written(tree.stamps, 1), 16)
    assert tree.match(Namespace(), key).is_direct
    for group in range(schema.num_groups):
        parts = {name: getattr(table[tree.stamps[group]], name) for name in STAMP_PARTS}
        parts[part] = 7 if part == "weights_epoch" else "another"
        other = list(tree.stamps)
        other[group] = table.intern(Stamp(**parts))
        before = tree.stamps
        tree.expect(other)
        match = tree.match(Namespace(), key)
        assert not match.resident(group).any()
        assert match.intersection()[0] == 0
        tree.expect(before)


def test_f35_another_adapter_is_another_namespace() -> None:
    driver = driver_of("FWF")
    prompt = tokens(24, 14)
    driver.serve("a", prompt, 1)
    other = driver.cache.tree.match(Namespace("", "adapter"), TokenKey(prompt))
    assert other.logical_pages == 0


def test_f35_a_backend_that_cannot_read_the_blocks_is_refused_before_any_hit() -> None:
    driver = driver_of("FWF")
    validity, groups = driver.cache.validity, driver.schema.groups
    good = [
        GroupEnv(layout_id=spec.layout_id, base_addresses=(4096,), block_stride=64, alignment=16)
        for spec in groups
    ]
    validity.place(good)
    prompt = tokens(42, 16)
    driver.serve("a", prompt, 1)
    assert driver.serve("b", prompt, 1).report.reused > 0
    for changes, said in (
        ({"layout_id": "other"}, "group 'window': the backend declares 'other'"),
        ({"base_addresses": (4096, 4104)}, "group 'window': its blocks are not aligned"),
        ({"block_stride": 72}, "group 'window': its blocks are not aligned"),
        ({"operators": frozenset({"gather"})}, "group 'window': the backend lacks window"),
    ):
        places = list(good)
        g = driver.schema.index_of("window")
        places[g] = replace(good[g], **changes)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=said):
            validity.place(places)
    validity.place(good)
