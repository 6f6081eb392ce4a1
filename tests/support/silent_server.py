"""A server that takes connections and never says a word, until it hangs up."""

from __future__ import annotations

import contextlib
import socket
import threading


class SilentServer:
    """Listens on a port of loopback; `num_waiting` clients are waiting for an answer."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self._taken: list[socket.socket] = []
        self._thread = threading.Thread(target=self._take, daemon=True)
        self._thread.start()

    def url(self, prefix: str) -> str:
        port = self._listener.getsockname()[1]
        return f"s3://bucket/{prefix}?endpoint=http://127.0.0.1:{port}&region=us-east-1"

    @property
    def num_waiting(self) -> int:
        return len(self._taken)

    def _take(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._taken.append(self._listener.accept()[0])

    def hang_up(self) -> None:
        """Refuse connections from now on and close those that wait. Idempotent."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for taken in self._taken:
            taken.close()
