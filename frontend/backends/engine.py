"""An engine in this process as a backend.

The engine is whatever has these methods with the native API's meaning (`statewise.Engine` has):

    generate(**native request fields) -> answer, list of answers, or an iterator of them (stream)
    model_info(), tokenize(texts), detokenize(ids), flush_cache(), get_server_info()

This module imports no engine and no tensor library: it is handed one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from statewise.frontend.backends.native import Body, NativeBackend


class NativeEngine(Protocol):
    """What `EngineBackend` needs of an engine. Thread-safe."""

    def generate(self, **fields: Any) -> Any:
        """Run one native request."""

    def model_info(self) -> dict[str, Any]:
        """Return what is served, with its chat template and special tokens."""

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Return token ids of each text as a prompt."""

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return text of token ids, special tokens included."""

    def flush_cache(self) -> Any:
        """Drop everything cached."""

    def get_server_info(self) -> dict[str, Any]:
        """Return settings and state."""


class EngineBackend(NativeBackend):
    """A `NativeEngine` as a `Backend`; `chat_template` as in `NativeBackend`."""

    def __init__(self, engine: NativeEngine, chat_template: str | None = None) -> None:
        super().__init__(chat_template)
        self._engine = engine

    def request(self, body: Body) -> Any:
        """See `NativeBackend`."""
        return self._engine.generate(**_as_arguments(body))

    def request_stream(self, body: Body) -> Iterator[Any]:
        """See `NativeBackend`."""
        return iter(self._engine.generate(**_as_arguments(body)))

    def model_info(self) -> dict[str, Any]:
        """See `NativeBackend`."""
        return self._engine.model_info()

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """See `NativeBackend`."""
        return self._engine.tokenize(list(texts))

    def detokenize(self, ids: Sequence[int]) -> str:
        """See `NativeBackend`."""
        return self._engine.detokenize(list(ids))

    def get_server_info(self) -> dict[str, Any]:
        """See `Backend`."""
        return self._engine.get_server_info()

    def flush_cache(self) -> None:
        """See `Backend`."""
        self._engine.flush_cache()


def _as_arguments(body: Body) -> Body:
    """Name the fields as the engine does: it takes the text as `prompt`."""
    body = dict(body)
    if "text" in body:
        body["prompt"] = body.pop("text")
    return body
