"""What every HTTP request passes: the key, the counters, the access log.

A plain ASGI wrapper, so that streams pass through it untouched.
"""

from __future__ import annotations

import hmac
import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from statewise.runtime.errors import UnauthorizedError
from statewise.runtime.server.http.errors import response_of
from statewise.runtime.server.service import Service

OPEN_PATHS = ("/health", "/ready", "/metrics", "/cache/ui")
ADMIN_PATHS = ("/flush_cache", "/cache", "/update_weights_from_disk")

log = logging.getLogger("statewise.access")


class Door:
    """Wraps the application of one server."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._key = service.args.api_key.encode()
        self._admin_key = service.args.admin_api_key.encode() or self._key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request pass, or answer it here (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        clock = self._service.clock
        started = clock.monotonic()
        status = 499  # the client left before an answer began

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if self._may_pass(scope):
                await self._app(scope, receive, counted)
            else:
                error = UnauthorizedError("the API key is missing or wrong")
                self._service.metrics.failed(error.code)
                await response_of(error)(scope, receive, counted)
        finally:
            self._note(scope, status, clock.monotonic() - started)

    def _may_pass(self, scope: Scope) -> bool:
        path: str = scope["path"]
        wanted = self._key
        if path in ADMIN_PATHS or path.startswith("/cache/"):
            wanted = self._admin_key
        if not wanted or path.startswith(OPEN_PATHS):
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, b"Bearer " + wanted)

    def _note(self, scope: Scope, status: int, duration_s: float) -> None:
        route = scope.get("route")
        name = getattr(route, "path", "unknown")
        self._service.metrics.answered(name, status)
        if self._service.args.log_requests:
            client = scope.get("client") or ("-", 0)
            log.info(
                "%s %s %s -> %d in %.1f ms",
                client[0], scope["method"], scope["path"], status, duration_s * 1000,
            )  # fmt: skip
