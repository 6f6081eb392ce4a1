"""Prompt programs against what a user starts: an engine in this process, and a server.

One tiny hybrid model (sliding windows and full attention), greedy, so that both must say the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import statewise as sw
from statewise.runtime.models.tiny import make_tiny_model

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {"max_total_tokens": 8192, "page_size": 16, "num_threads": 1}
LONG = "One line of a text that every question is about. " * 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("gemma3", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Any]:
    with sw.Engine(model_path=str(model), **SETTINGS) as engine:
        yield engine


@pytest.fixture(scope="module")
def runtime(model: Path) -> Iterator[sw.Runtime]:
    with sw.Runtime(model_path=str(model), enable_metrics=False, **SETTINGS) as runtime:
        yield runtime
    assert runtime.pid is None
    runtime.shutdown()  # again does nothing


@pytest.fixture
def backends(engine: Any, runtime: sw.Runtime) -> list[Any]:
    sw.flush_cache(engine)
    sw.flush_cache(runtime)
    return [engine, runtime]


@sw.function
def converse(s: Any, question: str) -> None:
    s += sw.system("Be brief.")
    s += sw.user(question)
    s += sw.assistant(sw.gen("first", max_tokens=12))
    s += sw.user("And then?")
    s += sw.assistant("Well, " + sw.gen("second", max_tokens=12, stop=["zzz"]))


@sw.function
def branch(s: Any) -> None:
    s += LONG
    forks = s.fork(3)
    forks += lambda i: f"Branch {i}: " + sw.gen("x", max_tokens=8)
    forks.join()
    s += "Together: " + sw.gen("end", max_tokens=8)


def test_engine_and_server_say_the_same(backends: list[Any]) -> None:
    cases: list[tuple[Any, dict[str, Any]]] = [(converse, {"question": "Why?"}), (branch, {})]
    for program, arguments in cases:
        states = [program.run(temperature=0, backend=b, **arguments) for b in backends]
        assert states[0].text() == states[1].text()
        assert states[0].messages() == states[1].messages()
        streamed = program.run(temperature=0, backend=backends[1], stream=True, **arguments)
        assert "".join(streamed.text_iter()) == states[0].text()


def test_turns_are_the_servers_own_prompt(engine: Any) -> None:
    state = converse.run(question="Why?", temperature=0, backend=engine)
    chat = {"messages": state.messages()[:2]}
    prompt = state.text().partition(state["first"])[0] if state["first"] else state.text()
    assert engine.encode(prompt) == engine.encode_chat(chat)
    assert state.get_meta_info("first")["prompt_tokens"] == len(engine.encode_chat(chat))


def test_branches_reuse_the_published_prefix(backends: list[Any]) -> None:
    for backend in backends:
        state = branch.run(temperature=0, backend=backend)
        report = state.cache_report()
        assert [entry["kind"] for entry in report] == ["publish", "gen", "gen", "gen", "gen"]
        published = report[0]["prompt_tokens"]
        for entry in report[1:]:
            assert entry["cached_tokens"] >= published - published % SETTINGS["page_size"]
            assert entry["report"]["reused"] == entry["cached_tokens"]
        cold = branch.run(temperature=0, backend=backend, cache_salt="another")
        assert cold.cache_report()[0]["cached_tokens"] == 0
        assert cold.text() == state.text()
        assert cold["x"] == state["x"]


def test_selection_agrees_with_the_engines_scores(backends: list[Any]) -> None:
    choices = ["yes", "no", "maybe so"]

    @sw.function
    def program(s: Any, method: Any) -> None:
        s += LONG + "Is it? " + sw.select("x", choices, choices_method=method)

    for method in (
        sw.token_length_normalized,
        sw.greedy_token_selection,
        sw.unconditional_likelihood_normalized,
    ):
        picks = {program.run(method, backend=b)["x"] for b in backends}
        assert len(picks) == 1
    scored = program.run(sw.token_length_normalized, backend=backends[0])
    means = scored.get_meta_info("x")["normalized_prompt_logprobs"]
    for choice, mean in zip(choices, means, strict=True):
        ids = backends[0].encode(LONG + "Is it? " + choice)
        answer = backends[0].generate(
            input_ids=ids,
            sampling_params={"max_new_tokens": 0},
            return_logprob=True,
            logprob_start_len=0,
            cache_salt="apart",
        )
        tail = answer["meta_info"]["input_token_logprobs"][-len(choice) :]  # a token is a byte
        assert mean == pytest.approx(sum(t[0] for t in tail) / len(tail), abs=1e-3)


def test_grammars_hold(backends: list[Any]) -> None:
    pytest.importorskip("llguidance")

    @sw.function
    def program(s: Any) -> None:
        s += "Pick: " + sw.select("pick", ["red", "green (dark)"], choices_method=sw.constrained)
        s += " number: " + sw.gen_int("n", max_tokens=4)
        s += " or: " + sw.gen("x", regex="(ab|cd)+e", max_tokens=40)

    for backend in backends:
        state = program.run(temperature=0, backend=backend)
        assert state["pick"] in ("red", "green (dark)")
        int(state["n"])
        assert set(state["x"]) <= set("abcde")


def test_batches_and_asynchronous_programs(runtime: sw.Runtime) -> None:
    @sw.function
    async def program(s: Any, number: int) -> None:
        s += LONG + f"Question {number}: "
        s += sw.gen("x", max_tokens=6)
        await s.async_get("x")

    items = [{"number": i} for i in range(12)]
    states = program.run_batch(items, temperature=0, backend=runtime)

    async def main() -> list[Any]:
        runs = (program.arun(number=i, temperature=0, backend=runtime) for i in range(12))
        return await asyncio.gather(*runs)

    assert [s["x"] for s in states] == [s["x"] for s in asyncio.run(main())]
    assert all(s.usage().cached_tokens >= 256 for s in states)


def test_samples_and_seeds(backends: list[Any]) -> None:
    @sw.function
    def program(s: Any) -> None:
        s += "a" + sw.gen("x", n=3, max_tokens=8, seed=5)

    seen = [program.run(backend=backend)["x"] for backend in (*backends, *backends)]
    assert all(len(texts) == 3 for texts in seen)
    assert seen[0] == seen[2]
    assert seen[1] == seen[3]


def test_errors_of_the_server_reach_the_program(backends: list[Any]) -> None:
    @sw.function
    def program(s: Any) -> None:
        s += "a" + sw.gen("x", top_p=7.0)

    for backend in backends:
        with pytest.raises(sw.ProgramError, match="top_p"):
            program.run(backend=backend)["x"]


def test_the_openai_backend_against_the_server(runtime: sw.Runtime) -> None:
    @sw.function
    def program(s: Any) -> None:
        s += sw.user("Why?")
        s += sw.assistant(sw.gen("x", max_tokens=8))

    remote = sw.OpenAI("tiny", runtime.url + "/v1", "none")
    here, there = (program.run(temperature=0, backend=b) for b in (runtime, remote))
    assert here["x"] == there["x"]
    assert here.usage().prompt_tokens == there.usage().prompt_tokens
    streamed = program.run(temperature=0, backend=remote, stream=True)
    assert "".join(streamed.text_iter("x")) == here["x"]


def test_runtime_says_when_the_server_cannot_start(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(sw.BackendError, match="ended with code"):
        sw.Runtime(model_path="x", pagesize=3)
    assert "page_size" in capfd.readouterr().err
