"""POST /v1/chat/completions: a conversation continued, in the OpenAI shape.

The conversation travels to the tokenizer process as it came (parts joined into text), and the
model's own chat template is rendered there. Text a user wrote cannot become control tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from statewise.runtime.clock import fresh_id
from statewise.runtime.errors import InvalidRequestError
from statewise.runtime.messages import GenerateRequest, LogprobEntry, LogprobOptions
from statewise.runtime.server import links
from statewise.runtime.server import requests as checks
from statewise.runtime.server.http import openai_body as common
from statewise.runtime.server.http.collect import Collector, run_all, run_stream
from statewise.runtime.server.http.json_io import JsonResponse, read_json
from statewise.runtime.server.http.sse import Events, SseResponse, unless_gone
from statewise.runtime.server.http.tools import (
    StreamedText,
    Tool,
    ToolPlan,
    parse_calls,
    plan_tools,
)
from statewise.runtime.server.service import Service

UNLIMITED_TOKENS = 1 << 31  # the engine cuts it down to what the context holds
MAX_MESSAGES = 4096
_ROLE_NAMES = {"developer": "system"}


class ChatBody(common.OpenAIBody, kw_only=True):
    """The body's fields that mean something here."""

    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Call:
    """One call: its requests, and what its answers are headed with."""

    def __init__(self, service: Service, body: ChatBody) -> None:
        self.service = service
        self.body = body
        self.samples = body.n or 1
        self._vocab_size = service.vocab_size  # before anything: 503 while nothing is known
        template = service.info(links.TOKENIZER).get("chat_template")
        self.tools = plan_tools(body.tools, body.tool_choice, template)
        self.rid = body.rid or fresh_id("chatcmpl-")
        self._created = int(service.clock.wall())
        self.requests = checks.fan_out([self._request()])

    def head(self, kind: str) -> dict[str, Any]:
        """Return the fields every answer begins with."""
        return {
            "id": self.rid,
            "object": kind,
            "created": self._created,
            "model": self.service.model_name,
        }

    def _request(self) -> GenerateRequest:
        body = self.body
        max_tokens = body.max_completion_tokens
        if max_tokens is None:
            max_tokens = UNLIMITED_TOKENS if body.max_tokens is None else body.max_tokens
        grammar = None if self.tools.schema is None else {"json_schema": self.tools.schema}
        vocab_size = self._vocab_size
        return GenerateRequest(
            rid=checks.checked_text("rid", self.rid, checks.MAX_RID_CHARS),
            sampling=common.sampling_of(body, max_tokens, vocab_size, grammar),
            chat=conversation(body, self.tools),
            logprob=_logprob_options(body, vocab_size),
            cache=checks.checked_cache(body.cache_salt or "", "", body.checkpoint, body.exact),
            priority=checks.checked_priority(body.priority or 0),
            stream=bool(body.stream),
            arrival=self.service.clock.wall(),
        )


async def chat_completions(request: Request) -> Response:
    """Answer POST /v1/chat/completions."""
    service: Service = request.app.state.service
    body = await read_json(request, ChatBody, service.args.max_body_bytes)
    call = Call(service, body)
    if body.stream:
        return SseResponse(_events(call))
    group = await unless_gone(request, run_all(service, call.requests))
    return JsonResponse(
        {
            **call.head("chat.completion"),
            "choices": [_choice(call, collector) for collector in group],
            "usage": common.usage_of(group, call.samples),
        }
    )


# ----------------------------------------------------------------- reading the body


def conversation(body: ChatBody, tools: ToolPlan) -> bytes:
    """Return the conversation as the tokenizer process takes it (JSON)."""
    if not body.messages:
        raise InvalidRequestError("'messages' is empty; at least one message is needed")
    if len(body.messages) > MAX_MESSAGES:
        raise InvalidRequestError(f"'messages' holds more than {MAX_MESSAGES} messages")
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise InvalidRequestError(
            "'continue_final_message' and 'add_generation_prompt' exclude each other"
        )
    chat = {
        "messages": [_message(i, message) for i, message in enumerate(body.messages)],
        "tools": list(tools.shown) or None,
        "continue": continues,
        "generation_prompt": body.add_generation_prompt is not False and not continues,
        "variables": body.chat_template_kwargs or {},
    }
    return msgspec.json.encode(chat)


def _message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    where = f"messages[{index}]"
    role = message.get("role")
    if not isinstance(role, str):
        raise InvalidRequestError(f"'{where}.role' must be a string")
    out = {**message, "role": _ROLE_NAMES.get(role, role)}
    out["content"] = _content(where, message.get("content"))
    if isinstance(calls := message.get("tool_calls"), list):
        out["tool_calls"] = [_with_object_arguments(call) for call in calls]
    return out


def _content(where: str, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"'{where}.content' must be a string or a list of parts")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in ("text", "refusal"):
            raise InvalidRequestError(f"'{where}.content': the served model takes text parts only")
        text = part.get(part["type"])
        if not isinstance(text, str):
            raise InvalidRequestError(f"'{where}.content': a part's text must be a string")
        texts.append(text)
    return "".join(texts)


def _with_object_arguments(call: Any) -> Any:
    """Return a past tool call with its arguments as an object, which is what templates expect."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"])
    except (msgspec.DecodeError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _logprob_options(body: ChatBody, vocab_size: int) -> LogprobOptions:
    if not body.logprobs:
        return LogprobOptions()
    options = LogprobOptions(enabled=True, top=body.top_logprobs or 0, with_text=True)
    return checks.checked_logprob(options, vocab_size)


# ----------------------------------------------------------------- building answers


def _choice(call: Call, collector: Collector) -> dict[str, Any]:
    text = collector.answer.text
    calls: list[dict[str, Any]] = []
    if call.tools.parses:
        text, calls = parse_calls(text)
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["content"] = text or None
        message["tool_calls"] = calls
    return {
        "index": collector.index,
        "message": message,
        "logprobs": _logprobs(collector, collector.answer.logprobs),
        "finish_reason": _finish_word(collector, bool(calls)),
        "matched_stop": common.matched_stop(collector),
    }


def _finish_word(collector: Collector, has_calls: bool) -> str | None:
    word = common.finish_word(collector)
    return "tool_calls" if has_calls and word == "stop" else word


def _logprobs(collector: Collector, entries: Sequence[LogprobEntry]) -> dict[str, Any] | None:
    if not collector.request.logprob.enabled:
        return None
    return {"content": [_shown(collector, entry) for entry in entries]}


def _shown(collector: Collector, entry: LogprobEntry) -> dict[str, Any]:
    shown = _token(common.token_text(collector, entry.token_id), entry.logprob)
    shown["top_logprobs"] = [
        _token(text, logprob) for text, logprob in common.top_pairs(collector, entry)
    ]
    return shown


def _token(text: str, logprob: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


class _Streamed:
    """One choice of a stream: whether its role went out, and text that may be a tool call."""

    def __init__(self, parses_tools: bool) -> None:
        self.has_begun = False
        self.tools = StreamedText() if parses_tools else None
        self.has_calls = False

    def delta(self, text: str, *, at_end: bool) -> dict[str, Any]:
        """Return the next delta for new text."""
        calls: list[dict[str, Any]] = []
        if self.tools is not None:
            text = self.tools.push(text)
            if at_end:
                rest, calls = self.tools.finish()
                text += rest
        delta: dict[str, Any] = {}
        if not self.has_begun:
            self.has_begun = True
            delta = {"role": "assistant", "content": ""}
        if text:
            delta["content"] = text
        if calls:
            self.has_calls = True
            delta["tool_calls"] = [{"index": i, **one} for i, one in enumerate(calls)]
        return delta


async def _events(call: Call) -> Events:
    head = call.head("chat.completion.chunk")
    states = [_Streamed(call.tools.parses) for _ in call.requests]
    last: dict[int, Collector] = {}
    async with aclosing(run_stream(call.service, call.requests)) as news:
        async for collector in news:
            last[collector.index] = collector
            state = states[collector.index]
            at_end = collector.finish_kind is not None
            delta = state.delta(collector.take_text(), at_end=at_end)
            choice = {
                "index": collector.index,
                "delta": delta,
                "logprobs": _logprobs(collector, collector.take_logprobs()),
                "finish_reason": _finish_word(collector, state.has_calls),
                "matched_stop": common.matched_stop(collector),
            }
            yield {**head, "choices": [choice]}
    if common.includes_usage(call.body):
        group = [last[index] for index in sorted(last)]
        yield {**head, "choices": [], "usage": common.usage_of(group, call.samples)}
