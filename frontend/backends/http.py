"""A small HTTP client: JSON in and out, server-sent events, connection reuse.

The standard library's connections behind a pool that all threads share, because a program's
threads are short-lived. A request goes again once if a reused connection turns out to be closed
before any answer came (a server may close an idle one at any time), and a few times if the server
answers 503 with Retry-After, as one that is starting or full does. Nothing else is retried.
"""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
import urllib.parse
import weakref
from collections.abc import Iterator
from typing import Any

from statewise.frontend.errors import BackendError

MAX_REFUSALS = 5
MAX_RETRY_AFTER_S = 30.0
MAX_IDLE = 128
_GONE = (ConnectionError, http.client.BadStatusLine, BrokenPipeError)


class HttpClient:
    """JSON over HTTP to one base URL. Thread-safe.

    `verify` names a CA bundle for https; `timeout_s` bounds connecting and each wait for bytes
    (None: wait as long as the server keeps the connection).
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        verify: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        parts = urllib.parse.urlsplit(base_url if "://" in base_url else f"http://{base_url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not an http(s) URL: {base_url!r}")
        self.base_url = base_url.rstrip("/")
        self._host, self._port = parts.hostname, parts.port
        self._path = parts.path.rstrip("/")
        self._context = (
            ssl.create_default_context(cafile=verify) if parts.scheme == "https" else None
        )
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._idle)

    def call(self, method: str, path: str, body: object = None, *, retry: bool = True) -> Any:
        """Send one request; returns the decoded JSON answer (text where it is not JSON).

        `retry=False`: take a refusal as the answer. Raises `BackendError` for a status of 400 and
        above, and where no answer comes.
        """
        connection, response = self._open(method, path, body, MAX_REFUSALS if retry else 0)
        try:
            data = response.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise self._lost(error) from error
        self._give_back(connection, response)
        return _decoded(data)

    def events(self, path: str, body: object) -> Iterator[Any]:
        """POST and yield each server-sent event's JSON, until `[DONE]`.

        Raises `BackendError` as `call` does, and where the stream ends without `[DONE]`. Closing
        the iterator early closes the connection, which tells the server to stop.
        """
        connection, response = self._open("POST", path, body, MAX_REFUSALS)
        done = False
        try:
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    response.read()
                    done = True
                    return
                yield _decoded(data)
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(error) from error
        finally:
            if done:
                self._give_back(connection, response)
            else:
                connection.close()
        raise BackendError(f"{self.base_url} ended a stream in the middle")

    def close(self) -> None:
        """Close idle connections."""
        with self._lock:
            _close_all(self._idle)

    def _open(
        self, method: str, path: str, body: object, max_refusals: int
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        payload = None if body is None else json.dumps(body).encode()
        for attempt in range(max_refusals + 1):
            connection, response = self._exchange(method, path, payload)
            if response.status < 400:
                return connection, response
            failure = self._failure(response, f"{method} {path}")
            self._give_back(connection, response)
            if failure.status != 503 or failure.retry_after_s is None or attempt == max_refusals:
                raise failure
            time.sleep(min(max(failure.retry_after_s, 0.0), MAX_RETRY_AFTER_S))
        raise AssertionError("the loop returns or raises")

    def _exchange(
        self, method: str, path: str, payload: bytes | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        while True:
            connection, reused = self._take()
            try:
                connection.request(method, self._path + path, payload, self._headers)
                return connection, connection.getresponse()
            except _GONE as error:
                connection.close()
                if not reused:
                    raise self._lost(error) from error
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                raise self._lost(error) from error

    def _take(self) -> tuple[http.client.HTTPConnection, bool]:
        with self._lock:
            if self._idle:
                return self._idle.pop(), True
        if self._context is not None:
            return (
                http.client.HTTPSConnection(
                    self._host, self._port, timeout=self._timeout_s, context=self._context
                ),
                False,
            )
        return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s), False

    def _give_back(
        self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse
    ) -> None:
        if response.will_close or not response.isclosed():
            connection.close()
            return
        with self._lock:
            if len(self._idle) < MAX_IDLE:
                self._idle.append(connection)
                return
        connection.close()

    def _lost(self, error: Exception) -> BackendError:
        what = str(error) or type(error).__name__
        return BackendError(f"no answer from {self.base_url}: {what}")

    def _failure(self, response: http.client.HTTPResponse, what: str) -> BackendError:
        try:
            answer = _decoded(response.read())
        except (OSError, http.client.HTTPException) as error:
            answer = f"unreadable answer: {error}"
        message, code = error_text(answer)
        return BackendError(
            f"{what}: {response.status} {message or response.reason}",
            status=response.status,
            code=code,
            retry_after_s=_seconds(response.getheader("Retry-After")),
        )


def _close_all(connections: list[http.client.HTTPConnection]) -> None:
    while connections:
        connections.pop().close()


def error_text(answer: Any) -> tuple[str, str]:
    """(message, code) of an error answer in the shapes servers use."""
    if isinstance(answer, dict):
        error = answer.get("error", answer)
        if isinstance(error, dict):
            message = error.get("message") or error.get("detail") or json.dumps(error)
            return str(message), str(error.get("code") or "")
        return str(error), ""
    return str(answer).strip()[:500], ""


def _decoded(data: bytes) -> Any:
    try:
        return json.loads(data) if data.strip() else None
    except ValueError:
        return data.decode("utf-8", "replace")


def _seconds(header: str | None) -> float | None:
    try:
        return float(header) if header is not None else None
    except ValueError:
        return None
