"""The HTTP application: which path is answered by what. The table is the whole of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from statewise.runtime.errors import OperatingError
from statewise.runtime.server.http import cache, control, errors
from statewise.runtime.server.http.chat import chat_completions
from statewise.runtime.server.http.completions import completions
from statewise.runtime.server.http.door import Door
from statewise.runtime.server.http.native import generate
from statewise.runtime.server.service import Service

Endpoint = Callable[[Request], Awaitable[Response]]

ROUTES: tuple[tuple[str, Endpoint, tuple[str, ...]], ...] = (
    ("/generate", generate, ("POST", "PUT")),
    ("/v1/completions", completions, ("POST",)),
    ("/v1/chat/completions", chat_completions, ("POST",)),
    ("/v1/models", control.models, ("GET",)),
    ("/v1/models/{name:path}", control.model, ("GET",)),
    ("/health", control.health, ("GET",)),
    ("/ready", control.health, ("GET",)),
    ("/health_generate", control.health_generate, ("GET",)),
    ("/model_info", control.model_info, ("GET",)),
    ("/get_model_info", control.model_info, ("GET",)),
    ("/server_info", control.server_info, ("GET",)),
    ("/get_server_info", control.server_info, ("GET",)),
    ("/get_load", control.get_load, ("GET",)),
    ("/v1/loads", control.loads, ("GET",)),
    ("/flush_cache", control.flush_cache, ("GET", "POST")),
    ("/abort_request", control.abort_request, ("POST",)),
    ("/update_weights_from_disk", control.update_weights, ("POST",)),
    ("/cache", cache.dump, ("GET",)),
    ("/cache/ui", cache.inspector, ("GET",)),
    ("/tokenize", control.tokenize, ("POST",)),
    ("/detokenize", control.detokenize, ("POST",)),
    ("/metrics", control.metrics, ("GET",)),
)


def make_app(service: Service) -> Door:
    """Return the ASGI application of one server."""
    app = Starlette(
        routes=[Route(path, endpoint, methods=list(methods)) for path, endpoint, methods in ROUTES],
        exception_handlers={
            OperatingError: errors.on_operating_error,
            HTTPException: errors.on_http_exception,
            Exception: errors.on_programmer_error,
        },
    )
    app.state.service = service
    return Door(app, service)
