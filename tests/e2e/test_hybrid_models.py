"""Every hybrid architecture, made and served by the command line, asked as any model is.

One server each: the OpenAI client, streaming and whole, and a prompt program with branches. What
a warm cache answers is what a cold one did.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import statewise as sw
from statewise.frontend.cli import main
from support.server_process import ServerProcess, model_server

PAGE = 16  # what serving chooses for each
# Arguments of make-tiny-model, groups.
MODELS: dict[str, tuple[list[str], set[str]]] = {
    "deepseek-v4": (["--layers", "8"], {"swa", "csa", "idx", "csa_tail", "hca", "hca_tail"}),
    "deepseek-v32": (["--layers", "3"], {"latent", "idx"}),
    "qwen3-next": (["--layers", "4"], {"full", "recurrent"}),
    "gpt-oss": (["--layers", "4", "--window", "24"], {"full", "window"}),
}
PREFIX = "One line of a text that every question is about. " * 6


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.slow) for name in MODELS],
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ServerProcess, set[str]]]:
    arguments, groups = MODELS[request.param]
    model = tmp_path_factory.mktemp("models") / request.param
    assert main(["make-tiny-model", request.param, str(model), *arguments]) == 0
    with serve(model) as server:
        yield server, groups


def serve(model: Path) -> ServerProcess:
    flags = ["--max-total-tokens", "4096", "--num-threads", "1"]
    return model_server(model, *flags, "--dtype", "float32", "--audit")


def test_the_openai_client_gets_the_same_cold_warm_and_streamed(
    served: tuple[ServerProcess, set[str]],
) -> None:
    server, _ = served
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        arguments: Any = {
            "model": "tiny", "messages": [{"role": "user", "content": PREFIX + "Why?"}],
            "max_tokens": 24, "temperature": 0, "extra_body": {"ignore_eos": True},
        }  # fmt: skip
        server.post("/flush_cache", {})
        cold = client.chat.completions.create(**arguments)
        warm = client.chat.completions.create(**arguments)
        stream = client.chat.completions.create(**arguments, stream=True)
        text = cold.choices[0].message.content
        assert text
        assert warm.choices[0].message.content == text
        assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices) == text
        details = [answer.usage.prompt_tokens_details for answer in (cold, warm)]
        cached = [0 if d is None else d.cached_tokens or 0 for d in details]
        assert cached[0] == 0
        assert cached[1] >= len(PREFIX) // PAGE * PAGE


@sw.function
def branches(s: Any) -> None:
    s += PREFIX
    forks = s.fork(3)
    forks += lambda i: f"Branch {i}: " + sw.gen("x", max_tokens=8)
    forks.join()
    s += "Together: " + sw.gen("end", max_tokens=8)


def test_branches_of_a_program_reuse_their_stem(served: tuple[ServerProcess, set[str]]) -> None:
    server, groups = served
    backend = sw.RuntimeEndpoint(server.url)
    sw.flush_cache(backend)
    state = branches.run(temperature=0, backend=backend)
    report = state.cache_report()
    assert [entry["kind"] for entry in report] == ["publish", "gen", "gen", "gen", "gen"]
    for entry in report[1:]:
        assert entry["cached_tokens"] >= len(PREFIX) // PAGE * PAGE
        assert {group["name"] for group in entry["report"]["groups"]} == groups
    cold = branches.run(temperature=0, backend=backend, cache_salt="another")
    assert cold.cache_report()[0]["cached_tokens"] == 0
    assert cold.text() == state.text()
    assert cold["x"] == state["x"]


def test_afterwards_every_block_is_free(served: tuple[ServerProcess, set[str]]) -> None:
    server, groups = served
    server.post("/flush_cache", {})
    stats = server.get("/get_server_info").json()["internal_states"][0]
    assert set(stats["pools"]) == groups
    for group, places in stats["pools"].items():
        assert places["free"] == places["total"], group
