"""The measuring client reads every kind of body, times events, and hangs up when told to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import wire

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\n"
EVENTS = OK + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def _ask(answer: bytes, **options: Any) -> tuple[wire.Reply, bytes]:
    """Serve `answer` once; returns the client's reply and the request as the server saw it."""
    seen = bytearray()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        seen.extend(head + await reader.readexactly(length))
        writer.write(answer)
        await writer.drain()
        writer.close()

    async def run() -> wire.Reply:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        async with server:
            to = wire.Address("127.0.0.1", server.sockets[0].getsockname()[1])
            return await wire.call(to, "POST", "/x", {"a": 1}, timeout_s=10, **options)

    return asyncio.run(run()), bytes(seen)


@pytest.mark.parametrize(
    "body",
    [
        b"Content-Length: 7\r\n\r\n{\"b\":2}",
        b"Transfer-Encoding: chunked\r\n\r\n" + _chunk(b'{"b"') + _chunk(b":2}") + _chunk(b""),
        b"Connection: close\r\n\r\n{\"b\":2}",
    ],
    ids=["length", "chunked", "until closed"],
)  # fmt: skip
def test_body(body: bytes) -> None:
    reply, request = _ask(OK + body)
    assert (reply.status, reply.json()) == (200, {"b": 2})
    assert request.startswith(b"POST /x HTTP/1.1\r\n")
    assert request.endswith(b'{"a": 1}')


def test_status_and_headers() -> None:
    reply, _ = _ask(b"HTTP/1.1 503 Busy\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n")
    assert reply.status == 503
    assert reply.headers["retry-after"] == "1"


def test_events_are_split_where_chunks_are_not() -> None:
    pieces = [b'data: {"n": 1}\n\ndata: {"n', b'": 2}\n\n', b"data: [DONE]\n\n", b""]
    reply, _ = _ask(EVENTS + b"".join(map(_chunk, pieces)))
    assert [data for _at, data in reply.events] == [b'{"n": 1}', b'{"n": 2}', b"[DONE]"]
    times = [at for at, _data in reply.events]
    assert times == sorted(times)
    assert reply.last_event == {"n": 2}


def test_on_event_and_hanging_up() -> None:
    calls = []
    pieces = [b"data: 1\n\n", b"data: 2\n\n", b"data: 3\n\n"]
    reply, _ = _ask(
        EVENTS + b"".join(map(_chunk, pieces)),
        hang_up_after=2,
        on_event=lambda: calls.append(None),
    )
    assert len(reply.events) == 2
    assert len(calls) == 2


def test_a_connection_that_breaks_is_an_error() -> None:
    with pytest.raises(asyncio.IncompleteReadError):
        _ask(OK + b"Content-Length: 100\r\n\r\nshort")
    with pytest.raises(asyncio.IncompleteReadError):
        _ask(EVENTS + _chunk(b"data: 1\n\n") + b"20\r\nhalf")
