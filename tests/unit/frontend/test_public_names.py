"""The import surface: what is promised is there, and importing it is cheap."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import statewise as sw
from statewise import frontend

PROMISED = [
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "select",
    "system",
    "user",
    "assistant",
    "system_begin",
    "system_end",
    "user_begin",
    "user_end",
    "assistant_begin",
    "assistant_end",
    "image",
    "video",
    "separate_reasoning",
    "RuntimeEndpoint",
    "Runtime",
    "Engine",
    "OpenAI",
    "RpcClient",
    "AsyncRpcClient",
    "set_default_backend",
    "flush_cache",
    "get_server_info",
    "token_length_normalized",
    "greedy_token_selection",
    "unconditional_likelihood_normalized",
    "constrained",
    "pin",
    "checkpoint",
    "ProgramError",
    "BackendError",
    "TemplateError",
]


def test_the_public_names_are_what_is_exported() -> None:
    assert sorted(sw.__all__) == sorted(PROMISED)
    assert sorted(set(sw.__all__) - {"Engine", "RpcClient", "AsyncRpcClient"}) == sorted(
        frontend.__all__
    )
    assert set(sw.__all__) <= set(dir(sw))
    for name in sw.__all__:
        assert getattr(sw, name) is not None, name


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = sw.nonsense


def test_folders_are_reachable_as_attributes() -> None:
    assert sw.radix.__name__ == "statewise.radix"


def test_importing_the_language_loads_neither_torch_nor_the_runtime() -> None:
    code = (
        "import sys, statewise as sw\n"
        "@sw.function\n"
        "def p(s): s += sw.user(sw.gen('x'))\n"
        "sw.RuntimeEndpoint('http://localhost:1'), sw.OpenAI('m', 'http://localhost:1')\n"
        "heavy = ('torch', 'numpy', 'transformers', 'statewise.runtime')\n"
        "print([m for m in sys.modules if m.startswith(heavy)])\n"
    )
    run = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"


def test_lazy_and_type_checked_names_agree() -> None:
    source = Path(inspect.getfile(sw)).read_text()
    block = source.split("if TYPE_CHECKING:")[1].split("__version__")[0]
    for name in sw.__all__:
        assert f" {name}" in block, name


RUN_DEFAULTS = {
    "max_new_tokens": 128, "n": 1, "stop": None, "stop_token_ids": None, "stop_regex": None,
    "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0,
    "presence_penalty": 0.0, "ignore_eos": False, "return_logprob": None,
    "logprob_start_len": None, "top_logprobs_num": None, "return_text_in_logprobs": None,
    "stream": False, "backend": None, "use_thread": True,
}  # fmt: skip
GEN_NAMES = [
    "name",
    "max_tokens",
    "min_tokens",
    "n",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "ignore_eos",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_text_in_logprobs",
    "dtype",
    "choices",
    "choices_method",
    "regex",
    "json_schema",
]


def test_signatures_are_the_known_ones() -> None:
    run = inspect.signature(frontend.function(lambda s: None).run).parameters
    assert {k: v.default for k, v in run.items() if k in RUN_DEFAULTS} == RUN_DEFAULTS
    gen = inspect.signature(sw.gen).parameters
    assert list(gen)[: len(GEN_NAMES)] == GEN_NAMES
    assert all(parameter.default is None for parameter in gen.values())
    select = inspect.signature(sw.select).parameters
    assert list(select) == ["name", "choices", "temperature", "choices_method"]
    assert select["choices_method"].default is sw.token_length_normalized
