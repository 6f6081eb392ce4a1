"""Processes that start, die, hang and come back, with time and processes in the test's hand."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from statewise.runtime.config import ServerArgs
from statewise.runtime.messages import Heartbeat, Ready
from statewise.runtime.server import links
from statewise.runtime.server.child import EXIT_UNUSABLE, read_spec
from statewise.runtime.server.supervisor import (
    MAX_RESTARTS,
    RESTART_WINDOW_S,
    START_SILENCE_S,
    ServerState,
    Supervisor,
)


class ManualClock:
    """Implements `Clock`; time is what the test says."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


class FakePopen:
    """A process that lives until told otherwise."""

    started: list[FakePopen]

    def __init__(self, command: list[str], **options: Any) -> None:
        self.command = command
        self.options = options
        self.code: int | None = None
        self.signals: list[str] = []
        FakePopen.started.append(self)

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.signals.append("term")
        self.code = 0

    def kill(self) -> None:
        self.signals.append("kill")
        self.code = -signal.SIGKILL

    def wait(self) -> int | None:
        return self.code


class Log:
    """Implements `Listener`; keeps what it was told."""

    def __init__(self) -> None:
        self.started: list[tuple[str, str]] = []
        self.died: list[tuple[str, str]] = []
        self.states: list[ServerState] = []

    def process_started(self, process: str, address: str) -> None:
        self.started.append((process, address))

    def process_died(self, process: str, reason: str) -> None:
        self.died.append((process, reason))

    def state_changed(self, state: ServerState) -> None:
        self.states.append(state)


class World:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.log = Log()
        self.directory = links.SocketDirectory()
        args = ServerArgs(model_path="m", watchdog_timeout=5.0, api_key="secret")
        self.supervisor = Supervisor(args, self.directory, self.clock, self.log)
        self.supervisor.start()

    def popen(self, name: str) -> FakePopen:
        popen: Any = self.supervisor.processes[name].popen
        assert isinstance(popen, FakePopen)
        return popen

    def ready(self, *names: str) -> None:
        for name in names or links.CHILDREN:
            incarnation = self.supervisor.processes[name].incarnation
            self.supervisor.ready(Ready(name, b'{"fact": 1}', incarnation))

    def beat(self) -> None:
        for name, process in self.supervisor.processes.items():
            self.supervisor.heartbeat(Heartbeat(name, 0.0, b"{}", process.incarnation))

    def die(self, name: str, code: int = -signal.SIGSEGV) -> None:
        self.popen(name).code = code
        self.supervisor.poll()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    FakePopen.started = []
    monkeypatch.setattr(subprocess, "Popen", FakePopen)
    world = World()
    yield world
    world.directory.remove()


def test_all_must_be_ready_before_it_serves(world: World) -> None:
    world.ready(links.TOKENIZER, links.SCHEDULER)
    assert world.supervisor.state is ServerState.STARTING
    world.ready(links.DETOKENIZER)
    assert world.log.states == [ServerState.SERVING]
    assert world.supervisor.processes[links.SCHEDULER].info == {"fact": 1}


def test_children_learn_everything_from_a_private_file(world: World) -> None:
    for popen in FakePopen.started:
        assert "secret" not in " ".join(popen.command)
        assert popen.command[1:3] == ["-P", "-m"]
        assert popen.options["env"]["OMP_WAIT_POLICY"] == "PASSIVE"
    path = world.directory.path / "scheduler.0.json"
    assert path.stat().st_mode & 0o777 == 0o600
    spec = read_spec(path)
    assert not path.exists()
    assert spec.args.api_key == "secret"
    assert spec.inboxes.keys() == {links.SERVER, *links.CHILDREN}


def test_a_death_before_serving_is_final(world: World) -> None:
    world.ready(links.TOKENIZER)
    world.die(links.SCHEDULER, 1)
    assert world.supervisor.state is ServerState.FAILED
    assert "exit status 1" in world.supervisor.failure
    assert len(FakePopen.started) == 3


def test_a_death_while_serving_restarts_that_process_alone(world: World) -> None:
    world.ready()
    world.die(links.SCHEDULER)
    assert world.supervisor.state is ServerState.DEGRADED
    assert world.log.died == [(links.SCHEDULER, "the scheduler process ended (signal SIGSEGV)")]
    assert [name for name, _ in world.log.started[3:]] == [links.SCHEDULER]
    assert world.log.started[3][1].endswith("/scheduler.1")
    world.supervisor.ready(Ready(links.SCHEDULER, b"{}", 0))  # late, from the dead one
    assert world.supervisor.state is ServerState.DEGRADED
    world.ready(links.SCHEDULER)
    assert world.log.states[-1] is ServerState.SERVING


def test_an_unusable_successor_is_final(world: World) -> None:
    world.ready()
    world.die(links.SCHEDULER)
    world.die(links.SCHEDULER, EXIT_UNUSABLE)
    assert world.supervisor.state is ServerState.FAILED


def test_restarts_are_bounded_in_time(world: World) -> None:
    world.ready()
    for _ in range(MAX_RESTARTS):
        world.die(links.TOKENIZER)
        world.ready(links.TOKENIZER)
    world.clock.now += RESTART_WINDOW_S + 1
    world.beat()
    for name in (links.SCHEDULER, links.DETOKENIZER, links.TOKENIZER, *links.CHILDREN[:2]):
        assert world.supervisor.state is ServerState.SERVING
        world.die(name)
        world.ready(name)
    world.die(links.SCHEDULER)
    assert world.supervisor.state is ServerState.FAILED
    assert "restarts in 10 minutes did not help" in world.supervisor.failure


def test_two_deaths_in_one_look_are_both_dealt_with(world: World) -> None:
    world.ready()
    for name in (links.TOKENIZER, links.DETOKENIZER):
        world.popen(name).code = 9
    world.supervisor.poll()
    assert [name for name, _ in world.log.died] == [links.TOKENIZER, links.DETOKENIZER]
    world.ready(links.TOKENIZER)
    assert world.log.states[-1] is ServerState.DEGRADED
    world.ready(links.DETOKENIZER)
    assert world.log.states[-1] is ServerState.SERVING


def test_silence_is_death_but_not_while_starting(world: World) -> None:
    world.clock.now += 6.0
    world.supervisor.poll()
    assert all(popen.signals == [] for popen in FakePopen.started)
    world.ready()
    for now in (4.0, 8.0):
        world.clock.now += 4.0
        for name in (links.TOKENIZER, links.DETOKENIZER):
            world.supervisor.heartbeat(Heartbeat(name, now, b'{"x": 2}', 0))
        world.supervisor.poll()
    assert world.supervisor.processes[links.TOKENIZER].load == {"x": 2}
    scheduler = FakePopen.started[1]
    assert scheduler.signals == ["kill"]
    world.supervisor.poll()
    assert [name for name, _ in world.log.died] == [links.SCHEDULER]


def test_starting_for_ever_is_death_too(world: World) -> None:
    world.clock.now += START_SILENCE_S + 1
    world.supervisor.poll()
    assert FakePopen.started[0].signals == ["kill"]


def test_heartbeats_of_the_dead_do_not_count(world: World) -> None:
    world.ready()
    world.die(links.SCHEDULER)
    world.supervisor.heartbeat(Heartbeat(links.SCHEDULER, 0.0, b'{"old": 1}', 0))
    assert world.supervisor.processes[links.SCHEDULER].load == {}
    world.supervisor.heartbeat(Heartbeat("stranger", 0.0))


def test_stop_ends_all(world: World) -> None:
    world.ready()
    asyncio.run(world.supervisor.stop())
    assert all(popen.signals == ["term"] for popen in FakePopen.started)
    assert world.supervisor.state is ServerState.STOPPED
    assert world.log.died == []


def no_more_processes(*_args: Any, **_kwargs: Any) -> None:
    raise BlockingIOError(11, "Resource temporarily unavailable")


def test_a_process_that_cannot_be_started_again_ends_the_server(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.ready()
    monkeypatch.setattr(subprocess, "Popen", no_more_processes)
    world.die(links.SCHEDULER)
    assert world.log.states[-1] is ServerState.FAILED
    assert "scheduler process cannot be started" in world.supervisor.failure
    assert "temporarily unavailable" in world.supervisor.failure
    asyncio.run(world.supervisor.stop())


def test_a_server_whose_directory_is_gone_says_so(world: World) -> None:
    world.directory.remove()
    supervisor = Supervisor(ServerArgs(model_path="m"), world.directory, world.clock, world.log)
    supervisor.start()
    assert supervisor.state is ServerState.FAILED
    assert "tokenizer process cannot be started" in supervisor.failure
    asyncio.run(supervisor.watch())
    asyncio.run(supervisor.stop())
