"""Live servers and one object store: two that share it, and new weights while loads are under way.

The store is a real S3 server on this machine. Outputs are compared with those of a server that
caches nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from statewise.runtime.models.tiny import TinySize, make_tiny_model
from support.object_server import CREDENTIALS, ObjectServer
from support.server_process import ServerProcess, model_server

pytest.importorskip("obstore")
pytest.importorskip("moto.server")
pytestmark = pytest.mark.slow
SIZE = TinySize(layers=6, window=16)
FLAGS = ("--page-size", "512", "--max-total-tokens", "16384", "--dtype", "float32",
         "--num-threads", "1", "--no-calibrate")  # fmt: skip
NEW_TOKENS = 8


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(f"AWS_{name.upper()}", value)
    server = ObjectServer()
    yield server
    server.behave()
    server.close()


def prompt(seed: int, length: int = 1537) -> list[int]:
    return [(seed * 31 + 7 * i + i * i % 11) % 250 for i in range(length)]


def generate(server: ServerProcess, ids: list[int], max_new: int = NEW_TOKENS) -> dict[str, Any]:
    params = {"max_new_tokens": max_new, "temperature": 0, "ignore_eos": True}
    answer = server.post("/generate", {"input_ids": ids, "sampling_params": params})
    assert answer.status_code == 200, answer.text
    shown: dict[str, Any] = answer.json()
    return shown


def cold_outputs(path: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What a server without any cache answers."""
    with model_server(path, *FLAGS, "--disable-radix-cache") as server:
        return [generate(server, ids)["output_ids"] for ids in prompts]


def settled(server: ServerProcess, pages: int) -> None:
    """Until a server has so many pages in the store."""
    for _ in range(300):
        (state,) = server.get("/server_info").json()["internal_states"]
        if state["tiers"][0]["counters"].get("pages_written", 0) >= pages:
            return
        time.sleep(0.1)
    raise AssertionError(f"not written: {state['tiers']}")


def test_two_live_servers_find_what_the_other_leaves(tmp_path: Path, store: ObjectServer) -> None:
    make_tiny_model("gemma3", tmp_path / "m", size=SIZE)
    mine, other = [prompt(i) for i in range(3)], [prompt(i) for i in range(10, 13)]
    grown = [mine[0] + prompt(50, 70), other[0] + prompt(51, 70)]
    expected = cold_outputs(tmp_path / "m", mine + other + grown)
    flags = (*FLAGS, "--remote-cache", store.url("shared"))
    with model_server(tmp_path / "m", *flags) as a, model_server(tmp_path / "m", *flags) as b:
        outputs: list[list[int]] = [[] for _ in mine + other]

        def serve(server: ServerProcess, prompts: list[list[int]], first: int) -> None:
            for i, ids in enumerate(prompts):
                outputs[first + i] = generate(server, ids)["output_ids"]

        both = [
            threading.Thread(target=serve, args=(a, mine, 0)),
            threading.Thread(target=serve, args=(b, other, len(mine))),
        ]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        assert outputs == expected[: len(outputs)]
        for server in (a, b):
            settled(server, 3 * 3)
        loaded = {"a": 0, "b": 0}
        for name, server, prompts, first in (("a", a, other, 3), ("b", b, mine, 0)):
            for i, ids in enumerate(prompts):
                answer = generate(server, ids)
                assert answer["output_ids"] == expected[first + i]
                found = answer["meta_info"]["cache_report"]["loaded_from"]
                loaded[name] += found.get("remote", 0)
        assert min(loaded.values()) > 0, loaded
        for server in (a, b):
            for ids, wanted in zip(grown, expected[len(outputs) :], strict=True):
                assert generate(server, ids)["output_ids"] == wanted


def test_new_weights_while_loads_are_under_way(tmp_path: Path, store: ObjectServer) -> None:
    """Every request ends once; whatever was computed after the update is of the new weights."""
    make_tiny_model("gemma3", tmp_path / "old", size=SIZE)
    make_tiny_model("gemma3", tmp_path / "new", size=SIZE, seed=9)
    prompts = [prompt(i) for i in range(3)]
    before = cold_outputs(tmp_path / "old", prompts)
    with model_server(
        tmp_path / "old", *FLAGS, "--remote-cache", store.url("weights"), "--log-requests"
    ) as server:
        for ids, wanted in zip(prompts, before, strict=True):
            assert generate(server, ids)["output_ids"] == wanted
        settled(server, 3 * 3)
        assert server.post("/flush_cache", {}).status_code == 200
        store.behave("slow", 0.2)
        answers: list[dict[str, Any]] = [{} for _ in prompts]

        def ask(i: int) -> None:
            answers[i] = generate(server, prompts[i])

        asking = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
        for thread in asking:
            thread.start()
        until_reading(server)
        told = server.post("/update_weights_from_disk", {"model_path": str(tmp_path / "new")})
        assert told.json()["success"], told.text
        for thread in asking:
            thread.join(60)
        store.behave()
        for ids, old, answer in zip(prompts, before, answers, strict=True):
            assert answer["meta_info"]["finish_reason"]["type"] == "length"
            check_continuation(server, ids, old, answer["output_ids"])
        assert "Traceback" not in server.log()


def until_reading(server: ServerProcess) -> None:
    """Until a page is being read from the store."""
    for _ in range(200):
        (state,) = server.get("/server_info").json()["internal_states"]
        if state["tiers"][0]["counters"].get("requests_read", 0):
            return
        time.sleep(0.05)
    raise AssertionError(f"nothing is loaded: {state['tiers']}")


def check_continuation(
    server: ServerProcess, ids: list[int], old: list[int], got: list[int]
) -> None:
    """The first tokens are the old weights', the rest is what the new ones make of them."""
    assert len(got) == NEW_TOKENS
    kept = next((i for i in range(NEW_TOKENS) if got[i] != old[i]), NEW_TOKENS)
    for k in range(kept, -1, -1):
        rest = generate(server, ids + got[:k], NEW_TOKENS - k)["output_ids"] if k < 8 else []
        if rest == got[k:]:
            return
    raise AssertionError(f"{got} is neither {old} nor a continuation of its start")
