"""POST /v1/completions: text or token ids continued, in the OpenAI shape.

A prompt may be a string, a list of strings, a list of token ids or a list of such lists. `echo`
puts the prompt before the text (and its log probabilities before the others).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from statewise.runtime.clock import fresh_id
from statewise.runtime.errors import InvalidRequestError
from statewise.runtime.messages import GenerateRequest, LogprobEntry, LogprobOptions, unpack_ids
from statewise.runtime.server import links
from statewise.runtime.server import requests as checks
from statewise.runtime.server.http import openai_body as common
from statewise.runtime.server.http.collect import Collector, run_all, run_stream
from statewise.runtime.server.http.json_io import JsonResponse, read_json
from statewise.runtime.server.http.sse import Events, SseResponse, unless_gone
from statewise.runtime.server.service import Service

DEFAULT_MAX_TOKENS = 16


class CompletionBody(common.OpenAIBody, kw_only=True):
    """The body's fields that mean something here."""

    prompt: str | list[str | int | list[int]]
    max_tokens: int | None = None
    logprobs: int | bool | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class Call:
    """One call: its requests, and what its answers are headed with."""

    def __init__(self, service: Service, body: CompletionBody) -> None:
        if body.suffix:
            raise InvalidRequestError("'suffix' is not supported")
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise InvalidRequestError("'best_of' other than 'n' is not supported")
        self.service = service
        self.body = body
        self.rid = body.rid or fresh_id("cmpl-")
        self.samples = body.n or 1
        self.head = {
            "id": self.rid,
            "object": "text_completion",
            "created": int(service.clock.wall()),
            "model": service.model_name,
        }
        self.prompts = _prompts(body.prompt, service.vocab_size)
        self.requests = checks.fan_out([self._request(prompt) for prompt in self.prompts])
        self.echoes = [""] * len(self.requests)  # prompt texts, where asked for

    def _request(self, prompt: dict[str, Any]) -> GenerateRequest:
        body = self.body
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        return GenerateRequest(
            rid=checks.checked_text("rid", self.rid, checks.MAX_RID_CHARS),
            sampling=common.sampling_of(body, max_tokens, self.service.vocab_size),
            logprob=_logprob_options(body, self.service.vocab_size),
            cache=checks.checked_cache(body.cache_salt or "", "", body.checkpoint, body.exact),
            priority=checks.checked_priority(body.priority or 0),
            stream=bool(body.stream),
            arrival=self.service.clock.wall(),
            **prompt,
        )

    async def find_echoes(self) -> None:
        """Fill `echoes`: the prompts as text, asking the tokenizer where they came as ids."""
        if not self.body.echo:
            return
        texts = [await self._prompt_text(prompt) for prompt in self.prompts]
        self.echoes = [text for text in texts for _ in range(self.samples)]

    async def _prompt_text(self, prompt: dict[str, Any]) -> str:
        if "text" in prompt:
            return str(prompt["text"])
        args = {"tokens": unpack_ids(prompt["input_ids"]).tolist(), "skip_special_tokens": False}
        answer = await self.service.broker.call(links.TOKENIZER, "detokenize", args)
        return str(answer["text"])


async def completions(request: Request) -> Response:
    """Answer POST /v1/completions."""
    service: Service = request.app.state.service
    body = await read_json(request, CompletionBody, service.args.max_body_bytes)
    call = Call(service, body)
    await call.find_echoes()
    if body.stream:
        return SseResponse(_events(call))
    group = await unless_gone(request, run_all(service, call.requests))
    choices = [_choice(call, collector) for collector in group]
    return JsonResponse(
        {**call.head, "choices": choices, "usage": common.usage_of(group, call.samples)}
    )


# ----------------------------------------------------------------- reading the body


def _prompts(prompt: str | Sequence[str | int | list[int]], vocab: int) -> list[dict[str, Any]]:
    if isinstance(prompt, str):
        return [{"text": prompt}]
    if not prompt:
        raise InvalidRequestError("'prompt' is an empty list")
    if len(prompt) > checks.MAX_BATCH and not isinstance(prompt[0], int):
        raise InvalidRequestError(f"a batch of {len(prompt)} prompts; at most {checks.MAX_BATCH}")
    if all(isinstance(one, str) for one in prompt):
        return [{"text": one} for one in prompt]
    nested = [one for one in prompt if isinstance(one, list)]
    if nested and len(nested) < len(prompt):
        raise InvalidRequestError("'prompt' mixes token ids and lists of token ids")
    batches: list[Sequence[Any]] = [*nested] or [prompt]
    packed = [checks.checked_ids("prompt", ids, vocab) for ids in batches]
    return [{"input_ids": data} for data in packed]


def _logprob_options(body: CompletionBody, vocab_size: int) -> LogprobOptions:
    if body.logprobs is None or body.logprobs is False:
        return LogprobOptions()
    top = 1 if body.logprobs is True else body.logprobs
    start = 0 if body.echo else -1
    options = LogprobOptions(enabled=True, start=start, top=top, with_text=True)
    return checks.checked_logprob(options, vocab_size)


# ----------------------------------------------------------------- building answers


def _choice(call: Call, collector: Collector) -> dict[str, Any]:
    echo = call.echoes[collector.index]
    answer = collector.answer
    shown = None
    if collector.request.logprob.enabled:
        shown = _logprobs(collector, [*answer.prompt_logprobs, *answer.logprobs], 0)
    return {
        "index": collector.index,
        "text": echo + answer.text,
        "logprobs": shown,
        "finish_reason": common.finish_word(collector),
        "matched_stop": common.matched_stop(collector),
    }


def _logprobs(
    collector: Collector, entries: Sequence[LogprobEntry], offset: int
) -> dict[str, list[Any]]:
    """Parallel lists; `offset` is the first token's place in the text, in characters."""
    tokens = [common.token_text(collector, entry.token_id) for entry in entries]
    offsets = []
    for text in tokens:
        offsets.append(offset)
        offset += len(text)
    tops = [
        None if entry.logprob is None else dict(common.top_pairs(collector, entry))
        for entry in entries
    ]
    return {
        "tokens": tokens,
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


class _Streamed:
    """One choice of a stream: whether its echo went out, and how long its text is."""

    def __init__(self) -> None:
        self.has_echoed = False
        self.num_chars = 0


async def _events(call: Call) -> Events:
    states = [_Streamed() for _ in call.requests]
    last: dict[int, Collector] = {}
    async with aclosing(run_stream(call.service, call.requests)) as news:
        async for collector in news:
            last[collector.index] = collector
            choice = _chunk(call, collector, states[collector.index])
            yield {**call.head, "choices": [choice]}
    if common.includes_usage(call.body):
        group = [last[index] for index in sorted(last)]
        yield {**call.head, "choices": [], "usage": common.usage_of(group, call.samples)}


def _chunk(call: Call, collector: Collector, state: _Streamed) -> dict[str, Any]:
    text = collector.take_text()
    entries = collector.take_logprobs()
    if not state.has_echoed:
        state.has_echoed = True
        text = call.echoes[collector.index] + text
        entries = [*collector.answer.prompt_logprobs, *entries]
    shown = None
    if collector.request.logprob.enabled:
        shown = _logprobs(collector, entries, state.num_chars)
    state.num_chars += len(text)
    return {
        "index": collector.index,
        "text": text,
        "logprobs": shown,
        "finish_reason": common.finish_word(collector),
        "matched_stop": common.matched_stop(collector),
    }
