"""What a client of the HTTP API sees, on a server without a model: shapes, streams, refusals."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from support.server_process import ServerProcess, echo_server

if TYPE_CHECKING:
    import openai  # takes seconds: imported where it is used

STEP_S = 0.02


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with echo_server({"ECHO_STEP_S": str(STEP_S)}, max_body_bytes=1 << 16) as server:
        yield server


def events(response: httpx.Response) -> list[Any]:
    """The events of a finished stream; the last is the string [DONE]."""
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


# ------------------------------------------------------------------ /generate


def test_generate_answers_text_ids_and_meta_info(server: ServerProcess) -> None:
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 4}, "rid": "mine"}
    answer = server.post("/generate", body).json()
    assert answer["text"] == "abca"
    assert answer["output_ids"] == [97, 98, 99, 97]
    meta = answer["meta_info"]
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (3, 4)
    assert meta["e2e_latency"] > 0


def test_generate_takes_ids_batches_and_samples(server: ServerProcess) -> None:
    params = {"max_new_tokens": 2}
    one = server.post("/generate", {"input_ids": [97, 98], "sampling_params": params}).json()
    assert one["text"] == "ab"
    batch = server.post("/generate", {"input_ids": [[97], [98]], "sampling_params": params}).json()
    assert [a["text"] for a in batch] == ["aa", "bb"]
    texts = {"text": ["x", "y"], "sampling_params": [{"max_new_tokens": 1}, {"max_new_tokens": 3}]}
    assert [a["text"] for a in server.post("/generate", texts).json()] == ["x", "yyy"]
    samples = {"text": "s", "sampling_params": {"max_new_tokens": 1, "n": 3}}
    assert len(server.post("/generate", samples).json()) == 3
    single = {"text": ["x"], "sampling_params": params}
    assert isinstance(server.post("/generate", single).json(), list)


def test_generate_of_nothing_prefills_only(server: ServerProcess) -> None:
    answer = server.post("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 0}})
    assert answer.json()["output_ids"] == []


def test_generate_streams_cumulative_text(server: ServerProcess) -> None:
    body = {"text": "hello", "stream": True, "sampling_params": {"max_new_tokens": 6}}
    seen = events(server.post("/generate", body))
    texts = [event["text"] for event in seen]
    assert texts[-1] == "helloh"
    assert all(a == b[: len(a)] for a, b in itertools.pairwise(texts))
    assert [e["meta_info"]["finish_reason"] is None for e in seen] == [True] * (len(seen) - 1) + [
        False
    ]


def test_generate_streams_a_batch_with_indices(server: ServerProcess) -> None:
    body = {"text": ["a", "b"], "stream": True, "sampling_params": {"max_new_tokens": 3}}
    last = {event["index"]: event["text"] for event in events(server.post("/generate", body))}
    assert last == {0: "aaa", 1: "bbb"}


def test_generate_stops_at_strings_and_reports_the_match(server: ServerProcess) -> None:
    body = {"text": "one two", "sampling_params": {"max_new_tokens": 50, "stop": ["tw"]}}
    answer = server.post("/generate", body).json()
    assert answer["text"] == "one "
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "tw"}


def test_generate_returns_logprobs(server: ServerProcess) -> None:
    body = {
        "text": "ab",
        "sampling_params": {"max_new_tokens": 2},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
        "return_text_in_logprobs": True,
    }
    meta = server.post("/generate", body).json()["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 97, "a"], [-0.25, 98, "b"]]
    assert meta["output_token_logprobs"] == [[-0.5, 97, "a"], [-0.5, 98, "b"]]
    assert meta["output_top_logprobs"][0] == [[-0.5, 97, "a"], [-1.5, 257, "<eos>"]]


def test_abort_request_ends_a_running_request(server: ServerProcess) -> None:
    body = {"text": "x", "rid": "long", "stream": True, "sampling_params": {"max_new_tokens": 3000}}
    with server.client.stream("POST", "/generate", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        assert server.post("/abort_request", {"rid": "long"}).json() == {"aborted": 1}
        last = [line for line in lines if line.startswith("data: {")][-1]
    finish = json.loads(last[6:])["meta_info"]["finish_reason"]
    assert finish["type"] == "abort"


def test_a_client_that_hangs_up_is_aborted_within_a_second(server: ServerProcess) -> None:
    body = {"text": "x", "sampling_params": {"max_new_tokens": 3000}}
    with pytest.raises(httpx.ReadTimeout):
        server.post("/generate", body, timeout=0.2)
    with server.client.stream("POST", "/generate", json={**body, "stream": True}) as response:
        next(response.iter_lines())
    deadline = time.monotonic() + 1.0
    while server.get("/get_server_info").json()["num_open_at_server"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


# ------------------------------------------------------------------ OpenAI


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openai_completion(client: openai.OpenAI) -> None:
    made = client.completions.create(model="echo", prompt="abc", max_tokens=4, logprobs=2)
    choice = made.choices[0]
    assert (choice.text, choice.finish_reason) == ("abca", "length")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["a", "b", "c", "a"]
    assert choice.logprobs.text_offset == [0, 1, 2, 3]
    assert choice.logprobs.top_logprobs == [{t: -0.5, "<eos>": -1.5} for t in "abca"]
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (3, 4)
    assert made.usage.prompt_tokens_details is not None
    assert made.usage.prompt_tokens_details.cached_tokens == 0


def test_openai_completion_echo_batch_and_samples(client: openai.OpenAI) -> None:
    made = client.completions.create(
        model="echo", prompt=["ab", "c"], max_tokens=1, n=2, echo=True, logprobs=0
    )
    assert [c.text for c in made.choices] == ["aba", "aba", "cc", "cc"]
    assert made.choices[0].logprobs is not None
    assert made.choices[0].logprobs.token_logprobs == [None, -0.25, -0.5]
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (3, 4)
    ids = client.completions.create(model="echo", prompt=[97, 98], max_tokens=1, echo=True)
    assert ids.choices[0].text == "aba"


def test_openai_completion_stream_with_usage(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model="echo", prompt="abc", max_tokens=5, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert "".join(c.choices[0].text for c in chunks if c.choices) == "abcab"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5


def test_openai_chat(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model="echo",
        messages=[
            {"role": "system", "content": "be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
        ],
        max_completion_tokens=3,
        logprobs=True,
        top_logprobs=1,
    )
    choice = made.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("aba", "length")
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [t.token for t in choice.logprobs.content] == ["a", "b", "a"]
    assert choice.logprobs.content[0].bytes == [97]


def test_openai_chat_stream(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="echo", messages=[{"role": "user", "content": "hey"}], max_tokens=4, n=2,
            stream=True, stream_options={"include_usage": True},
        )
    )  # fmt: skip
    texts = {0: "", 1: ""}
    roles = []
    for chunk in chunks[:-1]:
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        roles += [choice.delta.role] if choice.delta.role else []
    assert texts == {0: "heyh", 1: "heyh"}
    assert roles == ["assistant", "assistant"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == 3


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_openai_tool_calls_are_read_from_the_text(client: openai.OpenAI, stream: bool) -> None:
    arguments: Any = {
        "model": "echo", "messages": [{"role": "user", "content": f"ok {CALL}|"}],
        "max_tokens": 200, "tools": TOOLS, "stop": ["|"],
    }  # fmt: skip
    if not stream:
        choice = client.chat.completions.create(**arguments).choices[0]
        calls = choice.message.tool_calls
        assert calls is not None
        assert [(c.function.name, c.function.arguments) for c in calls] == [("add", '{"a":1}')]
        assert (choice.message.content, choice.finish_reason) == ("ok", "tool_calls")
        return
    names, shown, reason = [], "", None
    for chunk in client.chat.completions.create(**arguments, stream=True):
        delta = chunk.choices[0].delta
        shown += delta.content or ""
        reason = chunk.choices[0].finish_reason or reason
        names += [c.function.name for c in delta.tool_calls or [] if c.function]
    assert (shown, names, reason) == ("ok ", ["add"], "tool_calls")


def test_openai_models_and_errors(client: openai.OpenAI) -> None:
    import openai

    assert [m.id for m in client.models.list()] == ["echo"]
    assert client.models.retrieve("echo").id == "echo"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="echo", prompt="a", temperature=-1)
    with pytest.raises(openai.BadRequestError, match="no such tool"):
        client.chat.completions.create(
            model="echo", messages=[{"role": "user", "content": "a"}], tools=TOOLS,
            tool_choice={"type": "function", "function": {"name": "sub"}},
        )  # fmt: skip


# ------------------------------------------------------------------ control


def test_control_routes_answer(server: ServerProcess) -> None:
    assert server.get("/health").json() == {"status": "serving"}
    assert server.get("/ready").status_code == 200
    assert server.get("/health_generate").status_code == 200
    for path in ("/model_info", "/get_model_info"):
        info = server.get(path).json()
        assert info["model_path"] == "echo"
        assert "{{ messages }}" in info["chat_template"]
    for path in ("/server_info", "/get_server_info"):
        info = server.get(path).json()
        assert info["internal_states"][0]["num_open"] == 0
        assert "api_key" not in info
    assert server.post("/flush_cache", {}).json()["success"] is True
    assert server.get("/get_load").json()[0]["num_reqs"] == 0
    assert server.get("/v1/loads").json()["loads"][0]["num_running_reqs"] == 0
    assert server.get("/cache").json() == {"nodes": []}
    svg = server.get("/cache?format=svg")
    assert (svg.headers["content-type"], svg.text) == ("image/svg+xml", "<svg & nothing>")
    page = server.get("/cache/ui")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "<title>statewise cache</title>" in page.text
    assert server.post("/tokenize", {"prompt": "ab"}).json()["tokens"] == [97, 98]
    assert server.post("/tokenize", {"prompt": ["a", "b"]}).json()["tokens"] == [[97], [98]]
    assert server.post("/detokenize", {"tokens": [97, 98]}).json() == {"text": "ab"}
    assert server.post("/detokenize", {"tokens": [[97], [98]]}).json() == {"text": ["a", "b"]}


def test_metrics_count_requests_errors_and_tokens(server: ServerProcess) -> None:
    server.post("/generate", {"text": "abc", "sampling_params": {"max_new_tokens": 2}})
    server.post("/generate", {})
    text = server.get("/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values['statewise:prompt_tokens_total{model_name="echo"}']) >= 3
    assert float(values['statewise:errors_total{code="invalid_request"}']) >= 1
    assert float(values['statewise:http_responses_total{route="/generate",status="400"}']) >= 1
    assert 'statewise:time_to_first_token_seconds_count{model_name="echo"}' in values
    assert server.client.head("/metrics").status_code == 200


# ------------------------------------------------------------------ bad input

NEEDS_MESSAGE: list[tuple[str, str, bytes, int, str]] = [
    ("malformed JSON", "/generate", b'{"text": "a"', 400, "truncated"),
    ("empty body", "/generate", b"", 400, "body"),
    ("not an object", "/generate", b"[1]", 400, "object"),
    ("invalid UTF-8", "/generate", b'{"text": "a\xff"}', 400, "UTF-8"),
    ("lone surrogate", "/generate", b'{"text": "\\ud800 x y z"}', 400, "surrogate"),
    ("NaN", "/generate", b'{"text": "a", "sampling_params": {"temperature": NaN}}', 400, "NaN"),
    ("infinite", "/generate",
     b'{"text":"a","sampling_params":{"temperature":1e999}}',
     400, "range"),
    ("deep", "/generate", b'{"text":"a","sampling_params":{"stop":' + b"[" * 20_000, 400, "deep"),
    ("too large", "/generate", b'{"text": "' + b"a" * (1 << 17) + b'"}', 413, "max-body-bytes"),
    ("no prompt", "/generate", b"{}", 400, "exactly one of"),
    ("both prompts", "/generate", b'{"text": "a", "input_ids": [1]}', 400, "exactly one of"),
    ("wrong type", "/generate", b'{"text": 5}', 400, "$.text"),
    ("empty batch", "/generate", b'{"text": []}', 400, "'text'"),
    ("empty text", "/generate", b'{"text": ""}', 400, "empty"),
    ("empty ids", "/generate", b'{"input_ids": []}', 400, "'input_ids'"),
    ("id too large", "/generate", b'{"input_ids": [1, 259]}', 400, "259"),
    ("id negative", "/generate", b'{"input_ids": [-1]}', 400, "-1"),
    ("id beyond int64", "/generate", b'{"input_ids": [99999999999999999999]}', 400, "input_ids"),
    ("id is a bool", "/generate", b'{"input_ids": [true]}', 400, "input_ids"),
    ("mixed ids", "/generate", b'{"input_ids": [[1], 2]}', 400, "mixes"),
    ("unknown parameter", "/generate", b'{"text":"a","sampling_params":{"foo":1}}', 400, "foo"),
    ("negative length", "/generate",
     b'{"text":"a","sampling_params":{"max_new_tokens":-1}}',
     400, "max_new_tokens"),
    ("n of 0", "/generate", b'{"text":"a","sampling_params":{"n":0}}', 400, "'n'"),
    ("bad seed", "/generate",
     b'{"text":"a","sampling_params":{"sampling_seed":"x"}}',
     400, "sampling_seed"),
    ("params mismatch", "/generate",
     b'{"text":["a","b"],"sampling_params":[{}]}',
     400, "1 values for 2"),
    ("bad logprob start", "/generate",
     b'{"text":"a","return_logprob":true,"logprob_start_len":9}',
     400, "logprob_start_len"),
    ("bad top", "/generate",
     b'{"text":"a","return_logprob":true,"top_logprobs_num":999}',
     400, "999"),
    ("adapter", "/generate", b'{"text":"a","lora_path":"x"}', 400, "adapter"),
    ("image", "/generate", b'{"text":"a","image_data":"x"}', 400, "image_data"),
    ("long rid", "/generate", b'{"text":"a","rid":"' + b"r" * 300 + b'"}', 400, "rid"),
    ("priority", "/generate", b'{"text":"a","priority":99999999999}', 400, "priority"),
    ("too long", "/generate", b'{"text": "' + b"a" * 5000 + b'"}', 400, "5000 tokens"),
    ("too long stream", "/generate",
     b'{"stream": true, "text": "' + b"a" * 5000 + b'"}',
     400, "5000 tokens"),
    ("no prompt field", "/v1/completions", b"{}", 400, "prompt"),
    ("suffix", "/v1/completions", b'{"prompt":"a","suffix":"b"}', 400, "suffix"),
    ("empty prompt list", "/v1/completions", b'{"prompt":[]}', 400, "prompt"),
    ("mixed prompt", "/v1/completions", b'{"prompt":["a",1]}', 400, "prompt"),
    ("no messages", "/v1/chat/completions", b'{"messages":[]}', 400, "messages"),
    ("no role", "/v1/chat/completions", b'{"messages":[{"content":"a"}]}', 400, "messages[0].role"),
    ("picture", "/v1/chat/completions",
     b'{"messages":[{"role":"user","content":[{"type":"image_url"}]}]}',
     400, "text parts"),
    ("bad format", "/v1/chat/completions",
     b'{"messages":[{"role":"user","content":"a"}],'
     b'"response_format":{"type":"xml"}}',
     400, "response_format"),
    ("abort nothing", "/abort_request", b"{}", 400, "rid"),
    ("detokenize range", "/detokenize", b'{"tokens":[70000]}', 400, "70000"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [case[1:] for case in NEEDS_MESSAGE],
    ids=[case[0] for case in NEEDS_MESSAGE],
)
def test_bad_input_gets_its_status_and_a_message(
    server: ServerProcess, path: str, body: bytes, status: int, message: str
) -> None:
    response = server.client.post(path, content=body)
    error = response.json()["error"]
    assert response.status_code == status, error
    assert message in error["message"]
    assert error["type"]
    assert error["code"]
    after = server.post("/generate", {"text": "z", "sampling_params": {"max_new_tokens": 1}})
    assert after.json()["text"] == "z"


def test_unknown_fields_paths_and_methods(server: ServerProcess) -> None:
    body = {"text": "a", "modalities": ["text"], "sampling_params": {"max_new_tokens": 1}}
    assert server.post("/generate", body).json()["text"] == "a"
    assert server.get("/nope").status_code == 404
    assert server.get("/nope").json()["error"]["code"] == "not_found"
    assert server.get("/generate").status_code == 405


def test_a_ten_megabyte_body_is_refused_and_read(server: ServerProcess) -> None:
    response = server.client.post("/generate", content=b'{"text": "' + b"a" * (10 << 20) + b'"}')
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"


def test_null_means_default(server: ServerProcess) -> None:
    params = {"max_new_tokens": 1, "stop": None, "temperature": None}
    body = {"text": "a", "rid": None, "stream": None, "lora_path": None, "sampling_params": params}
    assert server.post("/generate", body).json()["text"] == "a"


@pytest.mark.slow
def test_a_stream_interval_makes_fewer_events() -> None:
    with echo_server({"ECHO_STEP_S": "0.01"}, stream_interval=5) as server:
        body = {"text": "abc", "stream": True, "sampling_params": {"max_new_tokens": 22}}
        counts = [len(event["output_ids"]) for event in events(server.post("/generate", body))]
        assert counts[-1] == 22
        assert all(b - a >= 5 for a, b in itertools.pairwise(counts[:-1]))


@pytest.mark.slow
def test_keys_guard_all_but_health_and_metrics() -> None:
    with echo_server(api_key="sesame", admin_api_key="open", log_requests=True) as server:
        assert server.get("/health").status_code == 200
        assert server.get("/metrics").status_code == 200
        assert server.get("/model_info").status_code == 401
        assert server.post("/generate", {"text": "a"}).json()["error"]["code"] == "unauthorized"
        key = {"Authorization": "Bearer sesame"}
        assert server.client.get("/model_info", headers=key).status_code == 200
        assert server.client.post("/flush_cache", headers=key).status_code == 401
        admin = {"Authorization": "Bearer open"}
        assert server.client.post("/flush_cache", headers=admin).status_code == 200
        assert all("sesame" not in " ".join(c.cmdline()) for c in server.children().values())
        shown = server.client.get("/server_info", headers=key).text
        assert "sesame" not in shown
        assert "127.0.0.1 POST /generate -> 401 in " in server.log()
