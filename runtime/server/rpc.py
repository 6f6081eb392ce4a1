"""The RPC endpoint for outside clients: one ROUTER socket (docs/rpc.md).

    client DEALER --GenerateRequest--> ROUTER     TextDelta ... the last with `finish` set
                  --AbortRequest-->               (the request's last TextDelta says so)
                  --ControlRequest-->             ControlReply

Off loopback only clients with a known CURVE key are let in. A client that is gone is noticed when
something is sent to it, and its requests are aborted.

This module does not run requests: the broker does.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from statewise.runtime.config import ServerArgs
from statewise.runtime.errors import InvalidRequestError, OperatingError
from statewise.runtime.messages import (
    AbortRequest,
    AnyMessage,
    ControlReply,
    ControlRequest,
    FinishReason,
    GenerateRequest,
    TextDelta,
    decode,
    encode,
)
from statewise.runtime.server import links
from statewise.runtime.server import requests as checks
from statewise.runtime.server.broker import Reply
from statewise.runtime.server.service import Service

MAX_UNSENT_FRAMES = 10_000  # of one client; one that reads slower is given up
ENVELOPE_BYTES = 64 << 10  # what a message may hold beside its body
HEARTBEAT_MS = 2_000
SCHEDULER_OPS = ("flush", "stats", "match", "cache_dump")
TOKENIZER_OPS = ("tokenize", "detokenize")

log = logging.getLogger(__name__)


def is_loopback(endpoint: str) -> bool:
    """Whether only this machine can reach `endpoint`. Raises OperatingError on a bad one."""
    parts = urlsplit(endpoint)
    if parts.scheme == "ipc" and len(endpoint) > len("ipc://"):
        return True
    if parts.scheme != "tcp" or not parts.hostname:
        raise OperatingError(f"--rpc {endpoint}: it must be tcp://HOST:PORT or ipc://PATH")
    if parts.hostname == "localhost":
        return True
    try:
        return ipaddress.ip_address(parts.hostname).is_loopback
    except ValueError:
        return False


def check_rpc_settings(args: ServerArgs) -> None:
    """Refuse an endpoint that strangers could use. Raises OperatingError that says what to do."""
    if not args.rpc:
        return
    has_keys = bool(args.rpc_secret_key_file and args.rpc_client_keys_dir)
    keys = "--rpc-secret-key-file and --rpc-client-keys-dir (statewise rpc-keys makes them)"
    if not is_loopback(args.rpc) and not has_keys:
        raise OperatingError(f"--rpc {args.rpc} is reachable from outside: it needs {keys}")
    if args.api_key and args.rpc.startswith("tcp:") and not has_keys:
        raise OperatingError(f"--rpc {args.rpc} would bypass --api-key: it needs {keys}")


class Peer(NamedTuple):
    """Where to send: a client's routing id, and the frames (if any) before its payloads."""

    identity: bytes
    envelope: tuple[bytes, ...]


@dataclass
class OpenCall:
    """One request of a client; `reply` is there once the request was sent on."""

    task: asyncio.Task[None] | None = None
    reply: Reply | None = None


class RpcEndpoint:
    """Owner of the ROUTER socket. Lives on one event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._args = service.args
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        self._socket = self._context.socket(zmq.ROUTER)
        # By client, then by the request id the client chose; a client with nothing open is absent.
        self._open: dict[bytes, dict[str, OpenCall]] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._is_drain_due = False
        self.endpoint = self._args.rpc

    def start(self) -> None:
        """Bind and begin to answer. Raises OperatingError where the endpoint cannot be bound."""
        socket = self._socket
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, MAX_UNSENT_FRAMES)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, self._args.max_body_bytes + ENVELOPE_BYTES)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
        try:
            self._require_keys()
            socket.bind(self._args.rpc)
        except (zmq.ZMQError, OSError, ValueError) as error:
            raise OperatingError(f"--rpc {self._args.rpc}: {error}") from error
        self.endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(int(socket.getsockopt(zmq.FD)), self._drain)
        self._drain_soon()

    def _require_keys(self) -> None:
        if not self._args.rpc_secret_key_file:
            return
        public, secret = zmq.auth.load_certificate(self._args.rpc_secret_key_file)
        if secret is None:
            raise ValueError(f"{self._args.rpc_secret_key_file} holds no secret key")
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve(domain="*", location=self._args.rpc_client_keys_dir)
        self._socket.curve_publickey = public
        self._socket.curve_secretkey = secret
        self._socket.curve_server = True

    def close(self) -> None:
        """Stop answering and close the socket."""
        self._loop.remove_reader(int(self._socket.getsockopt(zmq.FD)))
        for task in self._calls:
            task.cancel()
        self._socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger=0)

    # ------------------------------------------------------------- the socket

    def _drain_soon(self) -> None:
        """Look at the socket again: its descriptor is edge-triggered, and sending eats edges."""
        if not self._is_drain_due:
            self._is_drain_due = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._is_drain_due = False
        for _ in range(64):
            if self._socket.closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(frames)
        self._drain_soon()

    def _take(self, frames: Sequence[bytes]) -> None:
        identity, *envelope, payload = frames
        peer = Peer(identity, tuple(envelope))
        try:
            message = decode(payload)
        except ValueError as error:
            self._send(peer, ControlReply("", error=str(error)))
            return
        match message:
            case GenerateRequest():
                self._generate(peer, message)
            case AbortRequest():
                self._abort(peer, message)
            case ControlRequest():
                self._start(self._control(peer, message))
            case _:
                error_text = f"{type(message).__name__} is not for clients to send"
                self._send(peer, ControlReply("", error=error_text))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return task

    def _send(self, peer: Peer, message: AnyMessage) -> bool:
        """Send to a client; False where it is gone or does not read: its requests are dropped."""
        if self._socket.closed:
            return False
        try:
            self._socket.send_multipart(
                [peer.identity, *peer.envelope, encode(message)], zmq.NOBLOCK
            )
        except zmq.ZMQError as error:
            log.info("an RPC client is gone: %s", error)
            for call in self._open.get(peer.identity, {}).values():
                if call.task is not None and call.task is not asyncio.current_task():
                    call.task.cancel()
            return False
        self._drain_soon()
        return True

    # ------------------------------------------------------------- generating

    def _generate(self, peer: Peer, request: GenerateRequest) -> None:
        mine = self._open.get(peer.identity, {})
        if request.rid in mine:
            error = f"request id {request.rid!r} is in use"
            self._send(peer, ControlReply(request.rid, error=error))
            return
        try:
            checked = checks.checked_request(request, self._service.vocab_size)
            if checked.sampling.n != 1:
                raise InvalidRequestError("'n' must be 1: send one request for each sample")
        except OperatingError as error:
            self._send(peer, TextDelta(request.rid, finish=_finish(error)))
            return
        call = OpenCall()
        self._open.setdefault(peer.identity, {})[request.rid] = call
        call.task = self._start(self._run(peer, checked, call))
        call.task.add_done_callback(lambda _task: self._forget(peer, request.rid))

    def _forget(self, peer: Peer, rid: str) -> None:
        mine = self._open[peer.identity]
        del mine[rid]
        if not mine:
            del self._open[peer.identity]

    async def _run(self, peer: Peer, request: GenerateRequest, call: OpenCall) -> None:
        arrived = msgspec.structs.replace(request, arrival=self._service.clock.wall())
        try:
            with self._service.broker.open([arrived]) as reply:
                call.reply = reply
                while deltas := await reply.next():
                    for _, delta in deltas:
                        shown = msgspec.structs.replace(delta, rid=request.rid)
                        if not self._send(peer, shown):
                            return
        except OperatingError as error:
            self._send(peer, TextDelta(request.rid, finish=_finish(error)))

    def _abort(self, peer: Peer, message: AbortRequest) -> None:
        """End one of the client's own requests (empty id: all of them)."""
        for rid, call in self._open.get(peer.identity, {}).items():
            if message.rid in ("", rid) and call.reply is not None:
                self._service.broker.abort(call.reply, message.message)

    # ------------------------------------------------------------- questions

    async def _control(self, peer: Peer, request: ControlRequest) -> None:
        try:
            args = msgspec.json.decode(request.args, type=dict[str, Any])
            result = await self._answer(request.op, args)
            reply = ControlReply(request.call_id, msgspec.json.encode(result))
        except (OperatingError, msgspec.MsgspecError) as error:
            reply = ControlReply(request.call_id, error=str(error) or type(error).__name__)
        self._send(peer, reply)

    async def _answer(self, op: str, args: dict[str, Any]) -> Any:
        broker = self._service.broker
        if op == "ping":
            return {"status": self._service.state}
        if op == "match":
            args = await self._match_args(args)
        if op == "update_weights":
            return await self._service.update_weights(
                str(args.get("model_path", "")), str(args.get("weight_version", ""))
            )
        if op in SCHEDULER_OPS:
            return await broker.call(links.SCHEDULER, op, args)
        if op in TOKENIZER_OPS:
            return await broker.call(links.TOKENIZER, op, args)
        known = ", ".join(("ping", "update_weights", *SCHEDULER_OPS, *TOKENIZER_OPS))
        raise InvalidRequestError(f"unknown operation {op!r}; known: {known}")

    async def _match_args(self, args: dict[str, Any]) -> dict[str, Any]:
        """Turn a question about a text into one about token ids, and check them."""
        ids = args.get("input_ids")
        text = args.get("text")
        if (ids is None) == (text is None):
            raise InvalidRequestError("exactly one of 'text' and 'input_ids' is needed")
        if text is not None:
            if not isinstance(text, str):
                raise InvalidRequestError("'text' must be a string")
            answer = await self._service.broker.call(links.TOKENIZER, "tokenize", {"texts": [text]})
            ids = answer["tokens"][0]
        if not isinstance(ids, list):
            raise InvalidRequestError("'input_ids' must be a list of token ids")
        checks.checked_ids("input_ids", ids, self._service.vocab_size)
        return {"input_ids": ids, "salt": str(args.get("salt", ""))}


def _finish(error: OperatingError) -> FinishReason:
    return FinishReason("error", message=str(error), code=error.code, http_status=error.http_status)
