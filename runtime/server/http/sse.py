"""Server-sent events, and clients that go away.

The first event decides the status: an error before anything was sent is an ordinary error answer.
After that an error is an event of its own. Either way a stream ends with `data: [DONE]`.

A client that hangs up cancels whatever was producing its answer, within one event loop turn of
the server noticing; the producer's `finally` aborts the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from statewise.runtime.errors import AbortedError, OperatingError
from statewise.runtime.server.http.errors import error_body, response_of

T = TypeVar("T")
Events = AsyncGenerator[dict[str, Any], None]

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_encoder = msgspec.json.Encoder()


def event(data: dict[str, Any]) -> bytes:
    """Encode one event."""
    return b"data: " + _encoder.encode(data) + b"\n\n"


async def _gone(receive: Callable[[], Awaitable[MutableMapping[str, Any]]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class SseResponse(Response):
    """Streams `events` until they end, fail, or the client goes away."""

    def __init__(self, events: Events) -> None:
        super().__init__()
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream (ASGI)."""
        pump = asyncio.ensure_future(self._pump(scope, receive, send))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({pump, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel(gone)
            await _cancel(pump)
            await self._events.aclose()

    async def _pump(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async for data in self._events:
                if not started:
                    started = True
                    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                await _send_part(send, event(data))
        except OperatingError as error:
            scope["app"].state.service.metrics.failed(error.code)
            if not started:
                await response_of(error)(scope, receive, send)
                return
            await _send_part(send, event(error_body(str(error), error.code, error.http_status)))
        if not started:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


async def _send_part(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def _cancel(task: asyncio.Future[None]) -> None:
    """Cancel `task` and take its outcome: its own error propagates, its cancellation does not."""
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        if not task.cancelled():
            raise


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Await `work`, cancelling it when the client hangs up.

    Raises AbortedError in that case; nobody is there to read the answer.
    """
    job = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({job, gone}, return_when=asyncio.FIRST_COMPLETED)
        if job.done():
            return job.result()
        raise AbortedError("the client went away")
    finally:
        await _cancel(gone)
        if not job.done():
            job.cancel()
            await asyncio.gather(job, return_exceptions=True)
