"""A running server as a backend, over its native HTTP API."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

from statewise.frontend.backends.http import HttpClient
from statewise.frontend.backends.native import Body, NativeBackend


class RuntimeEndpoint(NativeBackend):
    """A server at `base_url`.

    `verify` names a CA bundle for https. `chat_template_name="plain"`, or `chat_template` with a
    template's text, replaces the served model's chat template. `timeout_s` bounds every wait for
    the server's next byte (None: as long as the connection lives). Nothing is sent before the
    first use.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        verify: str | None = None,
        chat_template_name: str | None = None,
        *,
        chat_template: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        super().__init__(chat_template or chat_template_name)
        self.base_url = base_url
        self._http = HttpClient(base_url, api_key, verify=verify, timeout_s=timeout_s)
        self._info: dict[str, Any] | None = None
        self._info_lock = threading.Lock()

    def request(self, body: Body) -> Any:
        """See `NativeBackend`."""
        return self._http.call("POST", "/generate", body)

    def request_stream(self, body: Body) -> Iterator[Any]:
        """See `NativeBackend`."""
        return self._http.events("/generate", body)

    def model_info(self) -> dict[str, Any]:
        """Return the server's answer to /model_info, asked once."""
        with self._info_lock:
            if self._info is None:
                self._info = dict(self._http.call("GET", "/model_info"))
            return self._info

    def probe_health(self) -> None:
        """Return if the server takes requests; raises `BackendError` otherwise, at once."""
        self._http.call("GET", "/health", retry=False)

    def get_model_name(self) -> str:
        """Return the served model's path."""
        return str(self.model_info().get("model_path", ""))

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """See `NativeBackend`."""
        answer = self._http.call("POST", "/tokenize", {"prompt": list(texts)})
        return [list(ids) for ids in answer["tokens"]]

    def detokenize(self, ids: Sequence[int]) -> str:
        """See `NativeBackend`."""
        body = {"tokens": list(ids), "skip_special_tokens": False}
        answer = self._http.call("POST", "/detokenize", body)
        return str(answer["text"])

    def flush_cache(self, empty_cache: bool = True) -> None:
        """Drop everything cached. `empty_cache` is accepted for programs written elsewhere."""
        self._http.call("POST", "/flush_cache", {"empty_cache": empty_cache})

    def get_server_info(self) -> dict[str, Any]:
        """Return the server's settings and state."""
        return dict(self._http.call("GET", "/get_server_info"))

    def close(self) -> None:
        """Close idle connections."""
        self._http.close()
