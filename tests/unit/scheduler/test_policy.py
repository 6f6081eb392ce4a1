from __future__ import annotations

from statewise.runtime.messages import CacheOptions, TokenizedRequest, pack_ids
from statewise.runtime.sampling_params import SamplingParams
from statewise.runtime.scheduler.inflight import InflightPrefixes, common_prefix_len
from statewise.runtime.scheduler.policy import is_aged, order
from statewise.runtime.scheduler.request import Request


def make(
    rid: str,
    prompt: list[int] | None = None,
    *,
    arrival: float = 0.0,
    priority: int = 0,
    salt: str = "",
    exact: bool = False,
) -> Request:
    message = TokenizedRequest(
        rid,
        pack_ids(prompt or [1, 2, 3]),
        SamplingParams(),
        cache=CacheOptions(salt=salt, exact=exact),
        priority=priority,
    )
    return Request(message, max_new_tokens=4, seed=0, arrival=arrival)


def names(requests: list[Request]) -> str:
    return "".join(r.rid for r in requests)


MATCHED = {"a": 0, "b": 64, "c": 16}


def matched(request: Request) -> int:
    return MATCHED[request.rid]


def test_longest_prefix_goes_first() -> None:
    queue = [make(rid, arrival=i) for i, rid in enumerate("abc")]
    assert names(order(queue, "lpm", 3.0, 10.0, matched)) == "bca"
    assert names(order(queue, "fcfs", 3.0, 10.0, matched)) == "abc"


def test_whoever_waited_too_long_goes_before_everybody() -> None:
    queue = [make("a", arrival=0.0), make("b", arrival=5.0), make("c", arrival=0.5)]
    assert is_aged(queue[0], 10.2, 10.0)
    assert not is_aged(queue[1], 10.2, 10.0)
    assert names(order(queue, "lpm", 10.2, 10.0, matched)) == "abc"
    assert names(order(queue, "lpm", 10.6, 10.0, matched)) == "acb"


def test_priority_goes_before_prefix() -> None:
    queue = [make("a", priority=1), make("b"), make("c")]
    assert names(order(queue, "lpm", 0.0, 10.0, matched)) == "abc"


def test_common_prefix_len() -> None:
    assert common_prefix_len(make("a", [1, 2, 3]), make("b", [1, 2, 4, 5])) == 2
    assert common_prefix_len(make("a", [1, 2, 3]), make("b", [1, 2, 3, 5])) == 3


def test_a_prefill_in_flight_provides_whole_pages_below_the_reuse_limit() -> None:
    running = make("a", [7] * 40)
    inflight = InflightPrefixes(8, [running])
    waiting = make("b", [7] * 30)
    assert inflight.provider_of(waiting, 0) == (running, 24)
    assert inflight.provider_of(waiting, 24) is None, "the tree already has it"
    running.num_computed = 24
    assert inflight.provider_of(waiting, 0) is None, "it was published or evicted: do not wait"


def test_prefixes_of_other_salts_are_not_waited_for() -> None:
    inflight = InflightPrefixes(8, [make("a", [7] * 40)])
    assert inflight.provider_of(make("b", [7] * 40, salt="x"), 0) is None


def test_exact_requests_do_not_wait_for_what_they_will_not_be_given() -> None:
    """Where state may be approximate, they have a tree of their own; elsewhere all share one."""
    running, waiting = make("a", [7] * 40), make("b", [7] * 40, exact=True)
    assert InflightPrefixes(8, [running]).provider_of(waiting, 0) == (running, 32)
    inflight = InflightPrefixes(8, [running], exact_apart=True)
    assert inflight.provider_of(waiting, 0) is None
    inflight.add(make("c", [7] * 40, exact=True))
    provider = inflight.provider_of(waiting, 0)
    assert provider is not None
    assert provider[0].rid == "c"


def test_a_decoding_request_provides_nothing() -> None:
    running = make("a", [7] * 40)
    running.append(3)
    running.num_computed = 40
    assert running.is_decoding
    assert InflightPrefixes(8, [running]).provider_of(make("b", [7] * 40), 0) is None
