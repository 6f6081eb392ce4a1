"""The OpenAI backend: what it sends, what it reads, what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

import statewise as sw
from statewise.frontend.backends.base import Backend
from support.fake_service import FakeService

USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 2,
    "prompt_tokens_details": {"cached_tokens": 4},
}


def answer(*texts: str, chat: bool = True) -> Any:
    choices: list[dict[str, Any]] = [
        {"message": {"content": text}, "finish_reason": "stop"}
        if chat
        else {"text": text, "finish_reason": "stop"}
        for text in texts
    ]
    return {"id": "c1", "choices": choices, "usage": USAGE}


def say(service: FakeService, path: str, *answers: Any) -> None:
    service.failures += [(path, 200, {}, each) for each in answers]


@sw.function
def chat(s: Any, question: str) -> None:
    s += sw.system("Be kind.")
    s += sw.user(question)
    s += sw.assistant(sw.gen("a", max_tokens=5, stop=["x"], regex="[a-z]+"))
    s += sw.user("and?")
    s += sw.assistant(sw.gen("b", seed=3))


def test_chat_models_get_the_conversation(service: FakeService) -> None:
    backend = sw.OpenAI("gpt-x", service.url, "key", is_chat_model=True)
    assert isinstance(backend, Backend)
    say(service, "/chat/completions", answer("one"), answer("two"))
    state = chat.run(question="hi", backend=backend, temperature=0.5)
    assert (state["a"], state["b"]) == ("one", "two")
    assert state.text().endswith("USER: and?\nASSISTANT: two\n")
    first, second = service.bodies("/chat/completions")
    assert first == {
        "model": "gpt-x",
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "hi"},
        ],
        "stop": ["x", "\nUSER:", "\nSYSTEM:"],
        "temperature": 0.5,
        "top_p": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "regex": "[a-z]+",
        "max_completion_tokens": 5,
    }
    assert second["messages"][2:] == [
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "and?"},
    ]
    assert second["seed"] == 3
    usage = state.usage()
    assert (usage.prompt_tokens, usage.cached_tokens, usage.generated_tokens) == (18, 8, 4)


def test_completion_models_get_the_text(service: FakeService) -> None:
    backend = sw.OpenAI("gpt-3.5-turbo-instruct", service.url)

    @sw.function
    def program(s: Any) -> None:
        s += "once" + sw.gen("x", n=2, max_tokens=3)

    say(service, "/completions", answer(" a", " b", chat=False))
    state = program.run(backend=backend, top_k=5, exact=True)
    assert state["x"] == [" a", " b"]
    assert state.text() == "once a"
    assert state.usage().prompt_tokens == 9
    (body,) = service.bodies("/completions")
    assert (body["prompt"], body["max_tokens"], body["n"], body["top_k"]) == ("once", 3, 2, 5)
    assert body["exact"] is True


def test_selection_is_held_to_the_choices(service: FakeService) -> None:
    @sw.function
    def in_chat(s: Any) -> None:
        s += sw.user("which?")
        s += sw.assistant(sw.select("x", ["yes", "no"]))

    backend = sw.OpenAI("m", service.url)
    say(service, "/chat/completions", answer('{"choice": "no"}'), answer("maybe"))
    assert in_chat.run(backend=backend)["x"] == "no"
    body = service.bodies("/chat/completions")[0]
    schema = body["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["choice"]["enum"] == ["yes", "no"]
    with pytest.raises(sw.ProgramError, match="did not hold to the choices"):
        in_chat.run(backend=backend)["x"]

    @sw.function
    def plain(s: Any) -> None:
        s += "which? " + sw.select("x", ["yes", "no"])

    backend = sw.OpenAI("m", service.url, is_chat_model=False)
    say(service, "/completions", answer("no", chat=False), answer("maybe", chat=False))
    assert plain.run(backend=backend)["x"] == "no"
    assert service.bodies("/completions")[0]["regex"] == "(yes|no)"
    with pytest.raises(sw.ProgramError, match="none of the choices"):
        plain.run(backend=backend)["x"]


def test_schemas_become_response_formats(service: FakeService) -> None:
    @sw.function
    def program(s: Any) -> None:
        s += sw.user("json")
        s += sw.assistant(sw.gen("x", json_schema={"type": "object"}))

    say(service, "/chat/completions", answer("{}"))
    program.run(backend=sw.OpenAI("m", service.url)).sync()
    (body,) = service.bodies("/chat/completions")
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}


def test_what_the_interface_cannot_say_is_refused(service: FakeService) -> None:
    backend = sw.OpenAI("m", service.url)

    @sw.function
    def outside(s: Any) -> None:
        s += "text" + sw.gen("x")

    @sw.function
    def started(s: Any) -> None:
        s += sw.user("q")
        s += sw.assistant("Well, " + sw.gen("x"))

    @sw.function
    def stops(s: Any) -> None:
        s += sw.user("q")
        s += sw.assistant(sw.gen("x", stop_regex="a+"))

    for program, words in (
        (outside, "inside an assistant turn"),
        (started, "has text already"),
        (stops, "no stop_regex"),
    ):
        with pytest.raises(sw.ProgramError, match=words):
            program.run(backend=backend)["x"]
    with pytest.raises(sw.BackendError, match="cannot flush"):
        sw.flush_cache(backend)
    assert service.bodies("/chat/completions") == []


def test_forks_publish_nothing(service: FakeService) -> None:
    @sw.function
    def program(s: Any) -> None:
        s += sw.user("q")
        forks = s.fork(2)
        forks += sw.assistant(sw.gen("x"))
        forks.join()

    say(service, "/chat/completions", answer("a"), answer("a"))
    assert program.run(backend=sw.OpenAI("m", service.url))["x"] == ["a", "a"]


def test_errors_in_answers(service: FakeService) -> None:
    backend = sw.OpenAI("m", service.url)
    say(service, "/chat/completions", {"error": {"message": "broke"}}, {"choices": []})
    for words in ("broke", "without choices"):
        with pytest.raises(sw.ProgramError, match=words):
            chat.run(question="q", backend=backend)["a"]


def test_streams(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    events = [
        {"id": "c", "choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"id": "c", "choices": [{"delta": {"content": "on"}}]},
        {"id": "c", "choices": [{"delta": {"content": "e"}, "finish_reason": "stop"}]},
        {"id": "c", "choices": [], "usage": USAGE},
    ]
    monkeypatch.setattr(service, "stream", lambda body: iter(events))

    @sw.function
    def program(s: Any) -> None:
        s += sw.user("q")
        s += sw.assistant(sw.gen("x", return_logprob=True, top_logprobs_num=2))

    state = program.run(backend=sw.OpenAI("m", service.url), stream=True)
    assert "".join(state.text_iter("x")) == "one"
    meta = state.get_meta_info("x")
    assert (meta["prompt_tokens"], meta["finish_reason"]) == (9, {"type": "stop"})
    (body,) = service.bodies("/chat/completions")
    assert body["stream_options"] == {"include_usage": True}
    assert (body["logprobs"], body["top_logprobs"]) == (True, 2)


def test_settings_come_from_the_environment(
    service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", service.url)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    service.api_key = "secret"
    say(service, "/models", {"data": [{"id": "m"}]})
    assert sw.OpenAI("m").get_server_info() == {"models": [{"id": "m"}]}
    assert json.loads(json.dumps(sw.OpenAI("m").is_chat_model)) is True
    assert sw.OpenAI("davinci-002").is_chat_model is False
