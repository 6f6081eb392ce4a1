"""What is cached, for people: the tree as data or as a picture, and a page that shows it.

    /cache                  JSON
    /cache?format=ascii     text, one line per node
    /cache?format=svg       a picture
    /cache/ui               the page; it holds no data of its own and asks /cache for it

This module does not know the tree.
"""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from statewise.runtime.server import links
from statewise.runtime.server.http.json_io import JsonResponse
from statewise.runtime.server.service import Service

PAGE = Path(__file__).with_name("inspector.html")
MEDIA_TYPES = {"ascii": "text/plain; charset=utf-8", "svg": "image/svg+xml"}
# The page runs its own script and style, and talks to this server only.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
)


async def dump(request: Request) -> Response:
    """Return the cache's tree, as data or as a picture."""
    service: Service = request.app.state.service
    form = request.query_params.get("format", "json")
    answer = await service.broker.call(links.SCHEDULER, "cache_dump", {"format": form})
    if form in MEDIA_TYPES:
        return Response(answer["text"], media_type=MEDIA_TYPES[form])
    return JsonResponse(answer)


async def inspector(request: Request) -> Response:
    """Return the page that shows the tree."""
    headers = {"Content-Security-Policy": POLICY}
    return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers=headers)
