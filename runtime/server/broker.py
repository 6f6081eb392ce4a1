"""Every open request of the server, and the way messages reach whoever waits for them.

    open(requests) -> Reply;  TextDelta -> Reply.put -> reader;  exactly one terminal each

A request is known here under a wire id made here, never under the id a client chose: two requests
may share a client's id, and a delta that arrives late (after a process died, say) finds nobody. A
reader that goes away leaves its requests in the table, aborted, until their terminal delta comes.

This module does not start processes (supervisor.py) and does not know HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import msgspec
import zmq

from statewise.runtime.clock import Clock, fresh_id
from statewise.runtime.errors import (
    InvalidRequestError,
    OperatingError,
    RefusedError,
    WorkerDiedError,
)
from statewise.runtime.messages import (
    AbortRequest,
    AnyMessage,
    Connect,
    ControlReply,
    ControlRequest,
    FinishReason,
    GenerateRequest,
    Heartbeat,
    Ready,
    TextDelta,
)
from statewise.runtime.server import links

DEFAULT_CALL_TIMEOUT_S = 30.0


class OpenRequest:
    """One entry of the table."""

    __slots__ = ("arrived", "client_rid", "first_text", "index", "reply")

    def __init__(self, client_rid: str, index: int, reply: Reply, arrived: float) -> None:
        self.client_rid = client_rid
        self.index = index
        self.reply = reply
        self.arrived = arrived  # monotonic seconds
        self.first_text = -1.0  # monotonic seconds of the first token; -1: none yet


class Reply:
    """What comes back for a group of requests opened together. One reader."""

    def __init__(self, num_requests: int) -> None:
        self.wire_rids: list[str] = []
        self._num_unfinished = num_requests
        self._arrived: list[tuple[int, TextDelta]] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, index: int, delta: TextDelta) -> None:
        """Hand over a delta of request `index` of the group."""
        if delta.finish is not None:
            self._num_unfinished -= 1
        self._arrived.append((index, delta))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> list[tuple[int, TextDelta]]:
        """Wait for deltas; an empty list means that every request of the group has ended."""
        while not self._arrived and self._num_unfinished:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        arrived, self._arrived = self._arrived, []
        return arrived


class Observer(Protocol):
    """Who is told about requests as they come and go."""

    def opened(self) -> None:
        """Note that a request was accepted."""
        ...

    def first_token(self, wait_s: float) -> None:
        """Note that a request's first token arrived after `wait_s`."""
        ...

    def ended(self, delta: TextDelta, duration_s: float) -> None:
        """Note that a request's terminal delta arrived after `duration_s`."""
        ...


class Broker:
    """Owner of the open-request table and of the server's sockets. Lives on one event loop."""

    def __init__(self, inbox_address: str, max_open: int, clock: Clock, observer: Observer) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox = links.Inbox(self._context, inbox_address)
        self._outboxes: dict[str, links.Outbox] = {}
        self._open: dict[str, OpenRequest] = {}
        self._calls: dict[str, tuple[str, asyncio.Future[Any]]] = {}
        self._max_open = max_open
        self._clock = clock
        self._observer = observer
        self._num_opened = 0
        self._epoch = fresh_id(num_bytes=4)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.refusal: str | None = "the server is starting"
        self.on_ready: Callable[[Ready], None] = lambda _message: None
        self.on_heartbeat: Callable[[Heartbeat], None] = lambda _message: None

    # ------------------------------------------------------------- life

    def start(self) -> None:
        """Begin to read the inbox on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._inbox.fd, self._drain)
        self._loop.call_soon(self._drain)

    def close(self) -> None:
        """Stop reading and close every socket; what is unsent is dropped."""
        if self._loop is not None:
            self._loop.remove_reader(self._inbox.fd)
            self._loop = None
        self._inbox.close()
        for outbox in self._outboxes.values():
            outbox.close()
        self._outboxes = {}  # whoever ends from now on has nobody to tell
        self._context.destroy(linger=0)

    @property
    def num_open(self) -> int:
        """Requests without a terminal delta yet, aborted ones included."""
        return len(self._open)

    # ------------------------------------------------------------- requests

    @contextmanager
    def open(self, requests: Sequence[GenerateRequest]) -> Iterator[Reply]:
        """Send `requests` and hold their `Reply`; on exit, whatever has not ended is aborted.

        The requests' `rid`s are the client's and may repeat. Raises RefusedError while the server
        does not serve or is full.
        """
        self._check_room(len(requests))
        reply = Reply(len(requests))
        now = self._clock.monotonic()
        outgoing: list[AnyMessage] = []
        for index, request in enumerate(requests):
            self._num_opened += 1
            wire_rid = f"{self._epoch}-{self._num_opened}"
            entry = OpenRequest(request.rid, index, reply, now)
            self._open[wire_rid] = entry
            reply.wire_rids.append(wire_rid)
            outgoing.append(msgspec.structs.replace(request, rid=wire_rid))
            self._observer.opened()
        self._outboxes[links.TOKENIZER].send(outgoing)
        try:
            yield reply
        finally:
            self._abort(reply.wire_rids, "the client went away")

    def _check_room(self, num_requests: int) -> None:
        if self.refusal is not None:
            raise RefusedError(self.refusal)
        if len(self._open) + num_requests > self._max_open:
            raise RefusedError(
                f"{len(self._open)} requests are open and at most {self._max_open} may be; "
                "retry, or raise --max-queued-requests"
            )

    def abort(self, reply: Reply, message: str) -> None:
        """End the requests of one group; their reader gets the terminal deltas."""
        self._abort(reply.wire_rids, message)

    def abort_client_rid(self, client_rid: str, message: str) -> int:
        """End the requests a client named `client_rid` (empty: all); returns how many."""
        rids = [rid for rid, entry in self._open.items() if client_rid in ("", entry.client_rid)]
        self._abort(rids, message)
        return len(rids)

    def _abort(self, wire_rids: Sequence[str], message: str) -> None:
        """Ask for the end of those still open: at the tokenizer, if it is still there, too."""
        aborts = [AbortRequest(rid, message) for rid in wire_rids if rid in self._open]
        if aborts:
            self._send(links.TOKENIZER, aborts)
            self._send(links.SCHEDULER, aborts)

    def _send(self, process: str, messages: Sequence[AnyMessage]) -> None:
        outbox = self._outboxes.get(process)
        if outbox is not None:
            outbox.send(messages)

    # ------------------------------------------------------------- questions

    async def call(
        self, process: str, op: str, args: Any, timeout_s: float = DEFAULT_CALL_TIMEOUT_S
    ) -> Any:
        """Ask a process; returns the decoded JSON answer.

        Raises InvalidRequestError with the process's message, WorkerDiedError when the process
        dies meanwhile, RefusedError when it does not answer in time or is not there.
        """
        if process not in self._outboxes or self.refusal is not None:
            raise RefusedError(self.refusal or f"the {process} is not running")
        call_id = fresh_id()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = (process, future)
        request = ControlRequest(call_id, op, msgspec.json.encode(args))
        self._outboxes[process].send([request])
        try:
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise RefusedError(f"the {process} did not answer {op!r} in {timeout_s:g} s") from None
        finally:
            self._calls.pop(call_id, None)

    # ------------------------------------------------------------- processes

    def process_started(self, process: str, address: str) -> None:
        """Send to `process` at `address` from now on, and tell its peers to."""
        old = self._outboxes.get(process)
        if old is None:
            self._outboxes[process] = links.Outbox(self._context, address)
            return
        old.reconnect(address)
        for peer in self._outboxes:
            if peer != process and process in links.PEERS[peer]:
                self._send(peer, [Connect(process, address)])

    def process_died(self, process: str, reason: str) -> None:
        """End every open request and call with one error; abort them in the living processes."""
        aborts = [AbortRequest(rid, reason) for rid in self._open]
        for peer in self._outboxes:
            if peer != process and aborts:
                self._send(peer, aborts)
        self._end(WorkerDiedError(reason), process)

    def end_all(self, reason: str) -> None:
        """End every open request and call here and now, whatever the processes still do.

        Readers get a terminal delta with `reason` as a refusal (503).
        """
        self._end(RefusedError(reason))

    def _end(self, error: OperatingError, process: str = "") -> None:
        """End all requests, and the calls to one process, or to all."""
        finish = FinishReason(
            "error", message=str(error), code=error.code, http_status=error.http_status
        )
        for rid in list(self._open):
            self._deliver(TextDelta(rid, finish=finish))
        for asked, future in self._calls.values():
            if process in ("", asked) and not future.done():
                future.set_exception(type(error)(str(error)))

    # ------------------------------------------------------------- the inbox

    def _drain(self) -> None:
        """Take what has arrived, and look again, after others ran, until nothing comes.

        The descriptor is edge-triggered: a message left unread would not be announced again, so
        the next look is arranged even where a message turns out to be a programmer error.
        """
        is_empty = False
        if self._loop is None:
            return  # closed since this look was arranged
        try:
            messages = self._inbox.receive()
            is_empty = not messages
            for message in messages:
                self._take(message)
        finally:
            if not is_empty and self._loop is not None:
                self._loop.call_soon(self._drain)

    def _take(self, message: AnyMessage) -> None:
        match message:
            case TextDelta():
                self._deliver(message)
            case ControlReply():
                self._answer(message)
            case Ready():
                self.on_ready(message)
            case Heartbeat():
                self.on_heartbeat(message)
            case _:
                raise AssertionError(f"the server got a {type(message).__name__}")

    def _deliver(self, delta: TextDelta) -> None:
        entry = self._open.get(delta.rid)
        if entry is None:
            return  # it has ended here already
        if delta.token_ids and entry.first_text < 0:
            entry.first_text = self._clock.monotonic()
            self._observer.first_token(entry.first_text - entry.arrived)
        if delta.finish is not None:
            del self._open[delta.rid]
            self._observer.ended(delta, self._clock.monotonic() - entry.arrived)
        entry.reply.put(entry.index, delta)

    def _answer(self, reply: ControlReply) -> None:
        _, future = self._calls.get(reply.call_id, (None, None))
        if future is None or future.done():
            return
        if reply.error:
            future.set_exception(InvalidRequestError(reply.error))
        else:
            future.set_result(msgspec.json.decode(reply.result))
