"""Fault kinds of state that belongs to one position: tails, running state, partly filled pages.

Each test is named after the kind's number (docs/faults.md) and fails when the guard is removed.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from statewise.radix.schema import CacheSchema, GroupKind
from statewise.runtime.scheduler.batch import BatchRow, RowKind, ScheduledBatch
from support.digest import U64
from support.digest_worker import DigestWorker
from support.engine import VOCAB, Driver
from support.sim_schema import make_schema

PAGE = 4
SHAPES = ("FR", "RWF", "CC", "HFC")


def tokens(n: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, VOCAB) for _ in range(n)]


def schema_of(shape: str) -> CacheSchema:
    return make_schema(shape, PAGE, 5, ratio=2, long_ratio=4)


def driver_of(shape: str, **args: object) -> Driver:
    schema = schema_of(shape)
    settings = {"chunked_prefill_size": 16, "checkpoint_interval": 8, **args}
    return Driver(schema, (64,) * schema.num_groups, **settings)


def state_at(schema: CacheSchema, prompt: list[int], group: int) -> U64:
    """[layers, slots] the group's block after a lone run of exactly `prompt`, in one chunk."""
    pages = -(-len(prompt) // schema.page_size)
    worker = DigestWorker(schema, (pages + 1,) * schema.num_groups, VOCAB)
    tables = tuple(
        np.zeros(1, np.int32) if s.kind.is_snapshot else np.arange(pages, dtype=np.int32)
        for s in schema.groups
    )
    row = BatchRow(
        "cold",
        RowKind.PREFILL,
        0,
        np.array(prompt, np.int32),
        tables,
        (0,) * schema.num_groups,
        (1 << schema.num_groups) - 1,
        schema.num_layers,
    )
    worker.execute(ScheduledBatch(1, (row,)))
    return worker.blocks(group)[:, 0].copy()


def snapshots_of(driver: Driver, prompt: list[int]) -> list[tuple[int, int, int]]:
    """(position, group, block) of every snapshot the tree has along a prompt."""
    return [
        (s.position, held.group, held.block)
        for s in driver.match(prompt).snapshots
        for held in s.blocks
        if driver.schema.groups[held.group].kind.is_snapshot
    ]


def assert_snapshots_are_cold_states(driver: Driver, *prompts: list[int]) -> int:
    checked = 0
    for prompt in prompts:
        for position, group, block in snapshots_of(driver, prompt):
            cold = state_at(driver.schema, prompt[:position], group)
            held = driver.worker.blocks(group)[:, block]
            assert np.array_equal(held, cold), f"group {group} at {position}"
            checked += 1
    return checked


@pytest.mark.parametrize("shape", SHAPES)
def test_f3_a_snapshot_at_p_is_a_cold_runs_state_at_exactly_p(shape: str) -> None:
    driver = driver_of(shape)
    prompt = tokens(43, 1)
    done = driver.serve("a", prompt, 9)
    whole = prompt + done.tokens
    assert assert_snapshots_are_cold_states(driver, whole) >= 3


@pytest.mark.parametrize("shape", SHAPES)
def test_f16_a_snapshot_does_not_change_while_its_request_goes_on(shape: str) -> None:
    driver = driver_of(shape)
    prompt = tokens(24, 2)
    driver.add("a", prompt, 20)
    while driver.outcomes["a"].finish is None:
        driver.step()
        assert_snapshots_are_cold_states(driver, prompt + driver.outcomes["a"].tokens)
    driver.check()


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["FR", "CC"])
def test_f17_a_snapshot_serves_its_exact_position_and_no_other(shape: str) -> None:
    driver = driver_of(shape, checkpoint_interval=1000)
    prompt = tokens(30, 3)
    driver.serve("a", prompt, 1)  # snapshots at 28 and at the exact end
    found = {position for position, _, _ in snapshots_of(driver, prompt)}
    match = driver.match(prompt)
    group = next(g for g, s in enumerate(driver.schema.groups) if s.kind.is_snapshot)
    for page in range(1, match.logical_pages + 1):
        assert match.resumable_at(group, page * PAGE) == (page * PAGE in found)
    for length in range(1, 30):  # every way of diverging from the cached prompt
        driver.serve(f"d{length}", prompt[:length] + tokens(3, 100 + length), 2)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", [5, 6, 7, 8])
def test_f18_a_partly_filled_page_is_copied_before_anybody_writes_it(
    shape: str, length: int
) -> None:
    driver = driver_of(shape)
    prompt = tokens(length, 4)
    done = driver.serve("a", prompt, 6)
    told = prompt + done.tokens[:-1]  # the last token's state was never computed
    held = [
        (g, b)
        for s in driver.match(told).snapshots
        for g, b in [(x.group, x.block) for x in s.blocks]
    ]
    before = [driver.worker.blocks(g)[:, b].copy() for g, b in held]
    forks = [prompt + done.tokens + tokens(3, seed) for seed in (5, 6, 7)]
    for i, fork in enumerate(forks):
        driver.add(f"fork{i}", fork, 8)
    driver.run()
    driver.check()
    for (g, b), old in zip(held, before, strict=True):
        assert np.array_equal(driver.worker.blocks(g)[:, b], old), f"group {g}, block {b}"


@pytest.mark.parametrize("shape", SHAPES)
def test_f28_snapshots_of_a_packed_batch_equal_those_of_lone_requests(shape: str) -> None:
    driver = driver_of(shape, chunked_prefill_size=48)
    prompts = [tokens(n, 10 + n) for n in (9, 14, 23, 31, 7)]
    for i, prompt in enumerate(prompts):
        driver.add(f"r{i}", prompt, 3)
    driver.run()
    driver.check()
    rows = [len(batch.rows) for batch in driver.batches]
    assert max(rows) > 1, "the scene packs several prefills into one step"
    whole = [p + driver.outcomes[f"r{i}"].tokens for i, p in enumerate(prompts)]
    assert assert_snapshots_are_cold_states(driver, *whole) >= len(prompts)


@pytest.mark.parametrize("shape", [*SHAPES, "FWF", "KFK", "FSF"])
def test_f29_every_suffix_length_after_a_hit_equals_a_cold_run(shape: str) -> None:
    driver = driver_of(shape)
    prompt = tokens(32, 8)
    driver.serve("a", prompt, 1)
    for suffix in range(1, 18):  # one token .. a whole chunk .. a chunk and one
        done = driver.serve(f"s{suffix}", prompt + tokens(suffix, 50 + suffix), 2)
        assert done.report is not None
        assert done.report.reused > 0


def test_f7_a_shared_prefix_with_unique_tails_is_reused_whole() -> None:
    driver = driver_of("FR", checkpoint_interval=1000)
    shared = tokens(24, 20)
    for i in range(3):
        done = driver.serve(f"r{i}", shared + tokens(13, 30 + i), 2)
    assert done.report is not None
    assert done.report.reused >= 24, "the second request made a checkpoint where they part"


def test_f3_a_request_that_ends_before_it_took_its_state_in_hands_nothing_over() -> None:
    """Its repair has run, its working blocks still hold what that left in them."""
    driver = driver_of("WFR", checkpoint_interval=8)
    prompt = tokens(40, 9)
    driver.serve("a", prompt, 1)
    driver.lose(prompt, "window")
    driver.add("b", [*prompt, 5], 4)
    request = driver.core._requests["b"]
    for _ in range(20):
        driver.step()
        if request.sequence is not None and not request.replays:
            break
    assert request.sequence is not None
    assert request.sequence.standing is not None, "what is tested"
    driver.lose(prompt, "state")
    driver.core.abort("b")
    driver.run()
    assert_snapshots_are_cold_states(driver, prompt)
    driver.serve("c", [*prompt, 5], 4)


def test_a_resume_inside_a_page_is_reported_as_matched() -> None:
    driver = driver_of("FR")
    done = driver.serve("a", tokens(29, 1), 3)
    more = driver.serve("b", [*tokens(29, 1), *done.tokens[:2], 5, 6, 7], 2)
    assert more.report is not None
    assert (more.report.matched, more.report.reused, more.report.recomputed) == (31, 31, 0)
    assert more.report.computed == more.report.prompt - 31
    assert more.report.reason == "all 31 matched tokens were used as they stood"
    assert driver.core.counters.recomputed_tokens == 0


@pytest.mark.parametrize("shape", ["FR", "CC", "HFC"])
def test_f7_requests_that_arrive_together_compute_their_shared_prefix_once(shape: str) -> None:
    """Also where the first one's whole prompt was to run in the step in which they met."""
    driver = driver_of(shape, chunked_prefill_size=64, checkpoint_interval=1000)
    shared = tokens(24, 40)
    rids = [f"r{i}" for i in range(4)]
    for i, rid in enumerate(rids):
        driver.add(rid, shared + tokens(9, 41 + i), 2)
    driver.run()
    driver.check()
    computed = sum(
        row.end - row.start for b in driver.batches for row in b.rows if row.kind is RowKind.PREFILL
    )
    assert computed == 24 + 4 * 9
    assert_snapshots_are_cold_states(driver, *(driver.outcomes[rid].prompt for rid in rids))
    driver.quiesce()


def test_f27_snapshots_stay_within_their_pool() -> None:
    schema = schema_of("FR")
    sizes = tuple(4 if s.kind.is_snapshot else 400 for s in schema.groups)
    driver = Driver(schema, sizes, chunked_prefill_size=16, checkpoint_interval=4)
    for i in range(12):
        driver.serve(f"r{i}", tokens(60, i), 3)
    group = next(g for g, s in enumerate(schema.groups) if s.kind is GroupKind.RECURRENT)
    assert len(driver.cache.tree.blocks(group)) <= 4
    driver.quiesce()
