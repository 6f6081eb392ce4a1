"""Clients of a server's RPC endpoint (docs/rpc.md): the same calls, blocking or awaitable.

    with sw.RpcClient("tcp://127.0.0.1:30001") as client:
        client.generate("Once upon a time", {"max_new_tokens": 16})["text"]
        for answer in client.stream("Once upon a time"):
            print(answer["text"])
        client.match("Once upon a time")          what would be reused, by state group

Answers are those of POST /generate. What a message means is decided once, in `Session`, which has
no socket; the two clients only carry frames. A blocking client belongs to one thread.

This module does not retry: a lost server is an error after `timeout_s` of silence.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
import zmq.asyncio
import zmq.auth

from statewise.frontend.errors import BackendError

if TYPE_CHECKING:
    from statewise.runtime.messages import ControlReply, TextDelta
    from statewise.runtime.response import ResponseBuilder

_MAX_ID = 1 << 31
_LINGER_MS = 200
# A connection that fails in its handshake is given up for good: a send would wait for ever.
_REFUSED = "the server refused the connection: it wants other keys"
_ABORTED = "the client stopped reading"


@dataclass(frozen=True)
class Keys:
    """CURVE: the server's public key file and this client's secret key file."""

    server_public: str | Path
    client_secret: str | Path

    def apply(self, socket: zmq.Socket[Any]) -> None:
        """Make a socket use the keys. Raises ValueError where a file holds no such key."""
        server_public, _ = zmq.auth.load_certificate(self.server_public)
        public, secret = zmq.auth.load_certificate(self.client_secret)
        if secret is None:
            raise ValueError(f"{self.client_secret} holds no secret key")
        socket.curve_serverkey = server_public
        socket.curve_publickey = public
        socket.curve_secretkey = secret


class Pending:
    """One request or question that was sent: what has come back and was not read yet."""

    def __init__(self, builder: ResponseBuilder | None) -> None:
        self.builder = builder
        self.arrived: deque[TextDelta | ControlReply] = deque()


class Session:
    """What goes out and what comes in, without a socket."""

    def __init__(self) -> None:
        # Imported here: the language must not load the runtime until a client is made.
        from statewise.runtime import messages

        self._messages = messages
        self._pending: dict[str, Pending] = {}
        self._num_sent = 0

    def generate(
        self, prompt: str | Sequence[int], sampling_params: dict[str, Any], options: dict[str, Any]
    ) -> tuple[str, bytes]:
        """Return a new request's id and its frame. Raises BackendError on bad parameters."""
        from statewise.runtime.response import ResponseBuilder

        messages = self._messages
        rid = self._new_id()
        logprob, cache, priority = self._options(options)
        request = messages.GenerateRequest(
            rid=rid,
            sampling=_sampling(sampling_params),
            text=prompt if isinstance(prompt, str) else None,
            input_ids=None if isinstance(prompt, str) else messages.pack_ids(list(prompt)),
            logprob=logprob,
            cache=cache,
            priority=priority,
            stream=True,
        )
        self._pending[rid] = Pending(ResponseBuilder(rid, logprob, time.monotonic()))
        return rid, messages.encode(request)

    def _options(self, options: dict[str, Any]) -> tuple[Any, Any, int]:
        rest = dict(options)
        logprob = self._messages.LogprobOptions(
            enabled=bool(rest.pop("return_logprob", False)),
            start=rest.pop("logprob_start_len", -1),
            top=rest.pop("top_logprobs_num", 0),
            token_ids=tuple(rest.pop("token_ids_logprob", ())),
            with_text=bool(rest.pop("return_text_in_logprobs", False)),
        )
        cache = self._messages.CacheOptions(
            salt=rest.pop("cache_salt", ""),
            checkpoint=bool(rest.pop("checkpoint", False)),
            exact=bool(rest.pop("exact", False)),
        )
        priority = rest.pop("priority", 0)
        if rest:
            raise TypeError(f"unknown options: {', '.join(sorted(rest))}")
        return logprob, cache, priority

    def question(self, op: str, args: dict[str, Any]) -> tuple[str, bytes]:
        """Return a question's id and its frame."""
        call_id = self._new_id()
        self._pending[call_id] = Pending(None)
        body = msgspec.json.encode(args)
        return call_id, self._messages.encode(self._messages.ControlRequest(call_id, op, body))

    def abort(self, rid: str) -> bytes:
        """Forget a request; returns the frame that ends it at the server."""
        self.forget(rid)
        return self._messages.encode(self._messages.AbortRequest(rid, _ABORTED))

    def forget(self, key: str) -> None:
        """Drop what belongs to a request or question; later messages about it are ignored."""
        self._pending.pop(key, None)

    def feed(self, frame: bytes) -> str | None:
        """Take a frame from the server; returns the id it belongs to, None if to nobody here.

        Raises BackendError for a complaint that belongs to no request.
        """
        try:
            message = self._messages.decode(frame)
        except ValueError as error:
            raise BackendError(f"the server sent something else: {error}") from error
        if isinstance(message, self._messages.TextDelta):
            key = message.rid
        elif isinstance(message, self._messages.ControlReply):
            key = message.call_id
            if not key:
                raise BackendError(message.error)
        else:
            raise BackendError(f"the server sent a {type(message).__name__}")
        pending = self._pending.get(key)
        if pending is None:
            return None
        pending.arrived.append(message)
        return key

    def take_answer(self, rid: str) -> tuple[dict[str, Any], bool] | None:
        """Merge what has arrived for a request: (answer so far, whether it is the last).

        None where nothing has. Raises BackendError if the request failed.
        """
        pending = self._pending[rid]
        builder = pending.builder
        assert builder is not None
        if not pending.arrived:
            return None
        while pending.arrived:
            message = pending.arrived.popleft()
            if isinstance(message, self._messages.ControlReply):
                raise BackendError(message.error)
            builder.add(message)
        finish = builder.finish
        if finish is not None and finish.kind == "error":
            raise BackendError(finish.message, status=finish.http_status, code=finish.code)
        return builder.response(time.monotonic()), finish is not None

    def take_reply(self, call_id: str) -> tuple[Any] | None:
        """Return a question's answer in a tuple of one, None where it has not come.

        Raises BackendError if the server could not answer.
        """
        pending = self._pending[call_id]
        if not pending.arrived:
            return None
        reply = pending.arrived.popleft()
        assert isinstance(reply, self._messages.ControlReply)
        if reply.error:
            raise BackendError(reply.error)
        return (msgspec.json.decode(reply.result),)

    def _new_id(self) -> str:
        self._num_sent += 1
        return str(self._num_sent)


def _sampling(fields: dict[str, Any]) -> Any:
    from statewise.runtime.errors import InvalidRequestError
    from statewise.runtime.sampling_params import normalized

    try:
        return normalized(fields, _MAX_ID)
    except InvalidRequestError as error:
        raise BackendError(str(error), status=400, code=error.code) from error


def _match_args(prompt: str | Sequence[int], salt: str) -> dict[str, Any]:
    asked: dict[str, Any] = {"text": prompt} if isinstance(prompt, str) else {}
    return {**(asked or {"input_ids": list(prompt)}), "salt": salt}


class RpcClient:
    """A blocking client of one RPC endpoint, for one thread. Streams may be interleaved."""

    def __init__(
        self, endpoint: str, *, keys: Keys | None = None, timeout_s: float | None = 120.0
    ) -> None:
        """`timeout_s`: silence after which the server counts as lost; None waits for ever."""
        self._session = Session()
        self._timeout_s = timeout_s
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket = context.socket(zmq.DEALER)
        if timeout_s is not None:
            self._socket.setsockopt(zmq.RCVTIMEO, int(timeout_s * 1000))
        _connect(self._socket, endpoint, keys)

    def generate(
        self,
        prompt: str | Sequence[int],
        sampling_params: dict[str, Any] | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Generate; returns the whole answer. Options are the fields of POST /generate.

        Raises BackendError where the server refuses, fails, or is silent.
        """
        answer: dict[str, Any] = {}
        for answer in self.stream(prompt, sampling_params, **options):  # noqa: B007
            pass
        return answer

    def stream(
        self,
        prompt: str | Sequence[int],
        sampling_params: dict[str, Any] | None = None,
        **options: Any,
    ) -> Iterator[dict[str, Any]]:
        """Generate; yields the answer so far each time it has grown.

        Leaving the iterator early aborts the request. Raises as `generate` does.
        """
        rid, frame = self._session.generate(prompt, sampling_params or {}, options)
        is_last = False
        try:
            self._send(frame)
            while not is_last:
                taken = self._session.take_answer(rid)
                if taken is None:
                    self._receive()
                    continue
                answer, is_last = taken
                yield answer
        finally:
            if is_last:
                self._session.forget(rid)
            elif not self._socket.closed:
                with suppress(BackendError):
                    self._send(self._session.abort(rid))

    def match(self, prompt: str | Sequence[int], *, cache_salt: str = "") -> dict[str, Any]:
        """Return what a prompt would reuse now, by state group, without running it."""
        return dict(self.ask("match", _match_args(prompt, cache_salt)))

    def flush(self) -> dict[str, Any]:
        """Drop all cached state that no request is using."""
        return dict(self.ask("flush"))

    def stats(self) -> dict[str, Any]:
        """Return the engine's counters and gauges."""
        return dict(self.ask("stats"))

    def update_weights(self, model_path: str, *, weight_version: str = "") -> dict[str, Any]:
        """Go on with other weights of the same architecture; running requests go on with them."""
        asked = {"model_path": model_path, "weight_version": weight_version}
        return dict(self.ask("update_weights", asked))

    def ask(self, op: str, args: dict[str, Any] | None = None) -> Any:
        """Ask a question by its name (docs/rpc.md). Raises BackendError without an answer."""
        call_id, frame = self._session.question(op, args or {})
        try:
            self._send(frame)
            while (reply := self._session.take_reply(call_id)) is None:
                self._receive()
            return reply[0]
        finally:
            self._session.forget(call_id)

    def _send(self, frame: bytes) -> None:
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            raise BackendError(_REFUSED) from None

    def _receive(self) -> None:
        """Wait for one frame and hand it to whoever it belongs to."""
        try:
            self._session.feed(self._socket.recv())
        except zmq.Again:
            message = f"the server has been silent for {self._timeout_s:g} s"
            raise BackendError(message) from None

    def close(self) -> None:
        """Close the connection; what is unsent may leave in the background. Never waits."""
        self._socket.close()

    def __enter__(self) -> RpcClient:
        """Return the client."""
        return self

    def __exit__(self, *_exc: object) -> None:
        """Close the connection."""
        self.close()


class AsyncRpcClient:
    """The same for one event loop; calls may run at the same time."""

    def __init__(
        self, endpoint: str, *, keys: Keys | None = None, timeout_s: float | None = 120.0
    ) -> None:
        """`timeout_s`: silence after which the server counts as lost; None waits for ever."""
        self._session = Session()
        self._timeout_s = timeout_s
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._news: dict[str, asyncio.Event] = {}
        self._failure: BackendError | None = None
        self._reader: asyncio.Task[None] | None = None
        _connect(self._socket, endpoint, keys)

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling_params: dict[str, Any] | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """See `RpcClient.generate`."""
        answer: dict[str, Any] = {}
        async for answer in self.stream(prompt, sampling_params, **options):  # noqa: B007
            pass
        return answer

    async def stream(
        self,
        prompt: str | Sequence[int],
        sampling_params: dict[str, Any] | None = None,
        **options: Any,
    ) -> AsyncIterator[dict[str, Any]]:
        """See `RpcClient.stream`."""
        rid, frame = self._session.generate(prompt, sampling_params or {}, options)
        is_last = False
        try:
            await self._send(rid, frame)
            while not is_last:
                taken = self._session.take_answer(rid)
                if taken is None:
                    await self._wait(rid)
                    continue
                answer, is_last = taken
                yield answer
        finally:
            del self._news[rid]
            if is_last:
                self._session.forget(rid)
            elif not self._socket.closed:
                with suppress(zmq.Again):
                    await self._socket.send(self._session.abort(rid), zmq.NOBLOCK)

    async def match(self, prompt: str | Sequence[int], *, cache_salt: str = "") -> dict[str, Any]:
        """See `RpcClient.match`."""
        return dict(await self.ask("match", _match_args(prompt, cache_salt)))

    async def flush(self) -> dict[str, Any]:
        """See `RpcClient.flush`."""
        return dict(await self.ask("flush"))

    async def stats(self) -> dict[str, Any]:
        """See `RpcClient.stats`."""
        return dict(await self.ask("stats"))

    async def update_weights(self, model_path: str, *, weight_version: str = "") -> dict[str, Any]:
        """See `RpcClient.update_weights`."""
        asked = {"model_path": model_path, "weight_version": weight_version}
        return dict(await self.ask("update_weights", asked))

    async def ask(self, op: str, args: dict[str, Any] | None = None) -> Any:
        """See `RpcClient.ask`."""
        call_id, frame = self._session.question(op, args or {})
        try:
            await self._send(call_id, frame)
            while (reply := self._session.take_reply(call_id)) is None:
                await self._wait(call_id)
            return reply[0]
        finally:
            del self._news[call_id]
            self._session.forget(call_id)

    async def _send(self, key: str, frame: bytes) -> None:
        if self._reader is None:
            self._reader = asyncio.create_task(self._read())
        self._news[key] = asyncio.Event()
        try:
            await self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            raise BackendError(_REFUSED) from None

    async def _wait(self, key: str) -> None:
        """Wait until something about `key` has arrived, or the connection has failed."""
        if self._failure is not None:
            raise self._failure
        event = self._news[key]
        try:
            await asyncio.wait_for(event.wait(), self._timeout_s)
        except TimeoutError:
            message = f"the server has been silent for {self._timeout_s:g} s"
            raise BackendError(message) from None
        event.clear()

    async def _read(self) -> None:
        """Hand every frame to whoever it belongs to."""
        while True:
            frame = await self._socket.recv()
            try:
                key = self._session.feed(frame)
            except BackendError as error:
                self._failure = error
                key = None
            for one in [key] if key is not None else list(self._news if self._failure else ()):
                self._news[one].set()

    async def close(self) -> None:
        """Close the connection; what is unsent may leave in the background."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        self._socket.close()

    async def __aenter__(self) -> AsyncRpcClient:
        """Return the client."""
        return self

    async def __aexit__(self, *_exc: object) -> None:
        """Close the connection."""
        await self.close()


def _connect(socket: zmq.Socket[Any], endpoint: str, keys: Keys | None) -> None:
    """Connect. Contexts are the process's own and never ended: ending one can wait for ever."""
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, 0)  # so that a send fails only where there is no connection
    if keys is not None:
        keys.apply(socket)
    socket.connect(endpoint)
