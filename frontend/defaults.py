"""The backend that programs use when they are given none, and the words that speak to it."""

from __future__ import annotations

import weakref
from typing import Any, cast

from statewise.frontend.backends.base import Backend
from statewise.frontend.errors import ProgramError

_default: Any = None
_engines: weakref.WeakKeyDictionary[Any, Backend] = weakref.WeakKeyDictionary()


def set_default_backend(backend: Any) -> None:
    """Use `backend` (an endpoint, a `Runtime`, an `Engine`, ...) where none is given."""
    global _default
    if backend is not None:
        resolve(backend)
    _default = backend


def resolve(backend: Any = None) -> Backend:
    """Return the backend to use.

    Raises `ProgramError` where there is none, TypeError for what is no backend.
    """
    chosen = backend if backend is not None else _default
    if chosen is None:
        raise ProgramError("no backend: pass backend=... or call set_default_backend(...) before")
    chosen = getattr(chosen, "endpoint", chosen)
    if isinstance(chosen, Backend):
        return chosen
    if hasattr(chosen, "generate") and hasattr(chosen, "tokenize"):
        return _engine_backend(chosen)
    raise TypeError(f"not a backend: {type(chosen).__name__}")


def _engine_backend(engine: Any) -> Backend:
    from statewise.frontend.backends.engine import EngineBackend

    if engine not in _engines:
        _engines[engine] = cast(Backend, EngineBackend(engine))
    return _engines[engine]


def flush_cache(backend: Any = None, empty_cache: bool = True) -> bool:
    """Drop everything the backend cached; False where no backend is set.

    `empty_cache` is accepted for programs written elsewhere.
    """
    del empty_cache
    if backend is None and _default is None:
        return False
    resolve(backend).flush_cache()
    return True


def get_server_info(backend: Any = None) -> dict[str, Any] | None:
    """Return the backend's settings and state; None where no backend is set."""
    if backend is None and _default is None:
        return None
    return resolve(backend).get_server_info()
