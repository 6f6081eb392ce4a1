"""How an error reaches an HTTP client: one shape, the status and the code of its type.

    {"error": {"message": ..., "type": ..., "code": ..., "param": null}}

503 (starting, draining, full, a process died) comes with Retry-After.

This module does not catch programmer errors: they become a bare 500 and a traceback in the log.
"""

from __future__ import annotations

import http
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from statewise.runtime.errors import OperatingError
from statewise.runtime.messages import FinishReason
from statewise.runtime.server.http.json_io import JsonResponse

RETRY_AFTER_S = 1
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}


class FailedRequestError(OperatingError):
    """A request ended with an error somewhere in the server; carries its code and status."""

    def __init__(self, finish: FinishReason) -> None:
        super().__init__(finish.message)
        self.code = finish.code or "internal_error"
        self.http_status = finish.http_status if finish.http_status >= 400 else 500


def error_type(status: int) -> str:
    """Return the family of errors that clients of the OpenAI API expect for a status."""
    if status in _TYPES:
        return _TYPES[status]
    return "invalid_request_error" if status < 500 else "server_error"


def error_body(message: str, code: str, status: int) -> dict[str, Any]:
    """Return the JSON body of an error."""
    error = {"message": message, "type": error_type(status), "code": code, "param": None}
    return {"error": error}


def response_of(error: OperatingError) -> Response:
    """Return the answer to a request that ended with `error`."""
    status = error.http_status
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    body = error_body(str(error), error.code, status)
    return JsonResponse(body, status_code=status, headers=headers)


async def on_operating_error(request: Request, error: Exception) -> Response:
    """Answer and count an operating error that a route raised."""
    assert isinstance(error, OperatingError)
    request.app.state.service.metrics.failed(error.code)
    return response_of(error)


async def on_http_exception(_request: Request, error: Exception) -> Response:
    """Answer what the router refuses (no such route, wrong method)."""
    assert isinstance(error, HTTPException)
    status = error.status_code
    code = http.HTTPStatus(status).phrase.lower().replace(" ", "_")
    body = error_body(error.detail, code, status)
    return JsonResponse(body, status_code=status, headers=dict(error.headers or {}))


async def on_programmer_error(_request: Request, error: Exception) -> Response:
    """Answer what nobody expected; the server's log has the traceback."""
    body = error_body(f"internal error ({type(error).__name__})", "internal_error", 500)
    return JsonResponse(body, status_code=500)
