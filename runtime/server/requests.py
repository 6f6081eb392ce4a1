"""From what a client asked to `GenerateRequest`s: the checks every door shares (HTTP and RPC).

A request for n samples becomes n requests here; what they share is computed once by the cache.
With a seed, sample i uses seed + i.

This module does not know where a request came from, and leaves lengths to those who know them:
the tokenizer process and the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from statewise.runtime.errors import InvalidRequestError
from statewise.runtime.messages import CacheOptions, GenerateRequest, LogprobOptions, pack_ids
from statewise.runtime.sampling_params import MAX_TOP_LOGPROBS, SamplingParams, normalized

MAX_BATCH = 1024
MAX_REQUESTS = 4096  # batch x n
MAX_RID_CHARS = 256
MAX_SALT_CHARS = 1024
MAX_LOGPROB_IDS = 128
MAX_PRIORITY = 1 << 31
# Log probabilities of a long prompt with many alternatives would not fit into one message.
MAX_PROMPT_LOGPROB_PAIRS = 2_000_000


def checked_ids(field: str, ids: Sequence[Any], vocab_size: int) -> bytes:
    """Pack token ids. Raises InvalidRequestError naming `field` and the first bad id."""
    if not ids:
        raise InvalidRequestError(f"{field!r} is empty; at least one token id is needed")
    if not all(type(i) is int for i in ids):
        raise InvalidRequestError(f"{field!r} must hold token ids only")
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise InvalidRequestError(
            f"{field!r} holds {bad}, which is outside the vocabulary (0 to {vocab_size - 1})"
        )
    return pack_ids(np.asarray(ids, dtype=np.int32))


def checked_packed(field: str, data: bytes, vocab_size: int) -> bytes:
    """Check token ids that came packed. Raises InvalidRequestError naming `field`."""
    if not data or len(data) % 4:
        raise InvalidRequestError(f"{field!r} must hold int32 token ids, at least one")
    ids = np.frombuffer(data, dtype="<i4")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise InvalidRequestError(
            f"{field!r} holds an id outside the vocabulary (0 to {vocab_size - 1})"
        )
    return data


def checked_logprob(options: LogprobOptions, vocab_size: int) -> LogprobOptions:
    """Check the ranges of `options`. Raises InvalidRequestError naming the field."""
    if options.start < -1:
        raise InvalidRequestError(f"'logprob_start_len' is {options.start}; it must be -1 or more")
    if not 0 <= options.top <= MAX_TOP_LOGPROBS:
        raise InvalidRequestError(
            f"the number of top log probabilities is {options.top}; "
            f"it must be from 0 to {MAX_TOP_LOGPROBS}"
        )
    if len(options.token_ids) > MAX_LOGPROB_IDS:
        raise InvalidRequestError(f"'token_ids_logprob' holds more than {MAX_LOGPROB_IDS} ids")
    if options.token_ids:
        checked_ids("token_ids_logprob", options.token_ids, vocab_size)
    return options


def checked_prompt_logprob(options: LogprobOptions, num_tokens: int) -> None:
    """Check log probabilities of the prompt against its length, in tokens."""
    if not options.enabled or options.start < 0:
        return
    if options.start >= num_tokens:
        raise InvalidRequestError(
            f"'logprob_start_len' is {options.start}; the prompt has {num_tokens} tokens"
        )
    pairs = (num_tokens - options.start) * (1 + options.top + len(options.token_ids))
    if pairs > MAX_PROMPT_LOGPROB_PAIRS:
        raise InvalidRequestError(
            f"{pairs} log probabilities of the prompt were asked for; "
            f"at most {MAX_PROMPT_LOGPROB_PAIRS}: raise 'logprob_start_len'"
        )


def checked_text(field: str, value: str, max_chars: int) -> str:
    """Check the length of a short text. Raises InvalidRequestError naming `field`."""
    if len(value) > max_chars:
        raise InvalidRequestError(f"{field!r} has {len(value)} characters; at most {max_chars}")
    return value


def checked_cache(
    salt: str, adapter: str, checkpoint: bool | None, exact: bool | None
) -> CacheOptions:
    """Check whose state a request may share. No adapter is loaded in this version."""
    if adapter:
        raise InvalidRequestError(f"no adapter {adapter!r} is loaded")
    checked_text("cache_salt", salt, MAX_SALT_CHARS)
    return CacheOptions(salt=salt, checkpoint=bool(checkpoint), exact=bool(exact))


def checked_priority(value: int) -> int:
    """Check the range of a priority."""
    if not -MAX_PRIORITY < value < MAX_PRIORITY:
        raise InvalidRequestError(f"'priority' is {value}; it must fit 32 bits")
    return value


class Conversation(msgspec.Struct, rename={"continues": "continue"}):
    """What `GenerateRequest.chat` holds, as JSON."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    continues: bool = False
    generation_prompt: bool = True
    variables: dict[str, Any] = {}


def checked_chat(data: bytes) -> bytes:
    """Check a conversation that came encoded. Raises InvalidRequestError naming the field."""
    try:
        chat = msgspec.json.decode(data, type=Conversation)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"'chat': {error}") from error
    if not chat.messages:
        raise InvalidRequestError("'chat.messages' is empty; at least one message is needed")
    for i, message in enumerate(chat.messages):
        if not isinstance(message.get("role"), str):
            raise InvalidRequestError(f"'chat.messages[{i}].role' must be a string")
    return msgspec.json.encode(chat)


def checked_request(request: GenerateRequest, vocab_size: int) -> GenerateRequest:
    """Check a whole request that came as a message (RPC): types hold already, ranges may not."""
    prompts = [p for p in (request.text, request.input_ids, request.chat) if p is not None]
    if len(prompts) != 1:
        raise InvalidRequestError("exactly one of 'text', 'input_ids' and 'chat' is needed")
    if request.input_ids is not None:
        checked_packed("input_ids", request.input_ids, vocab_size)
    fields = msgspec.structs.asdict(request.sampling)
    return msgspec.structs.replace(
        request,
        rid=checked_text("rid", request.rid, MAX_RID_CHARS),
        chat=None if request.chat is None else checked_chat(request.chat),
        sampling=normalized(fields, vocab_size),
        logprob=checked_logprob(request.logprob, vocab_size),
        cache=checked_cache(
            request.cache.salt, request.cache.adapter, request.cache.checkpoint, request.cache.exact
        ),
        priority=checked_priority(request.priority),
    )


def with_seed(sampling: SamplingParams, sample: int) -> SamplingParams:
    """Return the parameters of one of a request's samples."""
    seed = sampling.sampling_seed
    if seed is not None:
        seed = (seed + sample) % (1 << 63)
    return msgspec.structs.replace(sampling, n=1, sampling_seed=seed)


def fan_out(requests: Sequence[GenerateRequest]) -> list[GenerateRequest]:
    """One request for each sample, all samples of a prompt side by side."""
    out = [
        msgspec.structs.replace(request, sampling=with_seed(request.sampling, sample))
        for request in requests
        for sample in range(request.sampling.n)
    ]
    if len(out) > MAX_REQUESTS:
        raise InvalidRequestError(
            f"the batch asks for {len(out)} samples; at most {MAX_REQUESTS} at once"
        )
    return out
