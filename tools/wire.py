"""A small asyncio HTTP client, so that a measurement holds little of the client's own cost.

One connection a request; bodies by content length or in chunks; server-sent events with the time
at which each arrived. It follows no redirects, knows no TLS, and is not a general client.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

READ_LIMIT_BYTES = 64 << 20


@dataclass
class Reply:
    """What came back. `events` are (seconds since the request was sent, payload) of a stream."""

    status: int
    headers: dict[str, str]
    body: bytes = b""
    events: list[tuple[float, bytes]] = field(default_factory=list)
    seconds: float = 0.0

    def json(self) -> Any:
        """Return the decoded body."""
        return json.loads(self.body)

    @property
    def last_event(self) -> Any:
        """The last event that holds data (not the closing mark), decoded."""
        payloads = [data for _at, data in self.events if data != b"[DONE]"]
        return json.loads(payloads[-1])


@dataclass(frozen=True)
class Address:
    """Where a server listens."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """The base URL."""
        return f"http://{self.host}:{self.port}"


@asynccontextmanager
async def _connection(
    to: Address,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(to.host, to.port, limit=READ_LIMIT_BYTES)
    try:
        yield reader, writer
    finally:
        writer.close()


def _encode(to: Address, method: str, path: str, payload: object) -> bytes:
    body = b"" if payload is None else json.dumps(payload).encode()
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: {to.host}:{to.port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _read_head(reader: asyncio.StreamReader) -> Reply:
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return Reply(int(first.split()[1]), headers)


async def _read_pieces(
    reader: asyncio.StreamReader, headers: dict[str, str]
) -> AsyncIterator[bytes]:
    """Yield a body piece by piece, as it arrives."""
    if headers.get("transfer-encoding") == "chunked":
        while size := int((await reader.readline()).split(b";")[0], 16):
            piece = await reader.readexactly(size + 2)
            yield piece[:-2]
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while piece := await reader.read(1 << 16):
            yield piece


async def call(
    to: Address,
    method: str,
    path: str,
    payload: object = None,
    *,
    timeout_s: float = 600.0,
    hang_up_after: int = 0,
    on_event: Callable[[], None] | None = None,
) -> Reply:
    """Send one request and read its whole answer.

    `hang_up_after` closes the connection after that many events, as a client that goes away does.
    `on_event` is called after each piece of a stream that completed an event.
    Raises OSError, asyncio.IncompleteReadError or TimeoutError where the connection fails.
    """
    async with asyncio.timeout(timeout_s), _connection(to) as (reader, writer):
        start = time.perf_counter()
        writer.write(_encode(to, method, path, payload))
        reply = await _read_head(reader)
        is_stream = reply.headers.get("content-type", "").startswith("text/event-stream")
        buffer = b""
        async for piece in _read_pieces(reader, reply.headers):
            at = time.perf_counter() - start
            buffer += piece
            if is_stream:
                *whole, buffer = buffer.split(b"\n\n")
                reply.events += [(at, e.removeprefix(b"data: ")) for e in whole if e]
                if on_event is not None and whole:
                    on_event()
                if hang_up_after and len(reply.events) >= hang_up_after:
                    break
        reply.body = buffer
        reply.seconds = time.perf_counter() - start
        return reply
