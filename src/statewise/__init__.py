"""statewise: a serving runtime that reuses cached state only when it can prove it is usable.

    import statewise as sw

The public names are loaded on first use (PEP 562), so that `import statewise` costs milliseconds;
the language and its clients never load torch, `Engine` does when it is first named.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from statewise import compiled

if TYPE_CHECKING:
    from statewise.frontend import (
        BackendError,
        OpenAI,
        ProgramError,
        Runtime,
        RuntimeEndpoint,
        TemplateError,
        assistant,
        assistant_begin,
        assistant_end,
        checkpoint,
        constrained,
        flush_cache,
        function,
        gen,
        gen_int,
        gen_string,
        get_server_info,
        greedy_token_selection,
        image,
        pin,
        select,
        separate_reasoning,
        set_default_backend,
        system,
        system_begin,
        system_end,
        token_length_normalized,
        unconditional_likelihood_normalized,
        user,
        user_begin,
        user_end,
        video,
    )
    from statewise.frontend.rpc_client import AsyncRpcClient, RpcClient
    from statewise.runtime.engine.engine import Engine

__version__ = "0.1.0"

__all__ = [
    "AsyncRpcClient",
    "BackendError",
    "Engine",
    "OpenAI",
    "ProgramError",
    "RpcClient",
    "Runtime",
    "RuntimeEndpoint",
    "TemplateError",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "checkpoint",
    "constrained",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_server_info",
    "greedy_token_selection",
    "image",
    "pin",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
    "video",
]

_HOMES = {
    "AsyncRpcClient": "statewise.frontend.rpc_client",
    "Engine": "statewise.runtime.engine.engine",
    "RpcClient": "statewise.frontend.rpc_client",
}
_FOLDERS = ("frontend", "kernels", "radix", "runtime")

compiled.use()


def __getattr__(name: str) -> Any:
    """Load a public name, or one of the four folders, when it is first asked for."""
    if name in _FOLDERS:
        return importlib.import_module(f"statewise.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'statewise' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES.get(name, "statewise.frontend")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, loaded or not."""
    return sorted({*globals(), *__all__, *_FOLDERS})
