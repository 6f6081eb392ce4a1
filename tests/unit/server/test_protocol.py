"""The bounds of one HTTP connection, on a real socket and an application of a few lines."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn

from statewise.runtime.server.http import json_io, protocol

BIG = b"x" * (1 << 20)
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class App:
    """Answers "ok", or a megabyte at a time until the client is gone."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/endless":
            asking = asyncio.ensure_future(self._until_gone(receive))
            while not asking.done():
                await send({"type": "http.response.body", "body": BIG, "more_body": True})
                await asyncio.sleep(0)
            return
        await send({"type": "http.response.body", "body": b"ok"})

    async def _until_gone(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone.set()


def run(body: Callable[[int, App], Awaitable[None]]) -> None:
    """Serve on a free port while `body` runs with it."""

    async def serve() -> None:
        app = App()
        config = uvicorn.Config(
            app, http=protocol.BoundedHttpProtocol, lifespan="off", log_config=None
        )
        server = uvicorn.Server(config)
        listener = socket.create_server(("127.0.0.1", 0))
        task = asyncio.create_task(server._serve(sockets=[listener]))
        try:
            await asyncio.wait_for(body(listener.getsockname()[1], app), 20)
        finally:
            server.should_exit = server.force_exit = True
            await task

    asyncio.run(serve())


async def connect(port: int) -> Streams:
    return await asyncio.open_connection("127.0.0.1", port)


async def answer(streams: Streams) -> bytes:
    """Everything until the server closes."""
    data = await streams[0].read()
    streams[1].close()
    return data


def test_a_head_that_never_ends_is_refused() -> None:
    async def body(port: int, _app: App) -> None:
        streams = await connect(port)
        streams[1].write(b"GET / HTTP/1.1\r\nx: " + b"y" * (protocol.MAX_HEAD_BYTES + 1))
        data = await answer(streams)
        assert data.startswith(b"HTTP/1.1 431 ")
        assert b"exceeds 65536 bytes" in data

    run(body)


def test_a_large_body_is_not_a_large_head() -> None:
    async def body(port: int, _app: App) -> None:
        reader, writer = await connect(port)
        for _ in range(2):  # on one connection: the count begins anew
            size = 2 * protocol.MAX_HEAD_BYTES
            writer.write(b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % size)
            writer.write(b"z" * size)
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
            await reader.readuntil(b"0\r\n\r\n")
        writer.close()

    run(body)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", b""),
        (b"GET / HT", b"HTTP/1.1 408 "),
        (b"GET / HTTP/1.1\r\n\r\nGET / HT", b"HTTP/1.1 408 "),
    ],
)
def test_a_slow_head_is_waited_for_a_while(
    monkeypatch: pytest.MonkeyPatch, sent: bytes, status: bytes
) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.1)

    async def body(port: int, _app: App) -> None:
        streams = await connect(port)
        streams[1].write(sent)
        data = await answer(streams)
        assert data.startswith(b"HTTP/1.1 200") == sent.endswith(b"\r\n\r\nGET / HT")
        assert (status in data) if status else (data == b"")

    run(body)


def test_a_client_that_never_reads_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "STALL_TIMEOUT_S", 0.1)

    async def body(port: int, app: App) -> None:
        client = socket.create_connection(("127.0.0.1", port))
        client.sendall(b"GET /endless HTTP/1.1\r\n\r\n")
        await app.gone.wait()
        client.close()

    run(body)


@pytest.mark.slow
def test_a_client_that_reads_slowly_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "STALL_TIMEOUT_S", 1.0)

    async def body(port: int, app: App) -> None:
        reader, writer = await connect(port)
        writer.write(b"GET /endless HTTP/1.1\r\n\r\n")
        for _ in range(15):
            await reader.readexactly(1 << 20)
            await asyncio.sleep(0.1)
        assert not app.gone.is_set()
        writer.close()
        await app.gone.wait()

    run(body)


def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from starlette.requests import Request

    monkeypatch.setattr(json_io, "BODY_TIMEOUT_S", 0.05)

    async def never() -> Any:
        await asyncio.Event().wait()

    async def read() -> None:
        await json_io.read_body(Request({"type": "http", "headers": []}, never), 100)

    with pytest.raises(json_io.BodyTimeoutError, match=r"within 0\.05 s") as caught:
        asyncio.run(read())
    assert (caught.value.code, caught.value.http_status) == ("request_timeout", 408)


def test_a_client_that_goes_on_sending_gets_to_read_why_it_was_refused() -> None:
    """Closing amid what it sends would reset the connection, and the answer would be lost."""

    async def body(port: int, _app: App) -> None:
        reader, writer = await connect(port)
        writer.write(b"GET / HTTP/1.1\r\n")
        for i in range(64):
            writer.write(b"x%d: " % i + b"y" * (64 << 10) + b"\r\n")
            await writer.drain()
        data = await reader.read()
        assert data.startswith(b"HTTP/1.1 431 ")
        assert data.count(b"HTTP/1.1") == 1
        writer.close()

    run(body)


async def send_for_ever(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"y" * 4096)
        await writer.drain()
        await asyncio.sleep(0.01)


def test_a_refused_client_does_not_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "LINGER_S", 0.05)

    async def body(port: int, _app: App) -> None:
        reader, writer = await connect(port)
        writer.write(b"GET / HTTP/1.1\r\nx: " + b"y" * (protocol.MAX_HEAD_BYTES + 1))
        assert (await reader.read()).startswith(b"HTTP/1.1 431 ")
        with pytest.raises(ConnectionError):  # it is gone, though this side never closed
            await send_for_ever(writer)
        writer.close()

    run(body)
