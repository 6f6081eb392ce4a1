"""Frames between processes, and the directory their sockets are in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from statewise.runtime.errors import OperatingError
from statewise.runtime.messages import AbortRequest, ControlRequest
from statewise.runtime.server import links


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def directory() -> Iterator[links.SocketDirectory]:
    directory = links.SocketDirectory()
    yield directory
    directory.remove()


def test_a_batch_that_no_inbox_would_take_is_cut(
    context: zmq.Context[zmq.Socket[bytes]],
    directory: links.SocketDirectory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "MAX_MESSAGE_BYTES", 4096)
    address = directory.address("tokenizer", 0)
    inbox, outbox = links.Inbox(context, address), links.Outbox(context, address)
    messages = [AbortRequest(str(i), "x" * (i * 37 % 3000)) for i in range(40)]
    outbox.send(messages)
    seen: list[object] = []
    while len(seen) < len(messages) and (more := inbox.receive(2000)):
        seen += more
    assert seen == messages
    with pytest.raises(AssertionError, match="one AbortRequest of 4"):
        outbox.send([AbortRequest("big", "x" * 4096)])
    outbox.close()
    inbox.close()


def test_frames_keep_their_order_and_messages(
    context: zmq.Context[zmq.Socket[bytes]], directory: links.SocketDirectory
) -> None:
    address = directory.address("tokenizer", 0)
    outbox = links.Outbox(context, address)
    outbox.send([])
    outbox.send([AbortRequest("a"), AbortRequest("b")])  # before anybody listens
    inbox = links.Inbox(context, address)
    outbox.send([ControlRequest("c", "ping")])
    seen = inbox.receive(2000)
    while len(seen) < 3:
        seen += inbox.receive(2000)
    assert seen == [AbortRequest("a"), AbortRequest("b"), ControlRequest("c", "ping")]
    assert inbox.receive(0) == []
    outbox.close()
    inbox.close()


def test_reconnecting_drops_what_was_unsent(
    context: zmq.Context[zmq.Socket[bytes]], directory: links.SocketDirectory
) -> None:
    outbox = links.Outbox(context, directory.address("tokenizer", 0))
    outbox.send([AbortRequest("for the dead")])
    outbox.reconnect(directory.address("tokenizer", 1))
    outbox.send([AbortRequest("for the living")])
    inbox = links.Inbox(context, directory.address("tokenizer", 1))
    assert inbox.receive(2000) == [AbortRequest("for the living")]
    outbox.close()
    inbox.close()


def test_a_directory_is_private_and_goes_with_its_owner(directory: links.SocketDirectory) -> None:
    assert directory.path.stat().st_mode & 0o777 == 0o700
    directory.remove()
    assert not directory.path.exists()
    directory.remove()


def test_only_abandoned_directories_are_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "_base_directory", lambda: str(tmp_path))
    foreign = tmp_path / "statewise-of-something-else"
    foreign.mkdir()
    abandoned = tmp_path / "statewise-abandoned"
    abandoned.mkdir()
    (abandoned / "lock").touch()
    (abandoned / "scheduler.0").touch()
    living = links.SocketDirectory()
    assert not abandoned.exists()
    other = links.SocketDirectory()
    assert living.path.exists()
    assert foreign.exists()
    other.remove()
    living.remove()


def test_a_deep_temporary_directory_still_has_room_for_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links.tempfile, "tempdir", str(tmp_path / ("d" * 90)))
    assert links._base_directory() == "/tmp"


def test_a_directory_that_cannot_be_made_names_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(28, "No space left on device", str(tmp_path))

    monkeypatch.setattr(links.tempfile, "mkdtemp", full)
    with pytest.raises(OperatingError, match=r"No space left on device.*TMPDIR"):
        links.SocketDirectory()


def test_an_inbox_that_cannot_be_bound_names_its_address(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    with pytest.raises(OperatingError, match="absent/socket"):
        links.Inbox(context, f"ipc://{tmp_path}/absent/socket")


def test_a_directory_that_cannot_be_locked_is_not_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(links, "_base_directory", lambda: str(tmp_path))
    monkeypatch.setattr(links.fcntl, "flock", full)
    with pytest.raises(OperatingError, match="No space left on device"):
        links.SocketDirectory()
    assert list(tmp_path.iterdir()) == []
