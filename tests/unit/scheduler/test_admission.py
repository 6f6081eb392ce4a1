"""F34: each pool is counted alone, and the short one is named."""

from __future__ import annotations

import pytest

from statewise.runtime.cache.sequence import Sequence
from statewise.runtime.messages import TokenizedRequest, pack_ids
from statewise.runtime.sampling_params import SamplingParams
from statewise.runtime.scheduler.admission import Admission, OutputReserve, group_need
from statewise.runtime.scheduler.request import Request
from support.engine import make_schema

PAGE, WINDOW, CHUNK = 4, 8, 8
SCHEMA = make_schema("FW", PAGE, WINDOW)


def make(prompt_len: int, max_new: int = 0) -> Request:
    message = TokenizedRequest("r", pack_ids([1] * prompt_len), SamplingParams())
    request = Request(message, max_new_tokens=max_new, seed=0, arrival=0.0)
    request.sequence = Sequence(SCHEMA, 64, None)  # type: ignore[arg-type]
    return request


def admission(full: int, window: int) -> Admission:
    return Admission(SCHEMA, (full, window), 0.0, CHUNK)


def test_a_window_group_needs_its_window_and_a_chunk_however_long_the_prompt() -> None:
    full, window = SCHEMA.groups
    assert group_need(full, 100, CHUNK, PAGE) == 25
    assert group_need(window, 100, CHUNK, PAGE) == (WINDOW + CHUNK) // PAGE + 1
    assert group_need(window, 3, CHUNK, PAGE) == 1


@pytest.mark.parametrize(
    ("available", "short"), [((4, 50), "full"), ((50, 2), "window"), ((50, 50), None)]
)
def test_the_short_group_is_named(available: tuple[int, int], short: str | None) -> None:
    running = [make(4)]
    found = admission(100, 100).shortage(make(40), running, available)
    assert (found and found.group) == short


def test_promises_to_running_requests_are_kept() -> None:
    counts = admission(100, 100)
    counts.reserve.share = 1.0
    running = make(4, max_new=36)
    assert counts.promised(0, [running]) == 11
    assert counts.shortage(make(16), [running], (15, 100)) is not None
    assert counts.shortage(make(16), [running], (16, 100)) is None


def test_alone_everything_that_fits_at_all_is_admitted() -> None:
    counts = Admission(SCHEMA, (11, 11), 0.5, CHUNK)
    assert counts.shortage(make(40, max_new=400), [], (11, 11)) is None
    assert counts.shortage(make(40), [make(4)], (11, 11)) is not None


def test_capacity_is_the_smallest_history_pool() -> None:
    assert admission(10, 100).capacity_tokens() == 40
    assert admission(10, 100).limiting_pool() == "full"


def test_the_output_reserve_grows_with_preemptions_and_decays() -> None:
    reserve = OutputReserve()
    start = reserve.share
    reserve.preempted()
    assert reserve.share > start
    for _ in range(10_000):
        reserve.step()
    assert 0.0 < reserve.share < start
