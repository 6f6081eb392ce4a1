"""A server as a user starts it: a subprocess on a free port, with its log kept for failures."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).parents[2]
PYTHONPATH = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])  # this checkout's code
READY = re.compile(r"is ready: .* at (http://\S+)")
START_TIMEOUT_S = 180.0  # a first start may compile the native kernels


class ServerProcess:
    """One running server. `kill` and `stop` end it; leaving the context stops it."""

    def __init__(self, command: Sequence[str], env: dict[str, str] | None = None) -> None:
        self.scratch = tempfile.TemporaryDirectory(prefix="sw-test-")
        self._log = Path(self.scratch.name) / "log"
        self.sockets = Path(self.scratch.name) / "tmp"
        self.sockets.mkdir()
        environment = {
            **os.environ,
            "PYTHONPATH": PYTHONPATH,
            "TMPDIR": str(self.sockets),
            "OMP_NUM_THREADS": "1",
            "STATEWISE_PARENT_PID": str(os.getpid()),  # a killed test run leaves no server
            **(env or {}),
        }
        with self._log.open("wb") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-P", *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                cwd=self.scratch.name,
                process_group=0,
            )
        try:
            self.url = self._wait_ready()
        except BaseException:
            self._discard()
            raise
        self.client = httpx.Client(base_url=self.url, timeout=30.0)

    def _discard(self) -> None:
        """End the process whatever it does, and what belongs to it."""
        if self.popen.poll() is None:
            self.popen.kill()
            self.popen.wait()
        assert self.popen.stdout is not None
        self.popen.stdout.close()
        self.scratch.cleanup()

    def _wait_ready(self) -> str:
        """Read standard output up to the ready line."""
        assert self.popen.stdout is not None
        timer = threading.Timer(START_TIMEOUT_S, self.popen.kill)
        timer.start()
        try:
            for line in self.popen.stdout:
                found = READY.search(line.decode())
                if found:
                    return found[1]
        finally:
            timer.cancel()
        raise AssertionError(f"the server did not start:\n{self.log()}")

    def log(self) -> str:
        """Everything it logged so far."""
        return self._log.read_text(errors="replace")

    def children(self) -> dict[str, psutil.Process]:
        """The living child processes by name."""
        out = {}
        for child in psutil.Process(self.popen.pid).children():
            try:
                module = [word for word in child.cmdline() if "echo_" in word or "_process" in word]
            except psutil.Error:  # it has just died
                continue
            for name in ("detokenizer", "tokenizer", "scheduler"):
                if module and name in module[0]:
                    out[name] = child
                    break
        return out

    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        return self.client.post(path, json=body, **kwargs)

    def get(self, path: str) -> httpx.Response:
        return self.client.get(path)

    def wait_healthy(self, timeout_s: float = 30.0) -> None:
        """Wait until requests are taken again."""
        deadline = time.monotonic() + timeout_s
        while self.get("/health").status_code != 200:
            assert time.monotonic() < deadline, f"not healthy:\n{self.log()}"
            time.sleep(0.05)

    def stop(self, sig: int = signal.SIGINT, timeout_s: float = 20.0) -> int:
        """Ask it to end as a terminal would; returns its exit status."""
        if self.popen.poll() is None:
            self.popen.send_signal(sig)
        return self.popen.wait(timeout_s)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.client.close()
        try:
            self.stop()
        finally:
            self._discard()


def echo_server(env: dict[str, str] | None = None, **settings: Any) -> ServerProcess:
    """Start a server without a model (support.echo)."""
    settings = {"model_path": "echo", "port": 0, "parent_pid": os.getpid(), **settings}
    return ServerProcess(["-m", "support.echo_server", json.dumps(settings)], env)


def model_server(model_path: str | Path, *flags: str) -> ServerProcess:
    """Start a server of a model, by the command line."""
    command = ["-m", "statewise.launch_server", "--model-path", str(model_path), "--port", "0"]
    return ServerProcess([*command, *flags])
