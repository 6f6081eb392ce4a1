"""What the two OpenAI routes share: common fields, how they become sampling parameters, usage.

Fields that mean nothing here are accepted and ignored, as clients send them; those that would
change the answer if ignored are refused. null means default everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from statewise.runtime.errors import InvalidRequestError
from statewise.runtime.messages import LogprobEntry
from statewise.runtime.sampling_params import SamplingParams, normalized
from statewise.runtime.server.http.collect import Collector

Stop = str | list[str]


class StreamOptions(msgspec.Struct):
    """What a stream holds beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class OpenAIBody(msgspec.Struct, kw_only=True):
    """Fields of both routes; the second half are extensions."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stop | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    response_format: dict[str, Any] | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: Stop | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | dict[str, Any] | None = None
    rid: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    checkpoint: bool | None = None
    exact: bool | None = None


_SAME_NAME = (
    "temperature", "top_p", "n", "stop", "presence_penalty", "frequency_penalty", "logit_bias",
    "top_k", "min_p", "repetition_penalty", "stop_token_ids", "stop_regex", "ignore_eos",
    "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "regex", "ebnf",
)  # fmt: skip
ANY_JSON_OBJECT = '{"type": "object"}'


def sampling_of(
    body: OpenAIBody, max_tokens: int, vocab_size: int, grammar: dict[str, str] | None = None
) -> SamplingParams:
    """Turn a body into sampling parameters; `grammar` overrides what the body asks.

    Raises InvalidRequestError naming the field.
    """
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SAME_NAME}
    fields["max_new_tokens"] = max_tokens
    fields["min_new_tokens"] = body.min_tokens
    fields["sampling_seed"] = None if body.seed is None else body.seed % (1 << 63)
    fields.update(grammar if grammar is not None else _grammar(body))
    return normalized(fields, vocab_size)


def _grammar(body: OpenAIBody) -> dict[str, str]:
    """Return the grammar that `json_schema` or `response_format` asks for."""
    asked = response_format_schema(body.response_format)
    if body.json_schema is not None:
        if asked is not None:
            raise InvalidRequestError("'json_schema' and 'response_format' exclude each other")
        asked = schema_text(body.json_schema)
    return {} if asked is None else {"json_schema": asked}


def schema_text(schema: str | dict[str, Any]) -> str:
    """Return a JSON schema as text."""
    return schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()


def response_format_schema(fmt: dict[str, Any] | None) -> str | None:
    """Return the JSON schema that a `response_format` stands for; None: free text."""
    if fmt is None or fmt.get("type") in (None, "text"):
        return None
    if fmt["type"] == "json_object":
        return ANY_JSON_OBJECT
    if fmt["type"] == "json_schema":
        wrapped = fmt.get("json_schema")
        schema = wrapped.get("schema") if isinstance(wrapped, dict) else None
        if not isinstance(schema, dict):
            raise InvalidRequestError("'response_format.json_schema.schema' must be an object")
        return schema_text(schema)
    raise InvalidRequestError(
        f"'response_format.type' is {fmt['type']!r}; it must be text, json_object or json_schema"
    )


def includes_usage(body: OpenAIBody) -> bool:
    """Whether a stream ends with a chunk of usage."""
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def finish_word(collector: Collector) -> str | None:
    """Return the finish reason as OpenAI spells it."""
    return collector.finish_kind  # stop | length | abort: the same words


def matched_stop(collector: Collector) -> str | int | None:
    """Return the stop string or token id that ended the text (an extension)."""
    finish = collector.answer.finish
    return None if finish is None else finish.matched


def usage_of(group: Sequence[Collector], samples: int) -> dict[str, Any]:
    """Usage of a group: each prompt counted once, whatever the number of its samples."""
    firsts = group[::samples]
    prompt = sum(c.answer.usage.prompt_tokens for c in firsts)
    completion = sum(c.answer.usage.completion_tokens for c in group)
    cached = sum(c.answer.usage.cached_tokens for c in firsts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def token_text(collector: Collector, token_id: int) -> str:
    """Return a token's text, for log probabilities."""
    return collector.answer.token_texts.get(token_id, "")


def top_pairs(collector: Collector, entry: LogprobEntry) -> list[tuple[str, float]]:
    """Return the alternatives of one position as (text, logprob)."""
    return [(token_text(collector, token_id), logprob) for logprob, token_id in entry.top]
