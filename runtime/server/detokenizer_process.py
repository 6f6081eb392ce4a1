"""The detokenizer process: tokens in, text out, stop strings found.

    inbox: TokenDelta; AbortRequest (the server gave these requests up)
    out:   TextDelta -> server; StopMatched -> scheduler

This module does not decode: `DetokenizerCore` does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from statewise.runtime.detokenizer import DetokenizerCore
from statewise.runtime.machine import settle_memory
from statewise.runtime.messages import (
    AbortRequest,
    AnyMessage,
    ControlReply,
    ControlRequest,
    FinishReason,
    StopMatched,
    TextDelta,
    TokenDelta,
)
from statewise.runtime.server import links
from statewise.runtime.server.child import IDLE_POLL_MS, Child, child_main
from statewise.runtime.tokenizer.load import load_tokenizer

log = logging.getLogger(__name__)


class DetokenizerLoop:
    """Moves messages between the scheduler, one detokenizer core and the server."""

    def __init__(self, child: Child, core: DetokenizerCore) -> None:
        self._child = child
        self._core = core

    def run(self) -> None:
        """Turn until the process is told to end."""
        while True:
            self.turn()

    def turn(self) -> None:
        """Take what has arrived, send the text that came of it, show life."""
        texts: list[TextDelta | ControlReply] = []
        stops: list[StopMatched] = []
        for message in self._child.receive(IDLE_POLL_MS):
            self._take(message, texts, stops)
        self._child.send(links.SCHEDULER, stops)
        self._child.send(links.SERVER, texts)
        self._child.beat()

    def _take(
        self, message: AnyMessage, texts: list[TextDelta | ControlReply], stops: list[StopMatched]
    ) -> None:
        match message:
            case TokenDelta():
                new_texts, new_stops = self._core.feed(message)
                texts += new_texts
                stops += new_stops
            case AbortRequest():
                # The server has answered this request already: forget it, say nothing.
                self._core.feed(TokenDelta(message.rid, finish=FinishReason("abort")))
            case ControlRequest():
                error = "" if message.op == "ping" else f"unknown operation {message.op!r}"
                texts.append(ControlReply(message.call_id, error=error))
            case _:
                raise AssertionError(f"the detokenizer got a {type(message).__name__}")


def start(child: Child) -> Callable[[], None]:
    """Open the vocabulary and return the loop."""
    args = child.args
    vocabulary = None
    if not args.skip_tokenizer_init:
        vocabulary = load_tokenizer(args.tokenizer_path or args.model_path)
    settle_memory()
    child.announce({})
    return DetokenizerLoop(child, DetokenizerCore(vocabulary)).run


if __name__ == "__main__":
    child_main(start)
