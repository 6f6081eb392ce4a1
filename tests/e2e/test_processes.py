"""A server whose processes die, hang or are told to end: what clients see, and what is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from statewise.frontend.errors import BackendError
from statewise.frontend.rpc_client import RpcClient
from support.server_process import PYTHONPATH, ServerProcess, echo_server

NUM_CLIENTS = 6
LONG = {"max_new_tokens": 3000}
ANSWER_LIMIT_S = 1.5  # documented: one second; the rest is for a busy machine


class Client(threading.Thread):
    """One request in a thread of its own: its status, its error events, and when it ended."""

    def __init__(self, url: str, *, stream: bool) -> None:
        super().__init__()
        self._url = url
        self._stream = stream
        self.status = 0
        self.errors: list[dict[str, Any]] = []
        self.is_done = False  # a stream's [DONE] was seen
        self.ended_at = 0.0
        self.has_begun = threading.Event()

    def run(self) -> None:
        body = {"text": "x", "stream": self._stream, "sampling_params": LONG}
        with httpx.Client(timeout=60) as client:
            if self._stream:
                self._read_stream(client, body)
            else:
                self.has_begun.set()
                response = client.post(f"{self._url}/generate", json=body)
                self.status = response.status_code
                self.errors = [response.json()["error"]] if response.status_code != 200 else []
        self.ended_at = time.monotonic()

    def _read_stream(self, client: httpx.Client, body: Any) -> None:
        with client.stream("POST", f"{self._url}/generate", json=body) as response:
            self.status = response.status_code
            for line in response.iter_lines():
                self.has_begun.set()
                if line.startswith(('data: {"error"', '{"error"')):  # an event, or the answer
                    self.errors.append(json.loads(line.removeprefix("data: "))["error"])
                self.is_done = self.is_done or line == "data: [DONE]"


def kill_and_wait(server: ServerProcess, victim: str) -> None:
    """Kill a process and wait until its successor is there and the server serves."""
    killed = server.children()[victim]
    killed.kill()
    deadline = time.monotonic() + 20
    while server.children().get(victim, killed).pid == killed.pid:  # also while it is absent
        assert time.monotonic() < deadline, server.log()
        time.sleep(0.02)
    server.wait_healthy()


@pytest.fixture(scope="module")
def server() -> Any:
    with echo_server({"ECHO_STEP_S": "0.02"}) as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["scheduler", "tokenizer", "detokenizer"])
def test_a_killed_process_ends_every_request_once_and_comes_back(
    server: ServerProcess, victim: str
) -> None:
    clients = [Client(server.url, stream=i % 2 == 0) for i in range(NUM_CLIENTS)]
    for client in clients:
        client.start()
    for client in clients:
        assert client.has_begun.wait(10)
    time.sleep(0.2)
    before = server.children()
    killed_at = time.monotonic()
    before[victim].kill()
    seen_503 = False
    while time.monotonic() < killed_at + ANSWER_LIMIT_S and not seen_503:
        seen_503 = server.get("/health").status_code == 503
    for client in clients:
        client.join(10)
    assert seen_503
    assert max(c.ended_at for c in clients) - killed_at < ANSWER_LIMIT_S
    for i, client in enumerate(clients):
        assert len(client.errors) == 1, client.errors
        assert client.errors[0]["code"] == "worker_died"
        assert victim in client.errors[0]["message"]
        assert client.status == (200 if i % 2 == 0 else 503)
        assert client.is_done == (i % 2 == 0)
    server.wait_healthy()
    after = server.children()
    assert after[victim].pid != before[victim].pid
    assert all(after[n].pid == before[n].pid for n in after if n != victim)
    answer = server.post("/generate", {"text": "ok", "sampling_params": {"max_new_tokens": 2}})
    assert answer.json()["text"] == "ok"
    assert server.get("/get_server_info").json()["internal_states"][0]["num_open"] == 0


@pytest.mark.slow
def test_a_request_that_kills_the_scheduler_gets_an_error(server: ServerProcess) -> None:
    response = server.post("/generate", {"text": "crash"})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    refused = server.post("/generate", {"text": "a"})
    assert refused.status_code in (200, 503)
    server.wait_healthy()


@pytest.mark.slow
def test_a_silent_process_is_killed_by_the_watchdog() -> None:
    with echo_server({"ECHO_STEP_S": "0.02"}, watchdog_timeout=2.0) as server:
        client = Client(server.url, stream=True)
        client.start()
        assert client.has_begun.wait(10)
        frozen = server.children()["scheduler"]
        frozen.suspend()
        client.join(15)
        assert [e["code"] for e in client.errors] == ["worker_died"]
        server.wait_healthy()
        assert not frozen.is_running() or frozen.status() == psutil.STATUS_ZOMBIE
        assert "watchdog" in server.log()


@pytest.mark.slow
def test_a_server_that_cannot_stay_up_leaves_with_a_reason() -> None:
    with echo_server() as server:
        for _ in range(5):
            kill_and_wait(server, "tokenizer")
        server.children()["tokenizer"].kill()
        assert server.popen.wait(15) == 1
        assert "5 restarts in 10 minutes did not help" in server.log()
        assert list(server.sockets.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_server_leaves_nothing_behind(sig: int) -> None:
    with echo_server({"ECHO_STEP_S": "0.02"}, drain_timeout=0.5) as server:
        children = list(server.children().values())
        assert len(children) == 3
        assert len(list(server.sockets.iterdir())) == 1
        client = Client(server.url, stream=True)
        client.start()
        assert client.has_begun.wait(10)
        started = time.monotonic()
        assert server.stop(sig) == 0
        assert time.monotonic() - started < 10
        client.join(10)
        assert client.is_done
        assert all(not child.is_running() for child in children)
        assert list(server.sockets.iterdir()) == []


@pytest.mark.slow
def test_an_open_request_may_finish_while_the_server_stops() -> None:
    with echo_server({"ECHO_STEP_S": "0.02"}, drain_timeout=20.0) as server:
        answers: list[httpx.Response] = []
        body = {"text": "x", "sampling_params": {"max_new_tokens": 40}}
        thread = threading.Thread(target=lambda: answers.append(server.post("/generate", body)))
        thread.start()
        time.sleep(0.3)
        assert server.stop() == 0
        thread.join(10)
        assert len(answers[0].json()["output_ids"]) == 40


@pytest.mark.slow
class RpcCall(threading.Thread):
    """One request by RPC: how it ended."""

    def __init__(self, endpoint: str) -> None:
        super().__init__()
        self._endpoint = endpoint
        self.error = ""

    def run(self) -> None:
        with RpcClient(self._endpoint, timeout_s=30) as client, contextlib.suppress(AssertionError):
            try:
                client.generate("x", LONG)
            except BackendError as error:
                self.error = str(error)


@pytest.mark.slow
@pytest.mark.parametrize("num_signals", [1, 2])
def test_a_step_longer_than_the_drain_leaves_no_request_without_its_end(
    num_signals: int, tmp_path: Path
) -> None:
    """Nobody but the server itself can end these requests: the scheduler is amid a step."""
    endpoint = f"ipc://{tmp_path}/rpc"
    drain = 0.1 if num_signals == 1 else 60.0
    settings = {"drain_timeout": drain, "rpc": endpoint}
    with echo_server({"ECHO_STEP_S": "20"}, **settings) as server:
        clients = [Client(server.url, stream=i % 2 == 0) for i in range(4)]
        call = RpcCall(endpoint)
        threads: list[threading.Thread] = [*clients, call]
        flush = threading.Thread(target=lambda: answers.append(server.post("/flush_cache", {})))
        answers: list[httpx.Response] = []
        for thread in threads:
            thread.start()
        time.sleep(1.0)
        flush.start()  # the scheduler is in its step and does not hear of it
        time.sleep(0.5)
        for _ in range(num_signals - 1):
            server.popen.send_signal(signal.SIGINT)
            time.sleep(0.3)
        assert server.stop() == 0
        for thread in [*threads, flush]:
            thread.join(20)
        for client in clients:
            assert client.status == 503, server.log()
            assert [error["message"] for error in client.errors] == ["the server is stopping"]
        assert call.error.endswith("the server is stopping"), call.error
        assert [answer.status_code for answer in answers] == [503]
        check_clean(server.log())


def check_clean(log: str) -> None:
    """Nothing in a log is somebody's surprise."""
    words = ("Traceback", "ZMQError", "CancelledError", "ASGI", "never retrieved", "Cancel ")
    assert not [word for word in words if word in log], log


@pytest.mark.slow
def test_clients_that_do_not_read_or_do_not_send_are_hung_up_on() -> None:
    """A stream nobody reads, and a body that never ends, when the server stops."""
    with echo_server({"ECHO_STEP_S": "0.0005"}, drain_timeout=0.1) as server:
        host, port = server.url.removeprefix("http://").split(":")
        body = json.dumps({"text": "x" * 3000, "stream": True, "sampling_params": LONG}).encode()
        head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        with contextlib.ExitStack() as stack:
            sockets = [
                stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(2)
            ]
            sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sockets[0].sendall(head % len(body) + body)
            sockets[1].sendall(head % len(body) + body[:100])
            time.sleep(1.0)
            assert server.stop() == 0
        check_clean(server.log())


@pytest.mark.slow
def test_children_die_with_a_killed_server() -> None:
    with echo_server() as server:
        children = list(server.children().values())
        server.popen.kill()
        server.popen.wait()
        _, alive = psutil.wait_procs(children, timeout=5)
        assert alive == []
        (abandoned,) = server.sockets.iterdir()
        with echo_server({"TMPDIR": str(server.sockets)}):
            (fresh,) = server.sockets.iterdir()
            assert fresh != abandoned


LAUNCHER = """
import time
from support.server_process import echo_server

with echo_server() as server:
    print(server.popen.pid, *(child.pid for child in server.children().values()), flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
def test_a_server_ends_with_the_process_it_was_told_to_watch(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-P", "-c", LAUNCHER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as launcher:
        assert launcher.stdout is not None
        pids = [int(word) for word in launcher.stdout.readline().split()]
        processes = [psutil.Process(pid) for pid in pids]
        launcher.kill()
    assert len(processes) == 4
    _gone, alive = psutil.wait_procs(processes, timeout=10)
    for process in alive:
        process.kill()
    assert alive == []
    (scratch,) = tmp_path.glob("sw-test-*")
    assert list((scratch / "tmp").iterdir()) == []  # it left in order: no socket is left


def test_the_socket_directory_is_private(server: ServerProcess) -> None:
    (directory,) = server.sockets.iterdir()
    assert os.stat(directory).st_mode & 0o777 == 0o700
    assert [p.name for p in directory.iterdir() if p.suffix == ".json"] == []


@pytest.mark.slow
def test_a_port_in_use_is_an_error_at_once(server: ServerProcess) -> None:
    port = int(server.url.rsplit(":", 1)[1])
    with pytest.raises(AssertionError, match=f"port {port}.*choose another"):
        echo_server(port=port)
