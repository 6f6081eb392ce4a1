"""What every child process of a server does the same way: start, talk, show life, die in time.

A child reads its `ChildSpec` from a file that only this user can read (an API key must not show in
`ps`), dies with its parent, leaves Ctrl-C to the parent, and ends on SIGTERM. A child that cannot
start for a reason a restart would not change leaves with `EXIT_UNUSABLE`.

This module does not know what the child computes.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import msgspec
import zmq

from statewise.runtime.clock import Clock, SystemClock
from statewise.runtime.config import ServerArgs
from statewise.runtime.errors import OperatingError
from statewise.runtime.messages import AnyMessage, Connect, Heartbeat, Ready
from statewise.runtime.server import links, logs

EXIT_UNUSABLE = 78  # the settings or the model cannot work; a restart would not help
EXIT_BROKEN = 70  # a broken invariant; a restart begins with an empty cache
HEARTBEAT_S = 0.5
IDLE_POLL_MS = 250
_PR_SET_PDEATHSIG = 1

log = logging.getLogger(__name__)


class ChildSpec(msgspec.Struct, frozen=True):
    """What a child needs to know; `inboxes` maps each process to its inbox's address."""

    process: str
    incarnation: int
    parent_pid: int
    inboxes: dict[str, str]
    args: ServerArgs


class Child:
    """The side of a child process that faces the others. Not thread-safe."""

    def __init__(self, spec: ChildSpec, clock: Clock) -> None:
        self.spec = spec
        self.args = spec.args
        self._clock = clock
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox = links.Inbox(self._context, spec.inboxes[spec.process])
        self._outboxes = {
            peer: links.Outbox(self._context, spec.inboxes[peer])
            for peer in links.PEERS[spec.process]
        }
        self._next_beat = 0.0

    def send(self, peer: str, messages: Sequence[AnyMessage]) -> None:
        """Send `messages` to `peer` as one frame; never blocks."""
        self._outboxes[peer].send(messages)

    def receive(self, timeout_ms: int) -> list[AnyMessage]:
        """Return what has arrived; reconnections are carried out here and not returned."""
        messages = self._inbox.receive(timeout_ms)
        if not any(isinstance(m, Connect) for m in messages):
            return messages
        rest: list[AnyMessage] = []
        for message in messages:
            if isinstance(message, Connect):
                self._outboxes[message.peer].reconnect(message.address)
            else:
                rest.append(message)
        return rest

    def announce(self, info: dict[str, Any]) -> None:
        """Tell the server that this process is ready to work."""
        ready = Ready(self.spec.process, msgspec.json.encode(info), self.spec.incarnation)
        self.send(links.SERVER, [ready])

    def beat(self, load: Callable[[], dict[str, Any]] = dict, *, force: bool = False) -> None:
        """Show life, at most every `HEARTBEAT_S` unless forced; leave if the parent is gone."""
        now = self._clock.monotonic()
        if now < self._next_beat and not force:
            return
        self._next_beat = now + HEARTBEAT_S
        if os.getppid() != self.spec.parent_pid:
            raise SystemExit(0)
        body = msgspec.json.encode(load())
        beat = Heartbeat(self.spec.process, now, body, self.spec.incarnation)
        self.send(links.SERVER, [beat])


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent's thread ends (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class Leaving:
    """What SIGTERM does: SystemExit at once, or at the end of the block that holds it off.

    A handler rather than a signal mask, since a signal may reach any thread of the process.
    """

    def __init__(self) -> None:
        self._is_held = False
        self._is_due = False

    def __call__(self, _signum: int, _frame: FrameType | None) -> None:
        """Handle the signal."""
        self._is_due = True
        if not self._is_held:
            raise SystemExit(0)

    @contextmanager
    def held_off(self) -> Iterator[None]:
        """Let a short block end first. Not nested."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if self._is_due:
            raise SystemExit(0)


LEAVING = Leaving()  # a process has one


def read_spec(path: Path) -> ChildSpec:
    """Read and delete the file that the parent wrote for this child."""
    spec = msgspec.json.decode(path.read_bytes(), type=ChildSpec)
    path.unlink()
    return spec


def run_child(argv: Sequence[str], start: Callable[[Child], Callable[[], None]]) -> int:
    """Be a child process: `argv` is [path of the spec]; returns the exit status.

    `start` builds what the process needs and returns its endless loop. An operating error while
    starting ends in one line of log and `EXIT_UNUSABLE`; any other exception is a broken
    invariant and ends in a traceback and `EXIT_BROKEN`.
    """
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, LEAVING)
    spec = read_spec(Path(argv[0]))
    logs.set_up(spec.process, spec.args.log_level)
    if os.getppid() != spec.parent_pid:
        return 0
    try:
        loop = start(Child(spec, SystemClock()))
    except OperatingError as error:
        log.error("%s", error)
        return EXIT_UNUSABLE
    except Exception:
        log.exception("%s could not start", spec.process)
        return EXIT_BROKEN
    try:
        loop()
    except Exception:
        log.exception("%s ends on an unexpected error", spec.process)
        return EXIT_BROKEN
    return 0


def child_main(start: Callable[[Child], Callable[[], None]]) -> NoReturn:
    """Be the child process that the command line names, to its end.

    The process leaves without the interpreter's finalizers: they hold nothing of value here, and
    those of torch take seconds.
    """
    try:
        status = run_child(sys.argv[1:], start)
    except SystemExit as ending:
        status = ending.code if isinstance(ending.code, int) else 0
    logging.shutdown()
    os._exit(status)
