"""The checks every door shares, and above all: nothing a message can hold passes unchecked."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from statewise.runtime.errors import InvalidRequestError
from statewise.runtime.messages import (
    CacheOptions,
    GenerateRequest,
    LogprobOptions,
    pack_ids,
    unpack_ids,
)
from statewise.runtime.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from statewise.runtime.server import requests as checks

VOCAB = 100
TEXT = GenerateRequest("r", SamplingParams(), text="x")


def replaced(**fields: Any) -> GenerateRequest:
    return msgspec.structs.replace(TEXT, **fields)


def test_a_good_request_passes_unchanged() -> None:
    assert checks.checked_request(TEXT, VOCAB) == TEXT
    chat = b'{"messages": [{"role": "user", "content": "x"}], "continue": true}'
    checked = checks.checked_request(replaced(text=None, chat=chat), VOCAB)
    assert checked.chat is not None
    assert msgspec.json.decode(checked.chat) == {
        "messages": [{"role": "user", "content": "x"}],
        "tools": None, "continue": True, "generation_prompt": True, "variables": {},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text": None}, "exactly one"),
        ({"chat": b"{}"}, "exactly one"),
        ({"text": None, "input_ids": b"abc"}, "int32"),
        ({"text": None, "input_ids": b""}, "at least one"),
        ({"text": None, "input_ids": pack_ids([VOCAB])}, "vocabulary"),
        ({"text": None, "input_ids": pack_ids([-1])}, "vocabulary"),
        ({"text": None, "chat": b"nonsense"}, "'chat'"),
        ({"text": None, "chat": b"\xff"}, "'chat'"),
        ({"text": None, "chat": b"{}"}, "messages"),
        ({"text": None, "chat": b'{"messages": []}'}, "empty"),
        ({"text": None, "chat": b'{"messages": [{"content": "x"}]}'}, "role"),
        ({"text": None, "chat": b'{"messages": [' + b"[" * 50_000}, "'chat'"),
        ({"rid": "r" * 257}, "rid"),
        ({"priority": 1 << 31}, "priority"),
        ({"sampling": SamplingParams(temperature=float("nan"))}, "temperature"),
        ({"sampling": SamplingParams(n=0)}, "'n'"),
        ({"sampling": SamplingParams(stop=("x" * 5000,))}, "stop"),
        ({"sampling": SamplingParams(logit_bias=((VOCAB, 1.0),))}, "logit_bias"),
        ({"logprob": LogprobOptions(True, start=-2)}, "logprob_start_len"),
        ({"logprob": LogprobOptions(True, top=MAX_TOP_LOGPROBS + 1)}, "top log"),
        ({"logprob": LogprobOptions(True, token_ids=(VOCAB,))}, "token_ids_logprob"),
        ({"logprob": LogprobOptions(True, token_ids=tuple(range(99)) * 2)}, "more than"),
        ({"cache": CacheOptions(adapter="a")}, "adapter"),
        ({"cache": CacheOptions(salt="s" * 1025)}, "cache_salt"),
    ],
)
def test_a_bad_request_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        checks.checked_request(replaced(**fields), VOCAB)


@pytest.mark.slow
@given(
    st.builds(
        SamplingParams,
        max_new_tokens=st.integers(-5, 1 << 40),
        min_new_tokens=st.integers(-5, 5),
        temperature=st.floats(),
        top_p=st.floats(),
        top_k=st.integers(-3, 3),
        min_p=st.floats(),
        repetition_penalty=st.floats(),
        stop=st.lists(st.text(max_size=3), max_size=3).map(tuple),
        stop_token_ids=st.lists(st.integers(-2, VOCAB + 2), max_size=3).map(tuple),
        sampling_seed=st.none() | st.integers(-2, 1 << 63),
        n=st.integers(-1, 200),
        regex=st.none() | st.text(max_size=3),
        ebnf=st.none() | st.text(max_size=3),
    )
)
def test_parameters_that_pass_are_in_range(sampling: SamplingParams) -> None:
    try:
        checked = checks.checked_request(replaced(sampling=sampling), VOCAB).sampling
    except InvalidRequestError:
        return
    assert 0 <= checked.min_new_tokens <= checked.max_new_tokens
    assert 0 <= checked.temperature < float("inf")
    assert 0 < checked.top_p <= 1
    assert 0 <= checked.min_p <= 1
    assert 0 < checked.repetition_penalty <= 2
    assert 1 <= checked.n <= 128
    assert all(0 <= i < VOCAB for i in checked.stop_token_ids)
    assert checked.regex is None or checked.ebnf is None


@given(st.lists(st.integers(-3, VOCAB + 3), max_size=8))
def test_ids_that_pass_are_in_the_vocabulary(ids: list[int]) -> None:
    try:
        packed = checks.checked_ids("input_ids", ids, VOCAB)
    except InvalidRequestError:
        assert not ids or min(ids) < 0 or max(ids) >= VOCAB
        return
    assert unpack_ids(packed).tolist() == ids
    assert unpack_ids(packed).dtype == np.int32


def test_samples_have_seeds_of_their_own() -> None:
    two = replaced(sampling=SamplingParams(n=2, sampling_seed=(1 << 63) - 1))
    out = checks.fan_out([two, TEXT])
    assert [(r.sampling.n, r.sampling.sampling_seed) for r in out] == [
        (1, (1 << 63) - 1), (1, 0), (1, None),
    ]  # fmt: skip
    many = [replaced(sampling=SamplingParams(n=128))] * 33
    with pytest.raises(InvalidRequestError, match="4224 samples"):
        checks.fan_out(many)
