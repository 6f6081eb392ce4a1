"""Starts the child processes, watches that they live, restarts what dies, ends them all.

    STARTING --all ready--> SERVING --one dies--> DEGRADED --all ready--> SERVING
        any --unusable, or too many restarts--> FAILED
        any --stop--> STOPPED

A process that dies in native code runs no handler, so liveness is polled from outside. A process
that lives but shows no sign of life for the watchdog's time is killed, which makes it a dead one.
Restarts are bounded: a server that cannot stay up says so and leaves.

This module does not know requests: it tells a `Listener` who started and who died.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from statewise.runtime.clock import Clock
from statewise.runtime.config import ServerArgs
from statewise.runtime.messages import Heartbeat, Ready
from statewise.runtime.server import links
from statewise.runtime.server.child import EXIT_UNUSABLE, ChildSpec

POLL_S = 0.05
STOP_GRACE_S = 3.0
START_SILENCE_S = 300.0
MAX_RESTARTS = 5
RESTART_WINDOW_S = 600.0
MODULES: dict[str, str] = {
    links.TOKENIZER: "statewise.runtime.server.tokenizer_process",
    links.SCHEDULER: "statewise.runtime.server.scheduler_process",
    links.DETOKENIZER: "statewise.runtime.server.detokenizer_process",
}

log = logging.getLogger(__name__)


class ServerState(enum.Enum):
    """What the server as a whole can do."""

    STARTING = "starting"
    SERVING = "serving"
    DEGRADED = "degraded"  # a process died and its successor is not ready yet
    FAILED = "failed"  # it cannot start, or died too often
    STOPPED = "stopped"


class Listener(Protocol):
    """Who is told about processes."""

    def process_started(self, process: str, address: str) -> None:
        """Take note that a process was started and will read from `address`."""
        ...

    def process_died(self, process: str, reason: str) -> None:
        """Take note that a process is gone."""
        ...

    def state_changed(self, state: ServerState) -> None:
        """Take note that the server can do something else now than before."""
        ...


class Process:
    """One child: its current incarnation and what it last said."""

    def __init__(self, name: str, module: str) -> None:
        self.name = name
        self.module = module
        self.incarnation = -1
        self.popen: subprocess.Popen[bytes] | None = None
        self.is_ready = False
        self.last_seen = 0.0
        self.info: dict[str, Any] = {}
        self.load: dict[str, Any] = {}


def _describe(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


class Supervisor:
    """Owner of the child processes. Lives on one event loop."""

    def __init__(
        self,
        args: ServerArgs,
        directory: links.SocketDirectory,
        clock: Clock,
        listener: Listener,
        modules: Mapping[str, str] = MODULES,
    ) -> None:
        self._args = args
        self._directory = directory
        self._clock = clock
        self._listener = listener
        self.processes = {name: Process(name, module) for name, module in modules.items()}
        self.state = ServerState.STARTING
        self.failure = ""
        self.num_restarts = 0
        self._restart_times: deque[float] = deque()

    # ------------------------------------------------------------- starting

    def start(self) -> None:
        """Start every process; they become ready on their own time."""
        for process in self.processes.values():
            process.incarnation = 0
        for process in self.processes.values():
            self._launch(process)

    def _launch(self, process: Process) -> None:
        """Start one process. Where the system does not allow it, the server gives up."""
        if self.state is ServerState.FAILED:
            return
        try:
            self._spawn(process)
        except OSError as error:
            self._fail(f"the {process.name} process cannot be started: {error}")

    def _spawn(self, process: Process) -> None:
        spec = ChildSpec(
            process=process.name,
            incarnation=process.incarnation,
            parent_pid=os.getpid(),
            inboxes={
                links.SERVER: self._directory.address(links.SERVER, 0),
                **{
                    p.name: self._directory.address(p.name, p.incarnation)
                    for p in self.processes.values()
                },
            },
            args=self._args,
        )
        path = self._directory.path / f"{process.name}.{process.incarnation}.json"
        path.touch(mode=0o600)
        path.write_bytes(msgspec.json.encode(spec))
        process.popen = subprocess.Popen(
            [sys.executable, "-P", "-m", process.module, str(path)],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
            process_group=0,  # Ctrl-C reaches the server alone, which ends the children in order
        )
        process.is_ready = False
        process.info, process.load = {}, {}
        process.last_seen = self._clock.monotonic()
        self._listener.process_started(process.name, spec.inboxes[process.name])

    def use(self, args: ServerArgs) -> None:
        """Start processes with these settings from now on."""
        self._args = args

    # ------------------------------------------------------------- signs of life

    def ready(self, message: Ready) -> None:
        """Take a process's word that it is ready."""
        process = self._current(message.process, message.incarnation)
        if process is None:
            return
        process.is_ready = True
        process.last_seen = self._clock.monotonic()
        process.info = msgspec.json.decode(message.info)
        if all(p.is_ready for p in self.processes.values()):
            self._become(ServerState.SERVING)

    def heartbeat(self, message: Heartbeat) -> None:
        """Take a sign of life."""
        process = self._current(message.process, message.incarnation)
        if process is not None:
            process.last_seen = self._clock.monotonic()
            process.load = msgspec.json.decode(message.load)

    def _current(self, name: str, incarnation: int) -> Process | None:
        process = self.processes.get(name)
        return process if process is not None and process.incarnation == incarnation else None

    def _become(self, state: ServerState) -> None:
        if self.state is not state and self.state not in (ServerState.FAILED, ServerState.STOPPED):
            self.state = state
            self._listener.state_changed(state)

    # ------------------------------------------------------------- watching

    async def watch(self) -> None:
        """Poll until the server failed or was stopped."""
        while self.state not in (ServerState.FAILED, ServerState.STOPPED):
            self.poll()
            await asyncio.sleep(POLL_S)

    def poll(self) -> None:
        """Look at every process once: deal with the dead, kill the silent."""
        now = self._clock.monotonic()
        for process in self.processes.values():
            assert process.popen is not None
            code = process.popen.poll()
            if code is not None:
                self._died(process, code, now)
            elif now - process.last_seen > self._patience(process):
                silent = now - process.last_seen
                log.error("%s silent for %.0f s: killed by the watchdog", process.name, silent)
                process.last_seen = now
                process.popen.kill()
            if self.state is ServerState.FAILED:
                return

    def _patience(self, process: Process) -> float:
        """Seconds of silence that are allowed: more while a process starts (imports, weights)."""
        timeout = self._args.watchdog_timeout
        return timeout if process.is_ready else max(timeout, START_SILENCE_S)

    def _died(self, process: Process, code: int, now: float) -> None:
        reason = f"the {process.name} process ended ({_describe(code)})"
        was_starting = self.state is ServerState.STARTING
        self._become(ServerState.DEGRADED)
        self._listener.process_died(process.name, reason)
        if was_starting or code == EXIT_UNUSABLE:
            self._fail(f"{reason} before it could serve")
            return
        while self._restart_times and now - self._restart_times[0] > RESTART_WINDOW_S:
            self._restart_times.popleft()
        if len(self._restart_times) >= MAX_RESTARTS:
            minutes = RESTART_WINDOW_S / 60
            self._fail(f"{reason}; {MAX_RESTARTS} restarts in {minutes:.0f} minutes did not help")
            return
        log.error("%s; restarting it", reason)
        self._restart_times.append(now)
        self.num_restarts += 1
        process.incarnation += 1
        self._launch(process)

    def _fail(self, reason: str) -> None:
        self.failure = reason
        log.critical("giving up: %s", reason)
        self._become(ServerState.FAILED)

    # ------------------------------------------------------------- ending

    async def stop(self) -> None:
        """End every process: politely, then not; returns when none is left."""
        if self.state is not ServerState.FAILED:
            self._become(ServerState.STOPPED)
        alive = [p.popen for p in self.processes.values() if p.popen is not None]
        for popen in alive:
            if popen.poll() is None:
                popen.terminate()
        deadline = self._clock.monotonic() + STOP_GRACE_S
        while any(p.poll() is None for p in alive) and self._clock.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for popen in alive:
            if popen.poll() is None:
                popen.kill()
            popen.wait()
