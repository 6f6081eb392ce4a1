"""An S3 server of this process (moto's), behind a door that can misbehave.

    ok          requests go through
    slow        after `delay_s` seconds
    hold        not before it behaves otherwise
    deny        403
    gone        the connection is closed without an answer
    garbage     other bytes of the same length; truncated: half of them; empty: no bytes

The door counts what comes through, by method.
"""

from __future__ import annotations

import http.client
import logging
import random
import threading
import time
import urllib.request
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CREDENTIALS = {"access_key_id": "test", "secret_access_key": "test"}
BUCKET = "bucket"


class ObjectServer:
    """Server and door; `url(prefix)` is a remote cache's."""

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        self.behind: tuple[str, int] = self._server.get_host_and_port()
        self.mode = "ok"
        self.delay_s = 0.0
        self.may_go_on = threading.Event()
        self.rng = random.Random(0)
        self.requests: Counter[str] = Counter()
        door = self

        class Handler(_Door):
            server_of = door

        self._door = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._door.daemon_threads = True
        self._thread = threading.Thread(target=self._door.serve_forever, daemon=True)
        self._thread.start()
        bucket = f"http://{self.behind[0]}:{self.behind[1]}/{BUCKET}"
        urllib.request.urlopen(urllib.request.Request(bucket, method="PUT")).close()

    def url(self, prefix: str) -> str:
        endpoint = f"http://127.0.0.1:{self._door.server_address[1]}"
        return f"s3://{BUCKET}/{prefix}?endpoint={endpoint}&region=us-east-1"

    def behave(self, mode: str = "ok", delay_s: float = 0.0) -> None:
        self.mode, self.delay_s = mode, delay_s
        if mode == "hold":
            self.may_go_on.clear()
        else:
            self.may_go_on.set()

    def count(self) -> Counter[str]:
        """Requests by method since the last call."""
        counted, self.requests = self.requests, Counter()
        return counted

    def close(self) -> None:
        self._door.shutdown()
        self._door.server_close()
        self._thread.join()
        self._server.stop()


class _Door(BaseHTTPRequestHandler):
    server_of: ObjectServer
    protocol_version = "HTTP/1.1"

    def _handle(self) -> None:
        owner = self.server_of
        owner.requests[self.command] += 1
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if owner.mode == "gone":
            self.close_connection = True
            return
        if owner.mode == "hold":
            owner.may_go_on.wait()
        if owner.mode == "slow":
            time.sleep(owner.delay_s)
        if owner.mode == "deny":
            self._answer(403, {}, b"<Error><Code>AccessDenied</Code></Error>")
            return
        status, headers, data = self._forward(body)
        if owner.mode == "empty" and self.command in ("GET", "HEAD") and status < 300:
            status, data = (200, b"") if self.command == "HEAD" else (416, b"<Error/>")
            headers = {name: v for name, v in headers.items() if name.lower() != "content-length"}
        if self.command == "GET" and status == 206:
            data = self._spoil(data)
        self._answer(status, headers, data)

    def _forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(*self.server_of.behind, timeout=20)
        try:
            connection.request(self.command, self.path, body, dict(self.headers))
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def _spoil(self, data: bytes) -> bytes:
        mode = self.server_of.mode
        if mode == "garbage":
            return self.server_of.rng.randbytes(len(data))
        return data[: len(data) // 2] if mode == "truncated" else data

    def _answer(self, status: int, headers: dict[str, str], data: bytes) -> None:
        self.send_response(status)
        size = len(data)
        for name, value in headers.items():
            if name.lower() == "content-length" and self.command == "HEAD":
                size = int(value)
            elif name.lower() == "content-range":
                self.send_header(name, f"bytes 0-{size - 1}/{size}")  # the object as it seems
            elif name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(size))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_args: Any) -> None:
        """Say nothing."""


for method in ("GET", "PUT", "HEAD", "POST", "DELETE"):
    setattr(_Door, f"do_{method}", _Door._handle)
