"""A server started for this program, as a process of its own.

`Runtime(model_path=...)` runs `python -P -m statewise.launch_server`, waits until it is healthy and
is used like an endpoint. It ends with `shutdown()`, with its `with` block, or with this process,
whatever ends that.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from typing import Any

from statewise.frontend.backends.endpoint import RuntimeEndpoint
from statewise.frontend.errors import BackendError

POLL_S = 0.2
STOP_TIMEOUT_S = 10.0


class Runtime:
    """A server process and its endpoint.

    Keyword arguments are the server's settings by name (`model_path="..."`, `page_size=16`); they
    travel in a private file, so that keys don't show in the list of processes.
    Raises `BackendError` when the server ends, or is not healthy within `launch_timeout` seconds.
    """

    def __init__(
        self, *, log_level: str = "warning", launch_timeout: float = 300.0, **settings: Any
    ) -> None:
        settings.setdefault("host", "127.0.0.1")
        settings.setdefault("port", _free_port(settings["host"]))
        settings.setdefault("parent_pid", os.getpid())
        self.url = f"http://{settings['host']}:{settings['port']}"
        self.endpoint = RuntimeEndpoint(self.url, settings.get("api_key"))
        self._config = _written({"log_level": log_level, **settings})
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "statewise.launch_server", "--config", self._config],
            stdin=subprocess.DEVNULL,
            env=_environment_without(settings),
        )
        self._stop = weakref.finalize(self, _stop, self._process)
        atexit.register(self._stop)
        try:
            self._wait_until_healthy(launch_timeout)
        except BaseException:
            self.shutdown()
            raise
        finally:
            os.unlink(self._config)

    @property
    def pid(self) -> int | None:
        """The server's process id; None after `shutdown`."""
        return self._process.pid if self._process.poll() is None else None

    def generate(self, prompt: str | list[str], sampling_params: Any = None, **fields: Any) -> Any:
        """Run one native request; `fields` are the native API's."""
        return self.endpoint.request(
            {"text": prompt, "sampling_params": sampling_params or {}, **fields}
        )

    def cache_prefix(self, prefix: str) -> None:
        """Compute and cache a prefix."""
        self.endpoint.request({"text": prefix, "sampling_params": {"max_new_tokens": 0}})

    def flush_cache(self) -> None:
        """Drop everything cached."""
        self.endpoint.flush_cache()

    def get_server_info(self) -> dict[str, Any]:
        """Return the server's settings and state."""
        return self.endpoint.get_server_info()

    def shutdown(self) -> None:
        """End the server and wait for it; again does nothing."""
        self.endpoint.close()
        self._stop()
        atexit.unregister(self._stop)

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _wait_until_healthy(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        probe = RuntimeEndpoint(self.url, timeout_s=5.0)
        while time.monotonic() < deadline:
            code = self._process.poll()
            if code is not None:
                raise BackendError(f"the server ended with code {code} before it was ready")
            with contextlib.suppress(BackendError):
                probe.probe_health()
                return
            time.sleep(POLL_S)
        raise BackendError(f"the server was not ready within {timeout_s:g} s")


def _written(settings: dict[str, Any]) -> str:
    """Write settings to a file only this user can read; JSON is YAML, which the server reads."""
    handle, path = tempfile.mkstemp(prefix="statewise-", suffix=".yaml")
    with os.fdopen(handle, "w") as file:
        json.dump({name: value for name, value in settings.items() if value is not None}, file)
    return path


def _environment_without(settings: dict[str, Any]) -> dict[str, str]:
    """Return this environment less what would go over the settings given here."""
    taken = {f"STATEWISE_{name.upper()}" for name in settings}
    return {name: value for name, value in os.environ.items() if name not in taken}


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
