from __future__ import annotations

from itertools import product

import pytest

from statewise.runtime.messages import LogprobOptions, TokenizedRequest, pack_ids
from statewise.runtime.sampling_params import SamplingParams
from statewise.runtime.scheduler.request import TRANSITIONS, Request, RequestStatus

EOS = frozenset({0})


def make(max_new: int = 4, logprob: LogprobOptions | None = None, **sampling: object) -> Request:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    message = TokenizedRequest("r", pack_ids([5, 6, 7]), params, logprob or LogprobOptions())
    return Request(message, max_new_tokens=max_new, seed=0, arrival=0.0)


@pytest.mark.parametrize(("old", "new"), list(product(RequestStatus, repeat=2)))
def test_every_change_of_status_is_in_the_table_or_refused(
    old: RequestStatus, new: RequestStatus
) -> None:
    request = make()
    request.status = old
    if (old, new) in TRANSITIONS:
        request.become(new)
        assert request.status is new
    else:
        with pytest.raises(AssertionError, match=f"{old} -> {new}"):
            request.become(new)


def test_nothing_follows_the_end() -> None:
    assert not any(old is RequestStatus.FINISHED for old, _ in TRANSITIONS)


@pytest.mark.parametrize(
    ("sampling", "token", "kind", "matched"),
    [
        ({}, 0, "stop", 0),
        ({"ignore_eos": True}, 0, None, None),
        ({"stop_token_ids": (9,)}, 9, "stop", 9),
        ({"stop_token_ids": (9,), "ignore_eos": True}, 9, "stop", 9),
        ({"min_new_tokens": 2}, 0, None, None),
        ({}, 8, None, None),
    ],
)
def test_finish_reasons(
    sampling: dict[str, object], token: int, kind: str | None, matched: int | None
) -> None:
    request = make(**sampling)
    request.append(token)
    reason = request.finish_reason_after(token, EOS)
    assert (reason and reason.kind) == kind
    assert (reason and reason.matched) == matched


def test_length_ends_a_request() -> None:
    request = make(max_new=1)
    request.append(8)
    reason = request.finish_reason_after(8, EOS)
    assert reason is not None
    assert reason.kind == "length"


def test_reuse_stops_before_the_first_wanted_logit() -> None:
    assert make().reuse_limit == 2
    assert make(logprob=LogprobOptions(True, 1)).reuse_limit == 1
    done = make(logprob=LogprobOptions(True, 1))
    done.prompt_logprobs_done = True
    assert done.reuse_limit == 2
