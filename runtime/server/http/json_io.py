"""JSON in and out of HTTP, with limits: bodies are bounded, typed and strictly JSON.

NaN and Infinity are not JSON and are refused; so is text that is not UTF-8. A message of refusal
names the field. Where a body is too large, what the client still sends is read and dropped (up to
a bound), so that it gets to read the answer instead of a reset connection.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from statewise.runtime.errors import (
    AbortedError,
    BodyTimeoutError,
    BodyTooLargeError,
    InvalidRequestError,
)

T = TypeVar("T")

MAX_DISCARDED_BYTES = 64 << 20
# An escaped half of a surrogate pair without the other half beside it (an even number of
# backslashes before it would mean that it is no escape).
_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_BEFORE = rb"(?<!\\)(?:\\\\)*"
LONE_SURROGATE = re.compile(
    rb"%b(?:%b(?!%b)|(?<!%b)%b)" % (_BEFORE, _HIGH, _LOW, rb"\\u[dD][89abAB]..", _LOW), re.DOTALL
)
BODY_TIMEOUT_S = 300.0


class JsonResponse(Response):
    """A response that msgspec encodes."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode `content`."""
        return encode_json(content)


def encode_json(content: Any) -> bytes:
    """Encode `content` as JSON."""
    return msgspec.json.encode(content)


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """Return the whole body.

    Raises BodyTooLargeError beyond `limit_bytes`, BodyTimeoutError where it takes too long, and
    AbortedError where the client goes away amid it: nobody is there to read the answer.
    """
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await _read_body(request, limit_bytes)
    except ClientDisconnect:
        raise AbortedError("the client went away amid its body") from None
    except TimeoutError:
        raise BodyTimeoutError(f"the body was not sent within {BODY_TIMEOUT_S:g} s") from None


async def _read_body(request: Request, limit_bytes: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= limit_bytes:
            chunks.append(chunk)
        elif size > limit_bytes + MAX_DISCARDED_BYTES:
            break
    if size > limit_bytes:
        raise BodyTooLargeError(f"the body exceeds {limit_bytes} bytes (--max-body-bytes)")
    return b"".join(chunks)


def field_names(body: bytes) -> list[str]:
    """Names of an object's fields; none where it is no object, which `decode` will say."""
    try:
        return list(msgspec.json.decode(body, type=dict[str, msgspec.Raw]))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []


def decode(body: bytes, kind: type[T]) -> T:
    """Decode a body as `kind`. Raises InvalidRequestError that says where it is wrong."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"request body: {error}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"request body: not valid UTF-8 ({error.reason})") from error
    except RecursionError as error:
        raise InvalidRequestError("request body: nested too deeply") from error
    except msgspec.DecodeError as error:
        raise InvalidRequestError(f"request body: {_what_is_wrong(body, error)}") from error


def _what_is_wrong(body: bytes, error: msgspec.DecodeError) -> str:
    """Describe a body that is not JSON; the decoder calls half a surrogate pair truncated."""
    if LONE_SURROGATE.search(body):
        return "half of a surrogate pair (\\ud800 to \\udfff) is no character"
    hint = "; NaN and Infinity are not JSON" if b"NaN" in body or b"Infinity" in body else ""
    return f"{error}{hint}"


async def read_json(request: Request, kind: type[T], limit_bytes: int) -> T:
    """Read and decode the body of `request`. Raises as `read_body` and `decode` do."""
    try:
        body = await read_body(request, limit_bytes)
    except ClientDisconnect:
        raise InvalidRequestError("the client went away before its request was read") from None
    return decode(body, kind)
