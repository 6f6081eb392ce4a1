"""Whatever was admitted ends, also where memory is as small as a start allows."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from statewise.radix.need import protected_pages, trailing_pages
from statewise.radix.schema import GroupKind
from statewise.runtime.cache.lookup import Lookup
from statewise.runtime.messages import CacheOptions
from statewise.runtime.scheduler.batch import RowKind, ScheduledBatch, StepResult
from statewise.runtime.scheduler.scheduler import LOOK_EVERY, MAX_BYPASS
from support.engine import VOCAB, Driver, make_schema
from support.radix_oracle import group

PAGE = 4


def tokens(n: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, VOCAB) for _ in range(n)]


@pytest.mark.parametrize("shape", ["FW", "FK"])
def test_a_deterministic_request_does_not_hold_the_window_of_its_prompt(shape: str) -> None:
    """Generated tokens are not published then: the prompt's last window is nobody's need."""
    schema = make_schema(shape, PAGE, 64)
    least = 64 // PAGE + 2 + 8 // PAGE + 1
    driver = Driver(schema, (64, least), chunked_prefill_size=8, deterministic=True)
    driver.add("a", tokens(80, 1), 80)
    driver.run(max_steps=300)
    driver.check()
    driver.quiesce()


@pytest.mark.parametrize("kind", [GroupKind.WINDOW, GroupKind.CHUNKED])
def test_what_is_protected_is_what_may_still_be_read(kind: GroupKind) -> None:
    """Far past the last page in the tree nothing of it is held, but for a checkpoint's sake."""
    spec = group("w", kind, window=8)
    for position in range(64):
        for num_pages in range(position // PAGE + 1):
            lo = protected_pages(spec, position, num_pages, PAGE)[1]
            read = trailing_pages(spec, position, PAGE)[0]
            boundary = position // PAGE
            kept = trailing_pages(spec, boundary * PAGE, PAGE)[0]
            expected = min(read, kept) if num_pages == boundary else read
            assert lo == min(expected, num_pages), (position, num_pages)


def test_a_rebuilds_old_blocks_do_not_take_the_place_of_the_answer() -> None:
    """A long history on several nodes is rebuilt; the answer then needs every block there is."""
    driver = Driver(make_schema("FK", PAGE, 12), (24, 16), chunked_prefill_size=8)
    prompt = tokens(64, 2)
    for length in (64, 44, 36):
        driver.serve(f"fork{length}", [*prompt[:length], 1], 1)
    match = driver.match(prompt)
    assert len(match.nodes) > 1, "on one node the old blocks would be free at once"
    driver.cache.tree.mark_invalid(match, 0, dict.fromkeys(range(8), 1))
    driver.add("b", prompt, 24)
    driver.run(max_steps=200)
    driver.check()
    outcome = driver.outcomes["b"]
    assert outcome.report is not None
    assert outcome.report.level == "rebuild", "what is tested"
    driver.quiesce()


def test_a_request_that_cannot_begin_from_its_hit_begins_without() -> None:
    """The state it would start from and the state it works in do not both fit."""
    driver = Driver(make_schema("FR", PAGE, 4), (16, 1), chunked_prefill_size=8)
    prompt = tokens(16, 3)
    driver.serve("a", prompt, 1)
    driver.add("b", [*prompt, 5, 6], 3)
    driver.run(max_steps=50)
    driver.check()
    driver.quiesce()


def test_deterministic_replays_are_cut_at_whole_chunks_whatever_else_runs() -> None:
    """A prompt's cold run computes whole aligned chunks, so what is made exact again must too."""
    chunk = 16
    driver = Driver(
        make_schema("FWF", PAGE, 24), (64, 64), chunked_prefill_size=chunk, deterministic=True
    )
    prompt = tokens(96, 4)
    driver.serve("a", prompt, 1)
    driver.lose(prompt, "window")
    driver.add("guided", tokens(4, 5), 40)
    driver.step()
    driver.add("b", prompt, 2)
    run = driver.worker.execute

    def execute(batch: ScheduledBatch) -> StepResult:
        """Once "b" has begun, a grammar leaves the other request no choice for a while."""
        result = run(batch)
        begun = any(row.request_id == "b" for row in batch.rows)
        rows = [
            replace(row, forced_ids=(7,) * 6) if row.request_id == "guided" and begun else row
            for row in result.rows
        ]
        return replace(result, rows=tuple(rows))

    driver.worker.execute = execute  # type: ignore[method-assign]
    driver.run()
    driver.check("b")
    replays = [r for b in driver.batches for r in b.rows if r.kind is RowKind.REPLAY]
    assert len(replays) > 1, "what is tested"
    assert all(row.start % chunk == 0 and row.end % chunk == 0 for row in replays)


def test_a_deterministic_prompts_last_window_is_kept_while_its_answer_grows() -> None:
    """It is nobody's need any more, and yet what the next turn resumes from."""
    schema = make_schema("FW", PAGE, 24)
    driver = Driver(schema, (200, 30), chunked_prefill_size=8, deterministic=True)
    prompt = tokens(40, 6)
    driver.add("a", prompt, 60)
    for _ in range(30):
        driver.step()
    driver.add("other", tokens(120, 7), 4)  # streams more through the window pool than it has
    driver.run()
    done = driver.serve("b", [*prompt, 1, 2], 1)
    assert done.report is not None
    assert (done.report.matched, done.report.reused) == (40, 40)


def test_without_a_cache_nobody_waits_for_anothers_prefix() -> None:
    driver = Driver(make_schema("FW", PAGE, 8), (64, 64), disable_radix_cache=True)
    prompt = tokens(40, 8)
    driver.add("a", prompt, 2)
    driver.add("b", prompt, 2)
    driver.step()
    assert [row.request_id for row in driver.batches[0].rows] == ["a", "b"]
    driver.run()
    driver.check()


def test_a_question_about_reuse_is_answered_as_a_request_would_be() -> None:
    driver = Driver(
        make_schema("FW", PAGE, 6), (64, 64), chunked_prefill_size=16, deterministic=True
    )
    prompt = tokens(40, 9)
    driver.serve("a", prompt, 3)
    asked = [*prompt[:30], *tokens(9, 10)]
    told = driver.core.match(np.array(asked, dtype=np.int32), CacheOptions())
    done = driver.serve("b", asked, 2)
    assert done.report is not None
    assert told["reused"] == done.report.reused == 16


def test_a_step_looks_up_few_of_those_who_wait() -> None:
    """Every step changes the tree; a queue that is short of blocks is not planned anew for it."""
    driver = Driver(make_schema("FW", 1, 8), (128, 160), chunked_prefill_size=64)
    driver.add("running", tokens(40, 11), 80)
    driver.step()
    for i in range(30):
        driver.add(f"w{i}", tokens(60, 12 + i), 4)
    driver.step()
    lookup, num_lookups = driver.cache.lookup, 0

    def counted(*args: Any, **kwargs: Any) -> Lookup:
        nonlocal num_lookups
        num_lookups += 1
        return lookup(*args, **kwargs)

    driver.cache.lookup = counted  # type: ignore[method-assign]
    for _ in range(32):
        driver.step()
    assert len(driver.core.scheduler.waiting) == 30, "what is tested"
    assert num_lookups <= 32 * (MAX_BYPASS + 1) + 30 * (32 // LOOK_EVERY + 1)
    driver.run()
    driver.check()
