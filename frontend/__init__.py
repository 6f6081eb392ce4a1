"""The prompt-program language, its interpreter, clients and command line.

The language's words are importable from here and from `statewise`. Importing this package starts
nothing, and loads neither a tensor library nor the runtime.
"""

from __future__ import annotations

from statewise.frontend.backends.endpoint import RuntimeEndpoint
from statewise.frontend.backends.openai import OpenAI
from statewise.frontend.backends.server_process import Runtime
from statewise.frontend.choices import (
    constrained,
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from statewise.frontend.defaults import flush_cache, get_server_info, set_default_backend
from statewise.frontend.errors import BackendError, ProgramError, TemplateError
from statewise.frontend.language import (
    assistant,
    assistant_begin,
    assistant_end,
    checkpoint,
    function,
    gen,
    gen_int,
    gen_string,
    image,
    select,
    separate_reasoning,
    system,
    system_begin,
    system_end,
    user,
    user_begin,
    user_end,
    video,
)
from statewise.frontend.pinning import pin

__all__ = [
    "BackendError",
    "OpenAI",
    "ProgramError",
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
