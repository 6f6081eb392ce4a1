"""The first moments of a server: its port and its sockets are its own, or it says why not."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from statewise.runtime.config import ServerArgs
from statewise.runtime.errors import OperatingError
from statewise.runtime.server import launch, links


def test_a_port_is_taken_from_the_moment_it_is_bound() -> None:
    with launch.bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(OperatingError, match=f"port {port}.*choose another --port"):
            launch.bind("127.0.0.1", port)


def test_a_server_that_cannot_open_its_inbox_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_args: object) -> None:
        raise OperatingError("cannot listen")

    monkeypatch.setattr(links, "_base_directory", lambda: str(tmp_path))
    monkeypatch.setattr(launch, "Broker", full)
    listeners = []

    def bind(host: str, port: int) -> object:
        listeners.append(real_bind(host, port))
        return listeners[-1]

    real_bind = launch.bind
    monkeypatch.setattr(launch, "bind", bind)
    with pytest.raises(OperatingError, match="cannot listen"):
        launch.Server(ServerArgs(model_path="m", port=0), {})
    listeners[0].close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("module", "status"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
        ("def main(prog): raise KeyboardInterrupt", 130),
    ],
)
def test_ctrl_c_while_a_server_starts_leaves_no_traceback(module: str, status: int) -> None:
    """While modules are imported, and before the loop listens for signals."""
    program = f"""
import importlib.abc, importlib.machinery, sys

NAME = "statewise.runtime.server.launch"

class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == NAME else None

    def exec_module(self, module):
        exec({module!r}, module.__dict__)

sys.meta_path.insert(0, Finder())
from statewise.launch_server import run
sys.exit(run())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == status
    assert done.stderr == b""
