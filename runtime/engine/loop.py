"""The engine core on a thread of its own, for callers on any other thread.

    caller --commands--> [ loop thread: core.step -> detokenizer ] --text deltas--> caller's sink

Only the loop thread touches the core. A sink is called on the loop thread, gets exactly one delta
with `finish` set, and must not block. If the loop fails, every open request gets a terminal error
and later calls raise.

This module does not know prompts, processes or sockets.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from statewise.runtime.detokenizer import DetokenizerCore
from statewise.runtime.engine.core import EngineCore
from statewise.runtime.errors import WorkerDiedError
from statewise.runtime.messages import FinishReason, TextDelta, TokenDelta, TokenizedRequest

T = TypeVar("T")
Sink = Callable[[TextDelta], None]

STALLED_POLL_S = 0.001  # while work is open that cannot run (a grammar compiles)
IDLE_POLL_S = 0.05  # while there is background work only

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Command:
    """Something to do on the loop thread, or, if the loop ended first, to call off."""

    run: Callable[[], None]
    cancel: Callable[[FinishReason], None]


class EngineLoop:
    """Owns one core and one detokenizer from `start` to `close`."""

    def __init__(self, core: EngineCore, detokenizer: DetokenizerCore) -> None:
        self._core = core
        self._detokenizer = detokenizer
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._sinks: dict[str, Sink] = {}  # touched by the loop thread only
        self._state = threading.Lock()  # orders commands against the end of the loop
        self._ended = ""  # why no more commands are taken
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Abort what is open and end the thread; safe to call twice."""
        with self._state:
            if not self._ended:
                self._ended = "the engine was shut down"
                self._commands.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def submit(self, request: TokenizedRequest, sink: Sink) -> None:
        """Run a request; raises WorkerDiedError if the loop has ended."""

        def add() -> None:
            if request.rid in self._sinks:
                message = f"request id {request.rid!r} is in use"
                reason = FinishReason("error", None, message, "invalid_request", 400)
                sink(TextDelta(request.rid, finish=reason))
                return
            self._sinks[request.rid] = sink
            self._core.add_request(request)

        self._put(add, lambda reason: sink(TextDelta(request.rid, finish=reason)))

    def abort(self, rid: str, message: str = "aborted by the client") -> None:
        """End a request (empty: all); one that has ended is ignored, as is a loop that has."""
        try:
            self._put(lambda: self._core.abort(rid, message), lambda _: None)
        except WorkerDiedError:
            return

    def call(self, ask: Callable[[EngineCore], T]) -> T:
        """Ask the core something between two steps; waits, and re-raises what `ask` raised."""
        future: Future[T] = Future()

        def answer() -> None:
            try:
                future.set_result(ask(self._core))
            except Exception as error:
                future.set_exception(error)

        self._put(answer, lambda reason: future.set_exception(WorkerDiedError(reason.message)))
        return future.result()

    def _put(self, run: Callable[[], None], cancel: Callable[[FinishReason], None]) -> None:
        with self._state:
            if self._ended:
                raise WorkerDiedError(self._ended)
            self._commands.put(_Command(run, cancel))

    # ---------------------------------------------------------------- the loop thread

    def _run(self) -> None:
        try:
            while self._take_commands():
                if self._core.has_work():
                    self._deliver(self._core.step())
            reason = FinishReason("abort", None, self._ended, "aborted", 499)
        except Exception as error:
            log.exception("the engine ends on an unexpected error")
            message = f"the engine failed: {type(error).__name__}: {error}"
            reason = FinishReason("error", None, message, "worker_died", 503)
        self._end(reason)

    def _take_commands(self) -> bool:
        """Do what was asked; waits while there is nothing else to do. False: time to end."""
        wait: float | None = None
        if self._core.has_work():
            wait = STALLED_POLL_S if self._core.is_stalled else 0.0
        elif self._commands.empty() and self._core.idle():
            wait = IDLE_POLL_S
        while True:
            try:
                command = self._commands.get(wait != 0.0, wait or None)
            except queue.Empty:
                return True
            if command is None:
                return False
            command.run()
            wait = 0.0

    def _deliver(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            texts, stops = self._detokenizer.feed(delta)
            for text in texts:
                self._send(text)
            for stop in stops:
                self._core.stop_matched(stop.rid, stop.matched, stop.num_tokens)

    def _send(self, text: TextDelta) -> None:
        sink = self._sinks[text.rid] if text.finish is None else self._sinks.pop(text.rid)
        sink(text)

    def _end(self, reason: FinishReason) -> None:
        """Take no more commands, call off those that wait, end what is open."""
        with self._state:
            self._ended = self._ended or reason.message
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                command.cancel(reason)
        self._detokenizer.clear()
        for rid in list(self._sinks):
            self._send(TextDelta(rid, finish=reason))
