"""When an engine core tells what is new: at once to a stream, in few messages to who waits."""

from __future__ import annotations

import pytest

from statewise.runtime.engine.core import QUIET_INTERVAL
from statewise.runtime.messages import TokenDelta, TokenizedRequest, pack_ids
from statewise.runtime.sampling_params import SamplingParams
from support.engine import Driver, Outcome, make_schema

PROMPT = [3, 1, 4, 1, 5]
NUM_TOKENS = 100


def run(*, stream: bool, stop: tuple[str, ...] = (), interval: int = 1) -> list[TokenDelta]:
    """The deltas of one request; its tokens are those of a cold run."""
    driver = Driver(make_schema("FW", 4, 8), (40, 40), stream_interval=interval)
    driver.outcomes["r"] = Outcome(PROMPT, NUM_TOKENS, "")
    params = SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, stop=stop)
    driver.core.add_request(TokenizedRequest("r", pack_ids(PROMPT), params, stream=stream))
    deltas = []
    while driver.core.has_work():
        deltas += driver.step()
        assert not driver.core.is_stalled
    driver.check("r")
    assert deltas[0].sampling == params
    assert deltas[0].stream == stream
    assert all(delta.sampling is None for delta in deltas[1:])
    return deltas


@pytest.mark.parametrize(
    ("stream", "stop", "interval", "sizes"),
    [
        (True, (), 1, [1] * NUM_TOKENS),
        (True, (), 40, [1, 40, 40, 19]),
        (False, (), 1, [1, QUIET_INTERVAL, QUIET_INTERVAL, QUIET_INTERVAL, 3]),
        (False, (), 40, [1, QUIET_INTERVAL, QUIET_INTERVAL, QUIET_INTERVAL, 3]),
        (False, ("x",), 40, [1] * NUM_TOKENS),  # each token may complete a stop
    ],
)
def test_the_first_token_is_told_at_once_and_the_others_when_due(
    stream: bool, stop: tuple[str, ...], interval: int, sizes: list[int]
) -> None:
    deltas = run(stream=stream, stop=stop, interval=interval)
    assert [len(delta.token_ids) for delta in deltas] == sizes


def test_an_abort_tells_what_was_not_told_yet() -> None:
    driver = Driver(make_schema("F", 4, 8), (40,))
    outcome = driver.add("r", PROMPT, NUM_TOKENS)
    for _ in range(20):
        driver.step()
    assert len(outcome.tokens) == 1
    driver.core.abort("r")
    driver.run()
    assert outcome.tokens == driver.cold("r")[: len(outcome.tokens)]
    assert len(outcome.tokens) > 10
