"""`statewise cache dump`: against a small HTTP server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from statewise.frontend.cli import main


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        allowed = self.headers.get("Authorization") == "Bearer secret"
        body = f"picture of {self.path}\n".encode()
        self.send_response(200 if allowed else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Keep quiet."""


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_text_to_standard_output(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "dump", url + "/", "--api-key", "secret"]) == 0
    assert capsys.readouterr().out == "picture of /cache?format=ascii\n"


def test_a_picture_to_a_file(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATEWISE_API_KEY", "secret")
    target = tmp_path / "cache.svg"
    assert main(["cache", "dump", url, "--format", "svg", "-o", str(target)]) == 0
    assert target.read_text() == "picture of /cache?format=svg\n"


def test_refusals_and_absence_are_said(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "dump", url]) == 2
    assert "401" in capsys.readouterr().err
    assert main(["cache", "dump", "http://127.0.0.1:1"]) == 2
    assert "refused" in capsys.readouterr().err
    assert main(["cache", "dump", "file:///etc/hostname"]) == 2
    assert "http://" in capsys.readouterr().err
