"""The tokenizer process: text, ids or a conversation in, a request the scheduler can run out.

    inbox: GenerateRequest, AbortRequest, ControlRequest (tokenize, detokenize, ping)
    out:   TokenizedRequest -> scheduler; TextDelta (refusals), ControlReply -> server

Requests wait in this process's own queue, so that an abort can take one out before its text is
looked at. A request that cannot run as written ends here with a typed error; it is the tokenizer's
terminal delta, and nothing of it reaches the scheduler.

This module does not know how text becomes ids: `Tokenizer` does.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Any, Protocol

import msgspec

from statewise.runtime.errors import InvalidRequestError, OperatingError
from statewise.runtime.messages import (
    AbortRequest,
    AnyMessage,
    ControlReply,
    ControlRequest,
    FinishReason,
    GenerateRequest,
    LogprobOptions,
    TextDelta,
    TokenizedRequest,
    pack_ids,
)
from statewise.runtime.server import links
from statewise.runtime.server.child import IDLE_POLL_MS, Child

# Log probabilities of a long prompt with many alternatives would not fit into one message.
MAX_PROMPT_LOGPROB_PAIRS = 2_000_000

log = logging.getLogger(__name__)


class Tokenizer(Protocol):
    """What the loop needs of a tokenizer."""

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Token ids of a text; `add_special` puts before it what a prompt begins with."""
        ...

    def decode(self, token_ids: list[int], *, skip_special: bool) -> str:
        """Text of token ids."""
        ...

    def encode_chat(self, chat: dict[str, Any]) -> list[int]:
        """Token ids of a conversation (http/chat.py: `conversation`)."""
        ...


class TokenizerLoop:
    """Moves messages between the server, one tokenizer and the scheduler."""

    def __init__(self, child: Child, tokenizer: Tokenizer | None) -> None:
        self._child = child
        self._tokenizer = tokenizer
        self._queue: OrderedDict[str, GenerateRequest] = OrderedDict()
        self._last: tuple[str, list[int]] = ("", [])  # samples of one prompt arrive together

    def run(self) -> None:
        """Turn until the process is told to end."""
        while True:
            self.turn()

    def turn(self) -> None:
        """Take what has arrived, tokenize one request, show life."""
        for message in self._child.receive(0 if self._queue else IDLE_POLL_MS):
            self._take(message)
        if self._queue:
            _, request = self._queue.popitem(last=False)
            self._tokenize(request)
        self._child.beat()

    def _take(self, message: AnyMessage) -> None:
        match message:
            case GenerateRequest():
                self._queue[message.rid] = message
            case AbortRequest():
                self._abort(message)
            case ControlRequest():
                self._child.send(links.SERVER, [self._answer(message)])
            case _:
                raise AssertionError(f"the tokenizer got a {type(message).__name__}")

    def _abort(self, message: AbortRequest) -> None:
        """End a request still queued here; one that has left is the scheduler's to end."""
        for rid in [message.rid] if message.rid else list(self._queue):
            if self._queue.pop(rid, None) is not None:
                reason = FinishReason(
                    "abort", message=message.message, code="aborted", http_status=499
                )
                self._child.send(links.SERVER, [TextDelta(rid, finish=reason)])

    # ------------------------------------------------------------- requests

    def _tokenize(self, request: GenerateRequest) -> None:
        try:
            tokenized = self._tokenized(request)
        except OperatingError as error:
            reason = FinishReason(
                "error", message=str(error), code=error.code, http_status=error.http_status
            )
            self._child.send(links.SERVER, [TextDelta(request.rid, finish=reason)])
            return
        self._child.send(links.SCHEDULER, [tokenized])

    def _tokenized(self, request: GenerateRequest) -> TokenizedRequest:
        ids = self._ids_of(request)
        num_tokens = len(ids) // 4
        if num_tokens == 0:
            raise InvalidRequestError("the prompt is empty; at least one token is needed")
        self._check_logprob(request.logprob, num_tokens)
        return TokenizedRequest(
            rid=request.rid,
            input_ids=ids,
            sampling=request.sampling,
            logprob=request.logprob,
            cache=request.cache,
            priority=request.priority,
            stream=request.stream,
            arrival=request.arrival,
        )

    def _ids_of(self, request: GenerateRequest) -> bytes:
        if request.input_ids is not None:
            return request.input_ids
        tokenizer = self._needed()
        if request.text is not None:
            return pack_ids(self._encoded(tokenizer, request.text))
        assert request.chat is not None
        return pack_ids(tokenizer.encode_chat(msgspec.json.decode(request.chat)))

    def _encoded(self, tokenizer: Tokenizer, text: str) -> list[int]:
        if text != self._last[0] or not self._last[1]:
            self._last = (text, tokenizer.encode(text, add_special=True))
        return self._last[1]

    def _needed(self) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidRequestError("this server takes token ids only (--skip-tokenizer-init)")
        return self._tokenizer

    def _check_logprob(self, options: LogprobOptions, num_tokens: int) -> None:
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

    # ------------------------------------------------------------- questions

    def _answer(self, request: ControlRequest) -> ControlReply:
        try:
            result = self._control(request.op, msgspec.json.decode(request.args))
        except OperatingError as error:
            return ControlReply(request.call_id, error=str(error))
        return ControlReply(request.call_id, msgspec.json.encode(result))

    def _control(self, op: str, args: dict[str, Any]) -> dict[str, Any]:
        match op:
            case "ping":
                return {}
            case "tokenize":
                add_special = bool(args.get("add_special_tokens", True))
                tokenizer = self._needed()
                return {
                    "tokens": [tokenizer.encode(t, add_special=add_special) for t in args["texts"]]
                }
            case "detokenize":
                skip = bool(args.get("skip_special_tokens", True))
                return {"text": self._needed().decode(args["tokens"], skip_special=skip)}
            case _:
                raise InvalidRequestError(f"unknown operation {op!r}")
