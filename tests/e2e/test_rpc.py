"""The RPC endpoint and its clients, on a server without a model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from statewise.frontend.cli import main as cli
from statewise.frontend.errors import BackendError
from statewise.frontend.rpc_client import AsyncRpcClient, Keys, RpcClient
from statewise.runtime.messages import (
    AbortRequest,
    ControlReply,
    ControlRequest,
    GenerateRequest,
    TextDelta,
    decode,
    encode,
)
from statewise.runtime.sampling_params import SamplingParams
from support.server_process import ServerProcess, echo_server

LONG = {"max_new_tokens": 3000}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    endpoint = f"ipc://{tmp_path_factory.mktemp('rpc')}/socket"
    with echo_server({"ECHO_STEP_S": "0.01"}, rpc=endpoint) as server:
        server.rpc = endpoint  # type: ignore[attr-defined]
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[RpcClient]:
    with RpcClient(server.rpc, timeout_s=20) as client:  # type: ignore[attr-defined]
        yield client


def wait_quiet(server: ServerProcess) -> None:
    """Wait, at most a second, until nothing is open at the server."""
    deadline = time.monotonic() + 1.0
    while server.get("/get_server_info").json()["num_open_at_server"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_generate_answers_as_http_does(server: ServerProcess, client: RpcClient) -> None:
    params = {"max_new_tokens": 4}
    by_rpc = client.generate("abc", params)
    by_http = server.post("/generate", {"text": "abc", "sampling_params": params}).json()
    assert by_rpc["text"] == by_http["text"] == "abca"
    assert by_rpc["meta_info"].keys() == by_http["meta_info"].keys()
    assert client.generate([97, 98], {"max_new_tokens": 2})["text"] == "ab"
    with_logprobs = client.generate("a", {"max_new_tokens": 1}, return_logprob=True)
    assert with_logprobs["meta_info"]["output_token_logprobs"] == [[-0.5, 97, None]]


def test_streams_grow_and_may_be_interleaved(client: RpcClient) -> None:
    params = {"max_new_tokens": 8}
    first, second = client.stream("ab", params), client.stream("cd", params)
    answers: tuple[list[str], list[str]] = ([next(first)["text"]], [next(second)["text"]])
    for stream, texts in zip((first, second), answers, strict=True):
        texts += [answer["text"] for answer in stream]
    assert (answers[0][-1], answers[1][-1]) == ("abababab", "cdcdcdcd")
    assert all(texts == sorted(texts, key=len) for texts in answers)


def test_leaving_a_stream_aborts_it(server: ServerProcess, client: RpcClient) -> None:
    stream = client.stream("x", LONG)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    wait_quiet(server)


def test_a_client_that_vanishes_is_aborted(server: ServerProcess) -> None:
    client = RpcClient(server.rpc)  # type: ignore[attr-defined]
    next(client.stream("x", LONG))
    client._socket.close(linger=0)  # as if the process had been killed: no abort is sent
    wait_quiet(server)


def test_questions_are_answered(client: RpcClient) -> None:
    assert client.match("abc", cache_salt="s") == {"prompt": 3, "matched": 0, "salt": "s"}
    assert client.match([97])["prompt"] == 1
    assert client.flush()["freed_blocks"] == 0
    assert client.stats()["num_open"] == 0
    assert client.ask("ping") == {"status": "serving"}
    assert client.ask("tokenize", {"texts": ["a"]}) == {"tokens": [[97]]}
    assert client.ask("detokenize", {"tokens": [98]}) == {"text": "b"}


@pytest.mark.parametrize(
    ("op", "args", "message"),
    [
        ("explode", {}, "unknown operation 'explode'"),
        ("match", {}, "exactly one of"),
        ("match", {"input_ids": [999]}, "999"),
        ("match", {"input_ids": "x"}, "list of token ids"),
        ("match", {"text": 5}, "'text'"),
        ("tokenize", {"texts": 5}, "texts"),
        ("tokenize", {}, "texts"),
        ("detokenize", {"tokens": [-1]}, "outside the vocabulary"),
        ("detokenize", {"tokens": [1 << 80]}, "tokens"),
    ],
)
def test_bad_questions_get_an_error(
    client: RpcClient, op: str, args: dict[str, Any], message: str
) -> None:
    with pytest.raises(BackendError, match=message):
        client.ask(op, args)
    assert client.ask("ping") == {"status": "serving"}


def test_bad_requests_get_an_error(client: RpcClient) -> None:
    with pytest.raises(BackendError, match="temperature"):
        client.generate("a", {"temperature": -1})
    with pytest.raises(BackendError, match="'n' must be 1"):
        client.generate("a", {"n": 2})
    with pytest.raises(BackendError, match="5000 tokens") as caught:
        client.generate("a" * 5000)
    assert (caught.value.code, caught.value.status) == ("prompt_too_long", 400)
    with pytest.raises(BackendError, match="vocabulary"):
        client.generate([259])


def test_async_client_runs_calls_at_the_same_time(server: ServerProcess) -> None:
    async def run() -> None:
        async with AsyncRpcClient(server.rpc, timeout_s=20) as client:  # type: ignore[attr-defined]
            calls = [client.generate(chr(97 + i), {"max_new_tokens": 3}) for i in range(8)]
            answers = await asyncio.gather(*calls, client.stats())
            assert [a["text"] for a in answers[:8]] == [chr(97 + i) * 3 for i in range(8)]
            stream = client.stream("x", LONG)
            assert (await anext(stream))["text"].startswith("x")
            await stream.aclose()  # type: ignore[attr-defined]
            with pytest.raises(BackendError, match="unknown operation"):
                await client.ask("explode")

    asyncio.run(run())
    wait_quiet(server)


@pytest.mark.slow
def test_dead_scheduler_ends_rpc_requests_too(server: ServerProcess, client: RpcClient) -> None:
    stream = client.stream("x", LONG)
    next(stream)
    server.children()["scheduler"].kill()
    with pytest.raises(BackendError, match="scheduler") as caught:
        for _ in stream:
            pass
    assert caught.value.code == "worker_died"
    server.wait_healthy()
    assert client.generate("a", {"max_new_tokens": 1})["text"] == "a"


def test_a_client_in_another_language_can_be_written(server: ServerProcess) -> None:
    """Only frames, as documented: REQ works, garbage is answered, ids are the client's own."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    other = context.socket(zmq.REQ)
    try:
        for one in (socket, other):
            one.setsockopt(zmq.LINGER, 0)
            one.setsockopt(zmq.RCVTIMEO, 10_000)
            one.connect(server.rpc)  # type: ignore[attr-defined]
        other.send(encode(ControlRequest("q", "ping")))
        assert decode(other.recv()) == ControlReply("q", b'{"status":"serving"}')
        socket.send(b"\x00garbage")
        reply = decode(socket.recv())
        assert isinstance(reply, ControlReply)
        assert "malformed" in reply.error
        socket.send(encode(TextDelta("r")))
        reply = decode(socket.recv())
        assert isinstance(reply, ControlReply)
        assert "not for clients" in reply.error
        request = GenerateRequest("r", SamplingParams(max_new_tokens=3000), "x", stream=True)
        socket.send(encode(request))
        socket.send(encode(request))
        seen = [decode(socket.recv()) for _ in range(5)]
        assert ControlReply("r", error="request id 'r' is in use") in seen
        socket.send(encode(AbortRequest("r", "enough")))
        while not isinstance(last := decode(socket.recv()), TextDelta) or last.finish is None:
            pass
        assert (last.finish.kind, last.finish.message) == ("abort", "enough")
    finally:
        context.destroy(linger=0)
    wait_quiet(server)


@pytest.mark.slow
def test_keys_let_the_right_client_in_and_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["server", "friend", "stranger"]
    assert cli(["rpc-keys", str(tmp_path), *names]) == 0
    assert "friend.key_secret" in capsys.readouterr().out
    admitted = tmp_path / "admitted"
    admitted.mkdir()
    (tmp_path / "friend.key").rename(admitted / "friend.key")
    endpoint = f"ipc://{tmp_path}/socket"
    with echo_server(
        rpc=endpoint,
        rpc_secret_key_file=str(tmp_path / "server.key_secret"),
        rpc_client_keys_dir=str(admitted),
    ):
        friend = Keys(tmp_path / "server.key", tmp_path / "friend.key_secret")
        with RpcClient(endpoint, keys=friend, timeout_s=20) as client:
            assert client.ask("ping") == {"status": "serving"}
        stranger = Keys(tmp_path / "server.key", tmp_path / "stranger.key_secret")
        for keys in (stranger, None):
            with RpcClient(endpoint, keys=keys, timeout_s=0.1) as client:
                for _ in range(10):  # whether it waits for an answer or cannot send: never for ever
                    with pytest.raises(BackendError, match=r"silent|refused"):
                        client.ask("ping")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rpc": "tcp://0.0.0.0:39999"}, "reachable from outside"),
        ({"rpc": "tcp://127.0.0.1:39999", "api_key": "k"}, "bypass --api-key"),
        ({"rpc": "inproc://x"}, "must be tcp"),
    ],
)
def test_endpoints_that_strangers_could_use_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        echo_server(**settings)
