"""One HTTP connection, bounded: no client holds memory or a descriptor by being slow or endless.

    what                      bound               then
    a request's head          MAX_HEAD_BYTES      431, closed
                              HEAD_TIMEOUT_S      408 (nothing sent yet: silence), closed
    a response nobody reads   STALL_TIMEOUT_S     closed, the request is aborted
    a peer that is gone       TCP keep-alive      closed, the request is aborted

Bodies are bounded where they are read (json_io.py). Idle connections between two requests are
uvicorn's matter (`timeout_keep_alive`). A peer that closes its sending side has hung up.

This module does not know routes.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from statewise.runtime.server.http.errors import error_body
from statewise.runtime.server.http.json_io import encode_json

MAX_HEAD_BYTES = 64 << 10
LINGER_S = 5.0  # a refused client may go on sending, so that it gets to read why
MAX_LINGER_BYTES = 64 << 20
HEAD_TIMEOUT_S = 30.0
STALL_TIMEOUT_S = 300.0


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with the bounds above."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._is_in_head = False
        self._is_refused = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        peer = transport.get_extra_info("socket")
        if peer is not None:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._head_timer = self._after(HEAD_TIMEOUT_S, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all clocks."""
        _cancel(self._head_timer)
        _cancel(self._stall_timer)
        super().connection_lost(exc)

    def _after(self, seconds: float, do: Callable[[], None]) -> asyncio.TimerHandle:
        return self.loop.call_later(seconds, do)

    # ------------------------------------------------------------- the head

    def on_message_begin(self) -> None:
        """Count and time the head that begins."""
        self._is_in_head, self._head_bytes = True, 0
        if self._head_timer is None:
            self._head_timer = self._after(HEAD_TIMEOUT_S, self._head_is_late)
        super().on_message_begin()

    def data_received(self, data: bytes) -> None:
        """Parse what came; a head that grows beyond its bound is refused."""
        if self._is_refused:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_LINGER_BYTES:
                self.transport.close()
            return
        super().data_received(data)
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, f"the request's head exceeds {MAX_HEAD_BYTES} bytes")

    def on_headers_complete(self) -> None:
        """Take note that a head is complete."""
        self._is_in_head = False
        _cancel(self._head_timer)
        self._head_timer = None
        super().on_headers_complete()

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._is_in_head:
            self._refuse(408, f"the request's head was not complete after {HEAD_TIMEOUT_S:g} s")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """Answer and close, unless an answer is being written: then only close.

        What the client still sends is read and dropped for a while: closing amid it would reset the
        connection, and the answer would be lost.
        """
        if self._is_refused or self.transport.is_closing():
            return
        cycle = cast(RequestResponseCycle | None, self.cycle)  # None before the first request
        if cycle is None or cycle.response_complete:
            body = encode_json(error_body(message, "invalid_request", status))
            head = (
                b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            )
            self.transport.write(STATUS_LINE[status] + head % len(body) + body)
            if self.transport.can_write_eof():
                self._is_refused = True
                self.transport.write_eof()
                _cancel(self._head_timer)
                self._head_timer = self._after(LINGER_S, self.transport.close)
                return
        self.transport.close()

    # ------------------------------------------------------------- the answer

    def pause_writing(self) -> None:
        """The peer does not read as fast as it is written to: wait, but not for ever."""
        super().pause_writing()
        if self._stall_timer is None:
            self._stall_timer = self._after(STALL_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        """The peer has read."""
        _cancel(self._stall_timer)
        self._stall_timer = None
        super().resume_writing()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
