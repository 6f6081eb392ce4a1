"""A real server with a tiny random hybrid model: text, reuse, grammar, death, quiescence."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from statewise.frontend.rpc_client import RpcClient
from statewise.runtime.models.tiny import make_tiny_model
from support.server_process import ServerProcess, model_server

PREFIX = "The quick brown fox jumps over the lazy dog. " * 4
GREEDY = {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("model")
    model = make_tiny_model("gemma3", directory / "tiny-gemma3")
    endpoint = f"ipc://{directory}/rpc"
    flags = ["--max-total-tokens", "4096", "--dtype", "float32", "--audit", "--rpc", endpoint]
    with model_server(model, *flags) as server:
        server.rpc = endpoint  # type: ignore[attr-defined]
        yield server


def generate(server: ServerProcess, text: str, **params: Any) -> dict[str, Any]:
    body = {"text": text, "sampling_params": {**GREEDY, **params}}
    answer: dict[str, Any] = server.post("/generate", body).json()
    return answer


def pools(server: ServerProcess) -> dict[str, dict[str, int]]:
    stats = server.get("/get_server_info").json()["internal_states"][0]
    assert stats["num_open"] == 0
    found: dict[str, dict[str, int]] = stats["pools"]
    return found


def test_a_shared_prefix_is_reused_and_changes_nothing(server: ServerProcess) -> None:
    server.post("/flush_cache", {})
    cold = generate(server, PREFIX + "And then")
    warm = generate(server, PREFIX + "And then")
    assert cold["output_ids"] == warm["output_ids"]
    assert cold["meta_info"]["cached_tokens"] == 0
    report = warm["meta_info"]["cache_report"]
    assert report["reused"] == warm["meta_info"]["cached_tokens"] > 0
    assert {group["name"] for group in report["groups"]} == {"full", "window"}
    with RpcClient(server.rpc, timeout_s=30) as client:  # type: ignore[attr-defined]
        assert client.match(PREFIX + "And then")["matched"] > 0
        assert client.match(PREFIX + "And then", cache_salt="other")["matched"] == 0


def test_batch_neighbours_and_seeds_change_nothing(server: ServerProcess) -> None:
    params = {**GREEDY, "temperature": 1.0, "sampling_seed": 5}
    alone = server.post("/generate", {"text": "abc", "sampling_params": params}).json()
    texts = ["abc", "xyz" * 9, "q"]
    together = server.post("/generate", {"text": texts, "sampling_params": params}).json()
    assert together[0]["output_ids"] == alone["output_ids"]


def test_openai_chat_streams_what_it_answers(server: ServerProcess) -> None:
    import openai  # takes seconds

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        arguments: Any = {
            "model": "tiny", "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 10, "temperature": 0, "extra_body": {"ignore_eos": True},
        }  # fmt: skip
        whole = client.chat.completions.create(**arguments).choices[0].message.content
        stream = client.chat.completions.create(**arguments, stream=True)
        assert "".join(c.choices[0].delta.content or "" for c in stream) == whole


@pytest.mark.slow
def test_grammars_hold_the_output(server: ServerProcess) -> None:
    pytest.importorskip("llguidance")
    answer = generate(server, "x", regex="[ab]{3}-[0-9]{2}", ignore_eos=False)
    assert re.fullmatch("[ab]{3}-[0-9]{2}", answer["text"])
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    import openai  # takes seconds

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        made = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}], max_tokens=200,
            response_format={"type": "json_schema", "json_schema": {"name": "o", "schema": schema}},
        )  # fmt: skip
    assert isinstance(json.loads(made.choices[0].message.content or "")["ok"], bool)
    bad = server.post("/generate", {"text": "x", "sampling_params": {"regex": "("}})
    assert bad.status_code == 400
    assert bad.json()["error"]["code"] == "invalid_grammar"
    for stop in ("(", "a{99999}"):
        bad = server.post("/generate", {"text": "x", "sampling_params": {"stop_regex": stop}})
        assert bad.status_code == 400
    assert generate(server, "after")["text"]


def test_logprobs_agree_with_the_greedy_choice(server: ServerProcess) -> None:
    body = {
        "text": "abc", "sampling_params": GREEDY, "return_logprob": True, "logprob_start_len": 0,
        "top_logprobs_num": 3, "return_text_in_logprobs": True,
    }  # fmt: skip
    answer = server.post("/generate", body).json()
    meta = answer["meta_info"]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
    for (logprob, token, text), top in zip(
        meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True
    ):
        assert top[0][1:] == [token, text]
        assert top[0][0] == pytest.approx(logprob, abs=1e-5)
    assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"]


def test_limits_are_answered_not_dropped(server: ServerProcess) -> None:
    limit = server.get("/model_info").json()["max_sequence_len"]
    refused = server.post("/generate", {"input_ids": [65] * (limit + 1)})
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "prompt_too_long"
    room = server.post(
        "/generate",
        {"input_ids": [65] * (limit - 5), "sampling_params": {**GREEDY, "max_new_tokens": 100}},
    )
    assert 0 < len(room.json()["output_ids"]) <= 5
    stopped = generate(server, "abc", max_new_tokens=0)
    assert stopped["output_ids"] == []


@pytest.mark.slow
def test_killed_under_load_it_serves_the_same_again(server: ServerProcess) -> None:
    before = generate(server, PREFIX + "Again")["output_ids"]
    statuses: list[int] = []

    def client(i: int) -> None:
        body = {"text": f"{i} {PREFIX}", "sampling_params": {**GREEDY, "max_new_tokens": 1500}}
        statuses.append(server.post("/generate", body).status_code)

    threads = [threading.Thread(target=client, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    while server.get("/get_server_info").json()["internal_states"][0]["num_running"] < 2:
        assert any(thread.is_alive() for thread in threads)
    server.children()["scheduler"].kill()
    for thread in threads:
        thread.join(30)
    assert 503 in statuses
    assert set(statuses) <= {200, 503}
    server.wait_healthy(180)
    assert generate(server, PREFIX + "Again")["output_ids"] == before


def test_after_a_flush_every_block_is_free(server: ServerProcess) -> None:
    generate(server, PREFIX + "last")
    server.post("/flush_cache", {})
    for group, places in pools(server).items():
        assert places["free"] == places["total"], group


def test_log_probabilities_of_a_prompt_alone(server: ServerProcess) -> None:
    ids = [7, 30, 41, 12]
    asked = {"input_ids": ids, "return_logprob": True, "sampling_params": {"max_new_tokens": 0}}
    meta = server.post("/generate", asked).json()["meta_info"]
    assert [token_id for _, token_id, _ in meta["input_token_logprobs"]] == ids
    assert meta["input_token_logprobs"][0][0] is None
    assert all(logprob < 0 for logprob, _, _ in meta["input_token_logprobs"][1:])
    assert meta["output_token_logprobs"] == []
    rest = server.post("/generate", {**asked, "logprob_start_len": 2}).json()["meta_info"]
    assert [token_id for _, token_id, _ in rest["input_token_logprobs"]] == ids[2:]


@pytest.mark.slow
def test_a_grammar_too_large_to_follow_is_the_requests_own_error(server: ServerProcess) -> None:
    asked = {"text": "a", "sampling_params": {"regex": "((a{1000}){1000}){1000}"}}
    scheduler = server.children()["scheduler"].pid
    answer = server.post("/generate", asked)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_grammar"
    assert server.children()["scheduler"].pid == scheduler
