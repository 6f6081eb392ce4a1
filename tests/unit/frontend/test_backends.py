"""The engine adapter, and how a started server gets its settings."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import statewise as sw
from statewise.frontend import defaults
from statewise.frontend.backends import server_process
from statewise.frontend.backends.base import Backend
from statewise.frontend.backends.engine import EngineBackend


class Engine:
    """Remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def generate(self, **fields: Any) -> Any:
        self.asked.append(fields)
        answer = {"text": "out", "meta_info": {"finish_reason": None}}
        return iter([answer]) if fields.get("stream") else answer

    def model_info(self) -> dict[str, Any]:
        return {"chat_template": "{% for m in messages %}[{{ m.content }}]{% endfor %}"}

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        return [[ord(c) for c in text] for text in texts]

    def detokenize(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    def flush_cache(self) -> None:
        self.asked.append("flush")

    def get_server_info(self) -> dict[str, Any]:
        return {"page_size": 16}


@sw.function
def program(s: Any) -> None:
    s += sw.user("hi")
    s += "a" + sw.gen("x", max_tokens=3)


def test_an_engine_is_a_backend() -> None:
    engine = Engine()
    backend = defaults.resolve(engine)
    assert isinstance(backend, EngineBackend)
    assert isinstance(backend, Backend)
    assert defaults.resolve(engine) is backend
    for stream in (False, True):
        state = program.run(backend=engine, stream=stream)
        assert state.text() == "[hi]aout"
    fields, streamed = engine.asked
    assert fields["prompt"] == "[hi]a"
    assert fields["sampling_params"]["max_new_tokens"] == 3
    assert "text" not in fields
    assert streamed["stream"] is True
    assert sw.flush_cache(engine) is True
    assert engine.asked[-1] == "flush"
    assert sw.get_server_info(engine) == {"page_size": 16}


def test_settings_travel_in_a_private_file(monkeypatch: pytest.MonkeyPatch) -> None:
    path = server_process._written({"model_path": "m", "api_key": "k", "rpc": None, "audit": False})
    try:
        assert json.loads(Path(path).read_text()) == {
            "model_path": "m",
            "api_key": "k",
            "audit": False,
        }
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    finally:
        os.unlink(path)
    monkeypatch.setenv("STATEWISE_PORT", "1")
    monkeypatch.setenv("STATEWISE_DTYPE", "float32")
    environment = server_process._environment_without({"port": 5})
    assert "STATEWISE_PORT" not in environment
    assert environment["STATEWISE_DTYPE"] == "float32"
