"""Start a server as a user does, wait until it is ready, watch its processes, stop it.

Benchmarks, the soak and the demo share this. The server is a subprocess in a process group of its
own: nothing of it runs in the measuring process, and none of it outlives the measurement.
"""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import psutil

import wire

REPOSITORY = Path(__file__).resolve().parent.parent
STOP_TIMEOUT_S = 20.0


def free_port() -> int:
    """Return a loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True)
class ProcessFigures:
    """What a tree of processes holds. Bytes; PSS counts shared pages once for the whole tree."""

    num_processes: int
    num_fds: int
    num_threads: int
    rss_bytes: int
    pss_bytes: int


def process_figures(pid: int) -> ProcessFigures:
    """Add up a process and all its descendants; those that end meanwhile are left out."""
    root = psutil.Process(pid)
    count = fds = threads = rss = pss = 0
    for process in [root, *root.children(recursive=True)]:
        try:
            memory = process.memory_full_info()
            fds += process.num_fds()
            threads += process.num_threads()
        except psutil.Error:
            continue
        count += 1
        rss += memory.rss
        pss += getattr(memory, "pss", memory.rss)
    return ProcessFigures(count, fds, threads, rss, pss)


class Server:
    """One server process tree on loopback, with a log file. Use it as a context manager."""

    def __init__(self, model: str, *arguments: str, log: Path | None = None) -> None:
        self.address = wire.Address("127.0.0.1", free_port())
        self.model = model
        self.start_s = 0.0  # from spawn to the first healthy answer
        self._arguments = arguments
        self._log_path = log or Path(f"server-{self.address.port}.log")
        self._log: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        command = [sys.executable, "-P", "-m", "statewise.launch_server"]
        command += ["--model-path", self.model, "--port", str(self.address.port)]
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log = self._log_path.open("wb")
        start = time.perf_counter()
        self._process = subprocess.Popen(
            [*command, *self._arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={"OMP_WAIT_POLICY": "PASSIVE"}
            | dict(os.environ)
            | {"STATEWISE_PARENT_PID": str(os.getpid())},
        )
        try:
            asyncio.run(self._wait_ready())
        except BaseException:
            self.stop()
            raise
        self.start_s = time.perf_counter() - start
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Process id of the server's first process."""
        assert self._process is not None, "the server is not running"
        return self._process.pid

    def log_tail(self, num_lines: int = 30) -> str:
        """Return the last lines the server printed."""
        text = self._log_path.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-num_lines:])

    async def _wait_ready(self, timeout_s: float = 300.0) -> None:
        assert self._process is not None
        end = time.perf_counter() + timeout_s
        while time.perf_counter() < end:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended while starting:\n{self.log_tail()}")
            try:
                reply = await wire.call(self.address, "GET", "/health", timeout_s=5)
            except (OSError, EOFError, TimeoutError):
                pass
            else:
                if reply.status == 200:
                    return
            await asyncio.sleep(0.02)
        raise RuntimeError(f"the server is not ready after {timeout_s:.0f} s:\n{self.log_tail()}")

    async def info(self) -> dict[str, Any]:
        """Return what the server says of itself."""
        reply = await wire.call(self.address, "GET", "/get_server_info")
        answer: dict[str, Any] = reply.json()
        return answer

    async def flush(self) -> None:
        """Drop all cached state."""
        reply = await wire.call(self.address, "POST", "/flush_cache")
        if reply.status != 200:
            raise RuntimeError(f"flush_cache answered {reply.status}: {reply.body!r}")

    async def generate(self, payload: dict[str, Any], **options: Any) -> wire.Reply:
        """POST /generate; raises RuntimeError on any status but 200."""
        reply = await wire.call(self.address, "POST", "/generate", payload, **options)
        if reply.status != 200:
            raise RuntimeError(f"generate answered {reply.status}: {reply.body[:500]!r}")
        return reply

    def figures(self) -> ProcessFigures:
        """Return what the server's processes hold now."""
        return process_figures(self.pid)

    def stop(self) -> list[str]:
        """Interrupt the server as Ctrl-C does; returns the processes that had to be killed."""
        if self._process is None:
            return []
        try:
            tree = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            tree = []
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        killed = []
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            killed.append("server")
            self._process.kill()
            self._process.wait()
        _gone, alive = psutil.wait_procs(tree, timeout=2)
        for process in alive:
            killed.append(" ".join(process.cmdline()[-3:]))
            process.kill()
        if self._log is not None:
            self._log.close()
        self._process = None
        return killed


def environment() -> dict[str, Any]:
    """Return what a figure depends on: machine, versions, commit, load."""
    from importlib.metadata import version

    commit = subprocess.run(
        ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "numpy": version("numpy"),
        "statewise": version("statewise"),
        "commit": commit,
        "load_average": list(os.getloadavg()),
        "time_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), "")


def as_json(figures: ProcessFigures) -> dict[str, int]:
    """Return figures as a plain dict."""
    return asdict(figures)
