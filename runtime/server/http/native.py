"""POST /generate: the native API (docs/api.md).

Exactly one of `text` and `input_ids`; a list of either is a batch and is answered with a list.
Unknown fields are accepted, as clients written for other servers send them. Those that would have
changed the answer are not: unknown sampling parameters, sampling parameters beside
`sampling_params`, and names that are nearly a field's.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from statewise.runtime.clock import fresh_id
from statewise.runtime.errors import InvalidRequestError
from statewise.runtime.messages import GenerateRequest, LogprobOptions
from statewise.runtime.sampling_params import SamplingParams, normalized
from statewise.runtime.server import requests as checks
from statewise.runtime.server.http.collect import run_all, run_stream
from statewise.runtime.server.http.json_io import JsonResponse, decode, field_names, read_body
from statewise.runtime.server.http.sse import Events, SseResponse, unless_gone
from statewise.runtime.server.service import Service

T = TypeVar("T")
SAMPLING_FIELDS = SamplingParams.__struct_fields__
NEARLY = 0.85  # of a field's name: a slip, and not another server's field


class GenerateBody(msgspec.Struct):
    """The body's fields that mean something here."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    token_ids_logprob: list[int | list[int]] | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    checkpoint: bool | None = None
    exact: bool | None = None
    lora_path: str | list[str | None] | None = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None


async def generate(request: Request) -> Response:
    """Answer POST /generate."""
    service: Service = request.app.state.service
    data = await read_body(request, service.args.max_body_bytes)
    check_names(field_names(data))
    body = decode(data, GenerateBody)
    prompts, is_batch = parse(body, service)
    requests = checks.fan_out(prompts)
    if body.stream:
        return SseResponse(_events(service, requests, with_index=len(requests) > 1))
    group = await unless_gone(request, run_all(service, requests))
    now = service.clock.monotonic()
    answers = [collector.answer.response(now) for collector in group]
    return JsonResponse(answers if is_batch or len(answers) > 1 else answers[0])


async def _events(
    service: Service, requests: Sequence[GenerateRequest], with_index: bool
) -> Events:
    async with aclosing(run_stream(service, requests)) as news:
        async for collector in news:
            data = collector.answer.response(service.clock.monotonic())
            if with_index:
                data["index"] = collector.index
            yield data


# ----------------------------------------------------------------- reading the body


def check_names(names: Sequence[str]) -> None:
    """Refuse fields that mean something elsewhere; others that are unknown mean nothing here."""
    known = GenerateBody.__struct_fields__
    for name in names:
        if name in known:
            continue
        if name in SAMPLING_FIELDS:
            raise InvalidRequestError(f"{name!r} belongs into 'sampling_params'")
        near = difflib.get_close_matches(name, known, n=1, cutoff=NEARLY)
        if near:
            raise InvalidRequestError(f"unknown field {name!r}; did you mean {near[0]!r}?")


def parse(body: GenerateBody, service: Service) -> tuple[list[GenerateRequest], bool]:
    """Turn a body into one request for each prompt, and say whether it was a batch.

    Raises InvalidRequestError naming the field.
    """
    for field in ("image_data", "video_data", "audio_data"):
        if getattr(body, field):
            raise InvalidRequestError(f"{field!r}: the served model takes text only")
    prompts, is_batch = _prompts(body, service.vocab_size)
    num = len(prompts)
    if num > checks.MAX_BATCH:
        raise InvalidRequestError(f"a batch of {num} prompts; at most {checks.MAX_BATCH}")
    given = _spread("sampling_params", body.sampling_params or {}, num)
    sampling = [normalized(fields, service.vocab_size) for fields in given]
    rids = _rids(body.rid, num)
    logprobs = _logprobs(body, num, service.vocab_size)
    adapters = _spread("lora_path", body.lora_path, num)
    arrival = service.clock.wall()
    requests = [
        GenerateRequest(
            rid=rids[i],
            sampling=sampling[i],
            logprob=_of_prompt(logprobs[i], sampling[i]),
            cache=checks.checked_cache(
                body.cache_salt or "", adapters[i] or "", body.checkpoint, body.exact
            ),
            priority=checks.checked_priority(body.priority or 0),
            stream=bool(body.stream),
            arrival=arrival,
            **prompts[i],
        )
        for i in range(num)
    ]
    return requests, is_batch


def _prompts(body: GenerateBody, vocab_size: int) -> tuple[list[dict[str, Any]], bool]:
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequestError("exactly one of 'text' and 'input_ids' is needed")
    if body.text is not None:
        texts = [body.text] if isinstance(body.text, str) else body.text
        if not texts:
            raise InvalidRequestError("'text' is an empty list; at least one prompt is needed")
        return [{"text": text} for text in texts], not isinstance(body.text, str)
    ids: list[Any] = body.input_ids or []
    is_batch = bool(ids) and isinstance(ids[0], list)
    batches: list[Any] = ids if is_batch else [ids]
    if any(not isinstance(one, list) for one in batches):
        raise InvalidRequestError("'input_ids' mixes token ids and lists of token ids")
    packed = [checks.checked_ids("input_ids", one, vocab_size) for one in batches]
    return [{"input_ids": data} for data in packed], is_batch


def _spread(field: str, value: T | list[T], num: int) -> list[T]:
    """One value for each prompt: the list as given, or the same for all."""
    if not isinstance(value, list):
        return [value] * num
    _check_len(field, len(value), num)
    return value


def _check_len(field: str, length: int, num: int) -> None:
    if length != num:
        raise InvalidRequestError(f"{field!r} has {length} values for {num} prompts")


def _rids(rid: str | list[str] | None, num: int) -> list[str]:
    if rid is None:
        return [fresh_id() for _ in range(num)]
    if isinstance(rid, str):
        rid = [rid] if num == 1 else [f"{rid}_{i}" for i in range(num)]
    _check_len("rid", len(rid), num)
    if "" in rid:
        raise InvalidRequestError("'rid' is empty; leave it out to be given one")
    return [checks.checked_text("rid", one, checks.MAX_RID_CHARS) for one in rid]


def _logprobs(body: GenerateBody, num: int, vocab_size: int) -> list[LogprobOptions]:
    wanted = _spread("return_logprob", body.return_logprob or False, num)
    start_len = -1 if body.logprob_start_len is None else body.logprob_start_len
    starts = _spread("logprob_start_len", start_len, num)
    tops = _spread("top_logprobs_num", body.top_logprobs_num or 0, num)
    chosen = _chosen_ids(body.token_ids_logprob, num)
    out = []
    for enabled, start, top, ids in zip(wanted, starts, tops, chosen, strict=True):
        if not enabled:
            out.append(LogprobOptions())
            continue
        options = LogprobOptions(
            enabled=True,
            start=start,
            top=top,
            token_ids=tuple(ids),
            with_text=bool(body.return_text_in_logprobs),
        )
        out.append(checks.checked_logprob(options, vocab_size))
    return out


def _of_prompt(logprob: LogprobOptions, sampling: SamplingParams) -> LogprobOptions:
    """Where nothing is generated, log probabilities are those of the prompt, all unless said."""
    if logprob.enabled and logprob.start < 0 and sampling.max_new_tokens == 0:
        return msgspec.structs.replace(logprob, start=0)
    return logprob


def _chosen_ids(value: list[int | list[int]] | None, num: int) -> list[list[int]]:
    if not value:
        return [[] for _ in range(num)]
    nested = [one for one in value if isinstance(one, list)]
    flat = [one for one in value if isinstance(one, int)]
    if nested and flat:
        raise InvalidRequestError("'token_ids_logprob' mixes token ids and lists of token ids")
    return _spread("token_ids_logprob", nested, num) if nested else [flat] * num
