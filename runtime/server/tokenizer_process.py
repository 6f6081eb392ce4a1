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
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from statewise.runtime.errors import InvalidRequestError, OperatingError
from statewise.runtime.machine import settle_memory
from statewise.runtime.messages import (
    AbortRequest,
    AnyMessage,
    ControlReply,
    ControlRequest,
    FinishReason,
    GenerateRequest,
    TextDelta,
    TokenizedRequest,
    pack_ids,
)
from statewise.runtime.server import links
from statewise.runtime.server import requests as checks
from statewise.runtime.server.child import IDLE_POLL_MS, Child, child_main
from statewise.runtime.tokenizer.facts import facts_of
from statewise.runtime.tokenizer.load import load_tokenizer

log = logging.getLogger(__name__)


class Tokenizer(Protocol):
    """What the loop needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        ...

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Token ids of a text; `add_special` puts before it what a prompt begins with."""
        ...

    def decode(self, token_ids: list[int], *, skip_special: bool) -> str:
        """Text of token ids."""
        ...

    def encode_chat(self, chat: dict[str, Any]) -> list[int]:
        """Token ids of a conversation (http/chat.py: `conversation`)."""
        ...


class TokenizeArgs(msgspec.Struct):
    """Arguments of the operation `tokenize`."""

    texts: list[str]
    add_special_tokens: bool = True


class DetokenizeArgs(msgspec.Struct):
    """Arguments of the operation `detokenize`."""

    tokens: list[int]
    skip_special_tokens: bool = True


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
            self._refuse(request, error)
        except Exception:
            # One request's text must not end all the others, and nothing here outlives a request.
            log.exception("request %s cannot be tokenized", request.rid)
            self._refuse(request, OperatingError("the prompt could not be tokenized"))
        else:
            self._child.send(links.SCHEDULER, [tokenized])

    def _refuse(self, request: GenerateRequest, error: OperatingError) -> None:
        reason = FinishReason(
            "error", message=str(error), code=error.code, http_status=error.http_status
        )
        self._child.send(links.SERVER, [TextDelta(request.rid, finish=reason)])

    def _tokenized(self, request: GenerateRequest) -> TokenizedRequest:
        ids = self._ids_of(request)
        num_tokens = len(ids) // 4
        if num_tokens == 0:
            raise InvalidRequestError("the prompt is empty; at least one token is needed")
        checks.checked_prompt_logprob(request.logprob, num_tokens)
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

    # ------------------------------------------------------------- questions

    def _answer(self, request: ControlRequest) -> ControlReply:
        try:
            result = self._control(request.op, request.args)
        except OperatingError as error:
            return ControlReply(request.call_id, error=str(error))
        except msgspec.MsgspecError as error:
            return ControlReply(request.call_id, error=f"arguments of {request.op!r}: {error}")
        return ControlReply(request.call_id, msgspec.json.encode(result))

    def _control(self, op: str, args: bytes) -> dict[str, Any]:
        match op:
            case "ping":
                return {}
            case "tokenize":
                return self._tokenize_texts(msgspec.json.decode(args, type=TokenizeArgs))
            case "detokenize":
                return self._detokenize_ids(msgspec.json.decode(args, type=DetokenizeArgs))
            case _:
                raise InvalidRequestError(f"unknown operation {op!r}")

    def _tokenize_texts(self, args: TokenizeArgs) -> dict[str, Any]:
        encode = self._needed().encode
        return {"tokens": [encode(t, add_special=args.add_special_tokens) for t in args.texts]}

    def _detokenize_ids(self, args: DetokenizeArgs) -> dict[str, Any]:
        tokenizer = self._needed()
        if any(not 0 <= i < tokenizer.vocab_size for i in args.tokens):
            raise InvalidRequestError(
                f"'tokens' holds an id outside the vocabulary (0 to {tokenizer.vocab_size - 1})"
            )
        return {"text": tokenizer.decode(args.tokens, skip_special=args.skip_special_tokens)}


def start(child: Child) -> Callable[[], None]:
    """Open the tokenizer and return the loop."""
    args = child.args
    if args.skip_tokenizer_init:
        child.announce({})
        return TokenizerLoop(child, None).run
    path = args.tokenizer_path or args.model_path
    tokenizer = load_tokenizer(path, chat_template=args.chat_template)
    settle_memory()
    child.announce(facts_of(tokenizer))
    return TokenizerLoop(child, tokenizer).run


if __name__ == "__main__":
    child_main(start)
