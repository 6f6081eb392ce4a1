"""The scheduler process: the only one that imports torch. It feeds the engine core and steps it.

    inbox: TokenizedRequest, AbortRequest, StopMatched, ControlRequest
    out:   TokenDelta -> detokenizer; ControlReply, Ready, Heartbeat -> server

While there is work the inbox is only peeked at between two steps; when idle the process sleeps in
the inbox. An abort may overtake the request it ends, because they travel different ways: such
aborts are remembered (bounded) and end the request when it arrives.

This module does not schedule and does not compute: `Engine` does.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from statewise.runtime import events
from statewise.runtime.clock import Clock, SystemClock
from statewise.runtime.errors import InvalidRequestError, OperatingError
from statewise.runtime.machine import settle_memory
from statewise.runtime.messages import (
    AbortRequest,
    AnyMessage,
    CacheOptions,
    ControlReply,
    ControlRequest,
    FinishReason,
    StopMatched,
    TokenDelta,
    TokenizedRequest,
)
from statewise.runtime.server import links
from statewise.runtime.server.child import IDLE_POLL_MS, LEAVING, Child, child_main

MAX_EARLY_ABORTS = 65536
STALLED_POLL_MS = 1
BACKGROUND_POLL_MS = 50
PROGRESS_INTERVAL_S = 2.0
DRAIN_S = 2.0  # within the supervisor's grace

log = logging.getLogger(__name__)


class Engine(Protocol):
    """What the loop needs of the engine core (runtime/engine/core.py)."""

    def add_request(self, request: TokenizedRequest) -> None:
        """Take a request; one that cannot run gets its terminal delta from the next step."""
        ...

    def abort(self, rid: str, message: str) -> None:
        """End a request; its terminal delta comes with the next step."""
        ...

    def stop_matched(self, rid: str, matched: str, num_tokens: int) -> None:
        """End a request whose text reached a stop string."""
        ...

    def step(self) -> list[TokenDelta]:
        """Run one step and return what it produced."""
        ...

    def has_work(self) -> bool:
        """Whether `step` would do something."""
        ...

    @property
    def is_stalled(self) -> bool:
        """Whether the last step had nothing to run and nothing to say, though work is open."""
        ...

    def idle(self) -> bool:
        """Do a piece of background work; whether there is more of it soon."""
        ...

    def match(self, input_ids: NDArray[np.int32], cache_options: CacheOptions) -> dict[str, Any]:
        """Say what a prompt would reuse."""
        ...

    def flush(self) -> dict[str, Any]:
        """Drop all cached state."""
        ...

    def stats(self) -> dict[str, Any]:
        """Return counts for people and metrics."""
        ...

    def cache_dump(self, form: str) -> dict[str, Any]:
        """Return the tree as data, or as a picture: json, ascii, svg."""
        ...

    def update_weights(self, model_path: str, weight_version: str) -> dict[str, Any]:
        """Go on with other weights of the same architecture."""
        ...

    def abandon(self, drain_s: float, *, between_steps: bool) -> None:
        """The process ends: let copies to slower tiers end; between steps, begin what is due."""
        ...


class MatchArgs(msgspec.Struct):
    """Arguments of the operation `match`; the ids were checked where the question entered."""

    input_ids: list[int]
    salt: str = ""


class CacheDumpArgs(msgspec.Struct):
    """Arguments of the operation `cache_dump`."""

    format: str = "json"


class UpdateWeightsArgs(msgspec.Struct):
    """Arguments of the operation `update_weights`."""

    model_path: str
    weight_version: str = ""


class SchedulerLoop:
    """Moves messages between the other processes and one engine."""

    def __init__(self, child: Child, engine: Engine) -> None:
        self._child = child
        self._engine = engine
        self._open: set[str] = set()
        self._early_aborts: OrderedDict[str, str] = OrderedDict()
        self._poll_ms = IDLE_POLL_MS
        self._is_between_steps = True

    def run(self) -> None:
        """Run until the process is told to end."""
        try:
            while True:
                self.turn()
        except SystemExit:
            self._engine.abandon(DRAIN_S, between_steps=self._is_between_steps)
            raise

    def turn(self) -> None:
        """Take what has arrived, run one step, send what came of it, show life."""
        messages = self._child.receive(self._poll_ms)
        self._is_between_steps = False
        for message in messages:
            self._take(message)
        self._poll_ms = IDLE_POLL_MS
        if self._engine.has_work():
            deltas = self._engine.step()
            self._is_between_steps = True
            self._deliver(deltas)
            # What is open may wait for a grammar: do not spin on it.
            self._poll_ms = STALLED_POLL_MS if self._engine.is_stalled else 0
            if not self._engine.has_work():
                self._poll_ms = IDLE_POLL_MS
        else:
            with LEAVING.held_off():
                if self._engine.idle():
                    self._poll_ms = BACKGROUND_POLL_MS
                self._is_between_steps = True
        self._child.beat(self._engine.stats)

    def _deliver(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            if delta.finish is not None:
                self._open.discard(delta.rid)
        self._child.send(links.DETOKENIZER, deltas)

    def _take(self, message: AnyMessage) -> None:
        match message:
            case TokenizedRequest():
                self._admit(message)
            case AbortRequest():
                self._abort(message)
            case StopMatched():
                if message.rid in self._open:
                    self._engine.stop_matched(message.rid, message.matched, message.num_tokens)
            case ControlRequest():
                self._child.send(links.SERVER, [self._answer(message)])
            case _:
                raise AssertionError(f"the scheduler got a {type(message).__name__}")

    def _admit(self, request: TokenizedRequest) -> None:
        if (early := self._early_aborts.pop(request.rid, None)) is not None:
            finish = FinishReason("abort", message=early, code="aborted", http_status=499)
            delta = TokenDelta(request.rid, finish=finish, sampling=request.sampling)
            self._child.send(links.DETOKENIZER, [delta])
            return
        self._open.add(request.rid)
        self._engine.add_request(request)

    def _abort(self, message: AbortRequest) -> None:
        if message.rid in self._open:
            self._engine.abort(message.rid, message.message)
        elif message.rid:
            self._early_aborts[message.rid] = message.message
            if len(self._early_aborts) > MAX_EARLY_ABORTS:
                self._early_aborts.popitem(last=False)
        else:
            for rid in list(self._open):
                self._engine.abort(rid, message.message)

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
            case "flush":
                return self._engine.flush()
            case "stats":
                return self._engine.stats()
            case "cache_dump":
                shown = msgspec.json.decode(args, type=CacheDumpArgs)
                return self._engine.cache_dump(shown.format)
            case "update_weights":
                wanted = msgspec.json.decode(args, type=UpdateWeightsArgs)
                return self._engine.update_weights(wanted.model_path, wanted.weight_version)
            case "match":
                asked = msgspec.json.decode(args, type=MatchArgs)
                ids = np.asarray(asked.input_ids, dtype=np.int32)
                return self._engine.match(ids, CacheOptions(salt=asked.salt))
            case _:
                raise InvalidRequestError(f"unknown operation {op!r}")


class LoadProgress:
    """Logs how far the weights are, every few seconds, and shows life while they load."""

    def __init__(self, child: Child, clock: Clock) -> None:
        self._child = child
        self._clock = clock
        self._next_line = clock.monotonic() + PROGRESS_INTERVAL_S

    def __call__(self, done_bytes: int, all_bytes: int, tensor: str) -> None:
        """Take note of a tensor that was read."""
        self._child.beat()
        now = self._clock.monotonic()
        if now < self._next_line:
            return
        self._next_line = now + PROGRESS_INTERVAL_S
        percent = 100 * done_bytes // max(all_bytes, 1)
        log.info("weights: %d %% of %d MiB (%s)", percent, all_bytes >> 20, tensor)


def _log_events(path: str) -> None:
    try:
        events.log_to_file(path)
    except OSError as error:
        raise InvalidRequestError(f"--log-events {path}: {error.strerror or error}") from error


def start(child: Child) -> Callable[[], None]:
    """Load the model and return the loop."""
    # Imported here, so that the module can be used without torch.
    from statewise.runtime.engine.build import build_runtime

    clock = SystemClock()
    if child.args.log_events:
        _log_events(child.args.log_events)
    log.info("loading %s", child.args.model_path)
    started = clock.monotonic()
    built = build_runtime(child.args, LoadProgress(child, clock))
    core = built.core(clock)
    settle_memory()
    log.info("loaded in %.1f s", clock.monotonic() - started)
    child.announce({**built.info(core), "lines": built.start_log(core)})
    return SchedulerLoop(child, core).run


if __name__ == "__main__":
    child_main(start)
