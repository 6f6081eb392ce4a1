"""Bodies that are not JSON, or not the fields that were meant, are refused with the reason."""

from __future__ import annotations

import pytest

from statewise.runtime.errors import InvalidRequestError
from statewise.runtime.sampling_params import normalized
from statewise.runtime.server.http.json_io import decode, field_names
from statewise.runtime.server.http.native import GenerateBody, _rids, check_names


@pytest.mark.parametrize(
    "text",
    [rb"\ud800", rb"a\uDC00b", rb"\ud83dx", rb"\ude00\ud83d", rb"\\\ud800", rb"\ud83d\u0041"],
)
def test_half_of_a_surrogate_pair_is_called_that(text: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="half of a surrogate pair"):
        decode(b'{"text": "%b"}' % text, GenerateBody)


@pytest.mark.parametrize(
    ("text", "means"),
    [
        (rb"\ud83d\ude00", "\U0001f600"),
        (rb"\\ud800", "\\ud800"),
        (rb"\uD83D\uDE00x", "\U0001f600x"),
    ],
)
def test_whole_pairs_and_backslashes_are_text(text: bytes, means: str) -> None:
    assert decode(b'{"text": "%b"}' % text, GenerateBody).text == means


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"text": "a', "truncated"),
        (rb'{"text": "\\ud800', "truncated"),
        (rb'{"text": "\ud83d\ude00', "truncated"),
        (b'{"text": NaN}', "NaN and Infinity are not JSON"),
        (b'{"text": 3}', "str"),
    ],
)
def test_other_mistakes_are_named_as_before(body: bytes, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says) as caught:
        decode(body, GenerateBody)
    assert "surrogate" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("temperature", "'temperature' belongs into 'sampling_params'"),
        ("max_new_tokens", "belongs into 'sampling_params'"),
        ("return_logprobs", "did you mean 'return_logprob'"),
        ("texts", "did you mean 'text'"),
        ("sampling_param", "did you mean 'sampling_params'"),
    ],
)
def test_fields_that_would_have_changed_the_answer_are_refused(name: str, says: str) -> None:
    body = b'{"text": "a", "%b": 1}' % name.encode()
    with pytest.raises(InvalidRequestError, match=says):
        check_names(field_names(body))


def test_fields_of_other_servers_are_accepted() -> None:
    """SGLang's, which mean nothing here."""
    names = [
        "text", "input_ids", "input_embeds", "image_data", "modalities", "log_metrics",
        "return_hidden_states", "session_params", "custom_logit_processor", "bootstrap_host",
        "data_parallel_rank", "conversation_id", "extra_key", "background", "custom_labels",
    ]  # fmt: skip
    check_names(names)
    assert field_names(b"[1]") == field_names(b"{") == []


def test_empty_names_and_stops_are_refused() -> None:
    for rid in ("", ["a", ""]):
        with pytest.raises(InvalidRequestError, match="'rid' is empty"):
            _rids(rid, 1 if isinstance(rid, str) else 2)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="stop"):
        normalized({"stop": ["a", ""]}, 100)
    assert normalized({"stop": ""}, 100).stop == (), "no stop at all, as clients send it"
