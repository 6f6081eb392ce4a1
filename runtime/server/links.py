"""Frames between the processes of one server: PUSH/PULL over ipc:// in a private directory.

Each process binds one inbox and pushes to the inboxes of the others. An inbox's path holds its
process's name and incarnation, so a frame meant for a dead process can never reach the one that
replaced it: the sender drops the old connection with everything unsent (`Outbox.reconnect`).

    <directory, mode 0700>/server.0  tokenizer.0  scheduler.0  detokenizer.0  detokenizer.1 ...

Frames hold several messages (messages.encode_batch), as many as an inbox takes. High water marks
are off: what is in flight is bounded by admission at the server, and a blocked sender would stall
every request.

This module does not know what messages mean, nor who should be running.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import zmq

from statewise.runtime.errors import OperatingError
from statewise.runtime.messages import MAX_MESSAGE_BYTES, AnyMessage, decode_batch, encode_batch

SERVER = "server"
TOKENIZER = "tokenizer"
SCHEDULER = "scheduler"
DETOKENIZER = "detokenizer"
CHILDREN = (TOKENIZER, SCHEDULER, DETOKENIZER)
# Who sends to whom.
PEERS: dict[str, tuple[str, ...]] = {
    SERVER: (TOKENIZER, SCHEDULER, DETOKENIZER),
    TOKENIZER: (SERVER, SCHEDULER),
    SCHEDULER: (SERVER, DETOKENIZER),
    DETOKENIZER: (SERVER, SCHEDULER),
}
_RECONNECT_MS = 10
_PREFIX = "statewise-"
_LOCK = "lock"
_MAX_PATH_BYTES = 100  # a unix socket's path is at most 107 bytes


class SocketDirectory:
    """A fresh directory that only this user may enter; removed with everything in it.

    Its owner holds a lock on a file in it as long as it lives, so what a killed server left
    behind is found by the next one and removed.
    """

    def __init__(self) -> None:
        """Make the directory. Raises OperatingError that says what to do where that fails."""
        try:
            base = _base_directory()
            _remove_abandoned(base)
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
            self._lock = _locked(self.path)
        except OSError as error:
            raise OperatingError(
                f"no directory for sockets: {error}; free space, or set TMPDIR elsewhere"
            ) from error

    def address(self, process: str, incarnation: int) -> str:
        """Where the inbox of one incarnation of a process is."""
        return f"ipc://{self.path}/{process}.{incarnation}"

    def remove(self) -> None:
        """Delete the directory; a second call does nothing."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _locked(directory: Path) -> int:
    """Lock a new directory's lock file; nobody sees it before the lock is held.

    Where that fails the directory is removed: without a lock nobody would take it for abandoned.
    """
    new = directory / "new"
    try:
        lock = os.open(new, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        new.rename(directory / _LOCK)
    except OSError:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return lock


def _remove_abandoned(base: str) -> None:
    """Delete this user's directories whose owner is gone."""
    for directory in Path(base).glob(f"{_PREFIX}*/"):
        try:
            if directory.stat().st_uid != os.getuid():
                continue
            lock = os.open(directory / _LOCK, os.O_RDWR)
        except OSError:  # not one of ours, or being removed right now
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
        except OSError:  # its owner lives
            continue
        finally:
            os.close(lock)


def _base_directory() -> str:
    """Temporary directory whose paths are short enough for a socket."""
    base = tempfile.gettempdir()
    return base if len(os.fsencode(base)) + 40 <= _MAX_PATH_BYTES else "/tmp"


class Inbox:
    """The socket on which a process receives. `fd` becomes readable when its state changes.

    Making one raises OperatingError where the socket's file cannot be made.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.address = address
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close()
            raise OperatingError(f"cannot listen at {address}: {error}") from error

    @property
    def fd(self) -> int:
        """File descriptor to watch; edge-triggered: after an event, drain until nothing comes."""
        return int(self._socket.getsockopt(zmq.FD))

    def receive(self, timeout_ms: int = 0, max_frames: int = 1024) -> list[AnyMessage]:
        """Return what has arrived, in order; waits up to `timeout_ms` for the first frame.

        A malformed frame is a programmer error here, since only our own processes can write it.
        """
        if timeout_ms and not self._socket.poll(timeout_ms):
            return []
        messages: list[AnyMessage] = []
        for _ in range(max_frames):
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            messages.extend(decode_batch(frame))
        return messages

    def close(self) -> None:
        """Close the socket; its file goes with the directory."""
        self._socket.close()


class Outbox:
    """The socket on which a process sends to one other."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._context = context
        self._socket = self._open(address)

    def _open(self, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.connect(address)
        return socket

    def send(self, messages: Sequence[AnyMessage]) -> None:
        """Send `messages` in order, as one frame if they fit; never blocks.

        A frame beyond what an inbox takes would cost the connection and all that is in it, so
        large batches are cut. Where a single message is too large, that is a programmer error:
        what a request may ask for is bounded where it enters.
        """
        if not messages:
            return
        frame = encode_batch(messages)
        if len(frame) <= MAX_MESSAGE_BYTES:
            self._socket.send(frame, zmq.NOBLOCK)
            return
        assert len(messages) > 1, f"one {type(messages[0]).__name__} of {len(frame)} bytes"
        middle = len(messages) // 2
        self.send(messages[:middle])
        self.send(messages[middle:])

    def reconnect(self, address: str) -> None:
        """Send to another address from now on; what is unsent is dropped."""
        self._socket.close()
        self._socket = self._open(address)

    def close(self) -> None:
        """Close the socket, dropping what is unsent."""
        self._socket.close()
