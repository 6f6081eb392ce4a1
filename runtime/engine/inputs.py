"""From the arguments of `Engine.generate` to requests: one for each prompt and sample.

Arguments have the names and meaning of the native API's body, and a value may be given once for
all prompts or as a list with one for each. This module does not run anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from statewise.runtime.clock import fresh_id
from statewise.runtime.errors import InvalidRequestError
from statewise.runtime.messages import GenerateRequest, LogprobOptions
from statewise.runtime.sampling_params import normalized
from statewise.runtime.server import requests as checks


class GenerateArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `Engine.generate` takes. Exactly one of `prompt` and `input_ids`."""

    prompt: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    token_ids_logprob: list[int | list[int]] | None = None
    return_text_in_logprobs: bool | None = None
    rid: str | list[str] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    checkpoint: bool | None = None
    exact: bool | None = None
    lora_path: str | None = None


@dataclass(frozen=True)
class Call:
    """One call's requests, in order; `is_batch`: answer with a list."""

    requests: tuple[GenerateRequest, ...]
    is_batch: bool


def read_call(fields: Mapping[str, Any], vocab_size: int, *, stream: bool, arrival: float) -> Call:
    """Check the arguments; InvalidRequestError names the one that is wrong."""
    arguments = _arguments(fields)
    prompts, is_batch = _prompts(arguments, vocab_size)
    if len(prompts) > checks.MAX_BATCH:
        raise InvalidRequestError(f"{len(prompts)} prompts; at most {checks.MAX_BATCH} at once")
    num = len(prompts)
    sampling = _spread("sampling_params", arguments.sampling_params or {}, num)
    rids = _spread("rid", arguments.rid or [fresh_id() for _ in range(num)], num)
    logprobs = _logprobs(arguments, num, vocab_size)
    requests = [
        GenerateRequest(
            rid=checks.checked_text("rid", rids[i], checks.MAX_RID_CHARS),
            sampling=normalized(sampling[i], vocab_size),
            logprob=logprobs[i],
            cache=checks.checked_cache(
                arguments.cache_salt or "",
                arguments.lora_path or "",
                arguments.checkpoint,
                arguments.exact,
            ),
            priority=checks.checked_priority(arguments.priority or 0),
            stream=stream,
            arrival=arrival,
            **prompts[i],
        )
        for i in range(num)
    ]
    samples = checks.fan_out(requests)
    return Call(_named_apart(samples), is_batch or len(samples) > 1)


def _arguments(fields: Mapping[str, Any]) -> GenerateArguments:
    try:
        return msgspec.convert(dict(fields), GenerateArguments)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"generate: {error}") from error


def _prompts(arguments: GenerateArguments, vocab: int) -> tuple[list[dict[str, Any]], bool]:
    if (arguments.prompt is None) == (arguments.input_ids is None):
        raise InvalidRequestError("exactly one of 'prompt' and 'input_ids' is needed")
    if arguments.prompt is not None:
        is_batch = not isinstance(arguments.prompt, str)
        texts = [arguments.prompt] if isinstance(arguments.prompt, str) else arguments.prompt
        if not texts:
            raise InvalidRequestError("'prompt' is an empty list; at least one is needed")
        return [{"text": text} for text in texts], is_batch
    ids: list[Any] = list(arguments.input_ids or [])
    is_batch = bool(ids) and isinstance(ids[0], list)
    packed = [checks.checked_ids("input_ids", one, vocab) for one in (ids if is_batch else [ids])]
    return [{"input_ids": data} for data in packed], is_batch


def _spread(field: str, value: Any, num: int) -> Sequence[Any]:
    """One value for each prompt: the list as given, or the same for all."""
    if not isinstance(value, list):
        return [value] * num
    if len(value) != num:
        raise InvalidRequestError(f"{field!r} has {len(value)} values for {num} prompts")
    return value


def _logprobs(arguments: GenerateArguments, num: int, vocab: int) -> list[LogprobOptions]:
    start_len = arguments.logprob_start_len
    chosen: Any = arguments.token_ids_logprob or []
    nested = bool(chosen) and isinstance(chosen[0], list)
    columns = (
        _spread("return_logprob", arguments.return_logprob or False, num),
        _spread("logprob_start_len", -1 if start_len is None else start_len, num),
        _spread("top_logprobs_num", arguments.top_logprobs_num or 0, num),
        _spread("token_ids_logprob", chosen, num) if nested else [chosen] * num,
    )
    return [
        checks.checked_logprob(
            LogprobOptions(True, start, top, tuple(ids), bool(arguments.return_text_in_logprobs)),
            vocab,
        )
        if enabled
        else LogprobOptions()
        for enabled, start, top, ids in zip(*columns, strict=True)
    ]


def _named_apart(requests: Sequence[GenerateRequest]) -> tuple[GenerateRequest, ...]:
    """Give samples of one prompt, and prompts of one rid, ids of their own."""
    seen: dict[str, int] = {}
    out = []
    for request in requests:
        count = seen.get(request.rid, 0)
        seen[request.rid] = count + 1
        rid = f"{request.rid}_{count}" if count else request.rid
        out.append(msgspec.structs.replace(request, rid=rid))
    return tuple(out)
