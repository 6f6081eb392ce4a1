"""A server of the native API with a toy model, for tests of the frontend.

What it is: a real HTTP server on loopback that tokenizes (greedy longest match, so that texts merge
across a boundary), scores (a hash), follows a script where one is given, streams, and caches
prefixes per salt. Everything it does is a function of the request and of what it served before.

What can be injected: answers with an error status, streams that break, and a barrier that lets
generations pass only when n of them are inside at once (which proves that a client runs them
concurrently).
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MERGES = ("Paris", " Paris", "London", " the", "New York", " is", "ab", "abc", "http", "://")
SPECIALS = ("<s>", "<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>")
CHAR_BASE = 1000
BOS = len(MERGES)  # "<s>"
_PIECES = (*MERGES, *SPECIALS)
_BY_LENGTH = sorted(range(len(_PIECES)), key=lambda i: -len(_PIECES[i]))
BARRIER_TIMEOUT_S = 20.0

CHATML = (
    "{% for m in messages %}"
    "{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def encode(text: str, *, with_bos: bool = True) -> list[int]:
    """Greedy longest match over the pieces, single characters otherwise."""
    ids = [BOS] if with_bos else []
    position = 0
    while position < len(text):
        for index in _BY_LENGTH:
            if text.startswith(_PIECES[index], position):
                ids.append(index)
                position += len(_PIECES[index])
                break
        else:
            ids.append(CHAR_BASE + ord(text[position]))
            position += 1
    return ids


def piece(token_id: int) -> str:
    """Text of one token."""
    return _PIECES[token_id] if token_id < CHAR_BASE else chr(token_id - CHAR_BASE)


def decode(ids: list[int]) -> str:
    """Text of tokens."""
    return "".join(piece(i) for i in ids)


def _hash(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=6).digest())


class FakeService:
    """The server. Use as a context manager; `url` is its address."""

    def __init__(self, *, chat_template: str | None = CHATML, api_key: str = "") -> None:
        self.chat_template = chat_template
        self.api_key = api_key
        self.script: dict[str, str] = {}  # end of a prompt -> what the model writes after it
        self.requests: list[tuple[str, Any]] = []
        self.failures: list[
            tuple[str, int, dict[str, str], Any]
        ] = []  # path, status, headers, body
        self.break_stream_after: int | None = None  # events
        self.error_in_stream_after: int | None = None
        self.abort_message = ""
        self.close_after_answer = False  # close kept-alive connections without saying so
        self.barrier: threading.Barrier | None = None
        self._cached: dict[str, list[list[int]]] = {}
        self._lock = threading.Lock()
        self._http = _Server(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.01}
        )

    @property
    def url(self) -> str:
        """The server's base URL."""
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> FakeService:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def bodies(self, path: str = "/generate") -> list[Any]:
        """Bodies of the requests to `path`, in the order in which they came."""
        with self._lock:
            return [body for at, body in self.requests if at == path]

    def prompts(self) -> list[str]:
        """Texts that were generated from (not prefills), in order of arrival."""
        bodies = self.bodies()
        return [b["text"] for b in bodies if b["sampling_params"].get("max_new_tokens") != 0]

    def published(self) -> list[str]:
        """Texts that were computed without generating, with a checkpoint."""
        return [
            b["text"]
            for b in self.bodies()
            if b["sampling_params"].get("max_new_tokens") == 0 and b.get("checkpoint")
        ]

    def note(self, path: str, body: Any) -> tuple[int, dict[str, str], Any] | None:
        """Record a request; the failure injected for it, if any."""
        with self._lock:
            self.requests.append((path, body))
            for index, (at, *failure) in enumerate(self.failures):
                if at == path:
                    del self.failures[index]
                    return failure[0], failure[1], failure[2]
        return None

    # ------------------------------------------------------------- the model

    def answer(self, body: dict[str, Any]) -> Any:
        """Answer a /generate body that does not stream."""
        prompts, is_batch = _prompts(body)
        n = int(body.get("sampling_params", {}).get("n") or 1)
        answers = [self._one(body, ids, k) for ids in prompts for k in range(n)]
        return answers if is_batch or n > 1 else answers[0]

    def stream(self, body: dict[str, Any]) -> Iterator[Any]:
        """Cumulative answers, one for each token."""
        whole = self._one(body, _prompts(body)[0][0], 0)
        ids = whole["output_ids"]
        for length in range(1, len(ids)):
            yield {
                "text": decode(ids[:length]),
                "output_ids": ids[:length],
                "meta_info": {**whole["meta_info"], "finish_reason": None},
            }
        yield whole

    def _one(self, body: dict[str, Any], ids: list[int], sample: int) -> dict[str, Any]:
        params = body.get("sampling_params", {})
        cached = self._reuse(body.get("cache_salt") or "", ids)
        most = params.get("max_new_tokens", 128)
        if self.barrier is not None and most:
            self.barrier.wait(BARRIER_TIMEOUT_S)
        text = decode(ids).removeprefix("<s>")
        written, finish = self._write(text, params, sample) if most else ("", None)
        out_ids = encode(written, with_bos=False)
        if len(out_ids) > most or not most:
            out_ids, finish = out_ids[:most], {"type": "length", "length": most}
            written = decode(out_ids)
        if self.abort_message:
            finish = {"type": "abort", "message": self.abort_message}
        meta: dict[str, Any] = {
            "id": f"r{_hash(text) % 10**6}",
            "finish_reason": finish,
            "prompt_tokens": len(ids),
            "completion_tokens": len(out_ids),
            "cached_tokens": cached,
            "cache_report": {"matched": cached, "reused": cached, "repaired": 1, "recomputed": 2},
        }
        if body.get("return_logprob"):
            start = max(body.get("logprob_start_len", -1), 0)
            meta["input_token_logprobs"] = [
                [self.logprob(ids, i), ids[i], piece(ids[i])] for i in range(start, len(ids))
            ]
            meta["output_token_logprobs"] = []
        return {"text": written, "output_ids": out_ids, "meta_info": meta}

    def _reuse(self, salt: str, ids: list[int]) -> int:
        with self._lock:
            rows = self._cached.setdefault(salt, [])
            best = max((_common(row, ids[:-1]) for row in rows), default=0)
            rows.append(ids)
        return best

    def flush(self) -> None:
        """Forget all prefixes."""
        with self._lock:
            self._cached.clear()

    def logprob(self, ids: list[int], position: int) -> float | None:
        """Log probability of a token given those before it; high where the script says so."""
        if position == 0:
            return None
        before, after = decode(ids[:position]), decode(ids[position:])
        for end, continuation in self.script.items():
            at = before.rfind(end)
            if at >= 0:
                written = before[at + len(end) :]
                rest = continuation.removeprefix(written)
                if continuation.startswith(written) and rest and after.startswith(rest[0]):
                    return -0.1
            merged = piece(ids[position])
            if (before + merged).startswith("<s>") and (end[-1:] + continuation).startswith(merged):
                return -0.1
        return -4.0 - (_hash(ids[:position], ids[position]) % 1000) / 1000

    def _write(self, text: str, params: dict[str, Any], sample: int) -> tuple[str, Any]:
        written = f" out{_hash(text, sample) % 1000}"
        for end, continuation in self.script.items():
            if text.endswith(end):
                written = continuation
        pattern = params.get("regex")
        if pattern is not None and not re.fullmatch(pattern, written):
            written = _first_match(pattern)
        finish: Any = {"type": "stop", "matched": None}
        for stop in _strings(params.get("stop")):
            head, found, _ = written.partition(stop)
            if found:
                written, finish = head, {"type": "stop", "matched": stop}
        return written, finish


def _first_match(pattern: str) -> str:
    """A text that a pattern made of literals and one group of alternatives matches."""
    literal = re.sub(r"\\(.)", r"\1", pattern)
    head, _, tail = literal.partition("(")
    return head + tail.rstrip(")").split("|")[0]


def _strings(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])


def _common(a: list[int], b: list[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def _prompts(body: dict[str, Any]) -> tuple[list[list[int]], bool]:
    if "text" in body:
        text = body["text"]
        return [encode(t) for t in ([text] if isinstance(text, str) else text)], isinstance(
            text, list
        )
    ids = body["input_ids"]
    return (ids, True) if ids and isinstance(ids[0], list) else ([ids], False)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client that hangs up, or a broken barrier, is part of a test."""


class _Handler(BaseHTTPRequestHandler):
    service: FakeService
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        """Stay quiet."""

    def do_GET(self) -> None:
        self._serve(None)

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self._serve(json.loads(self.rfile.read(length) or b"null"))

    def _serve(self, body: Any) -> None:
        failure = self.service.note(self.path, body)
        if failure is not None:
            self._send(failure[2], failure[0], failure[1])
        elif (
            self.service.api_key
            and self.headers.get("Authorization") != f"Bearer {self.service.api_key}"
        ):
            self._send({"error": {"message": "wrong key", "code": "unauthorized"}}, 401)
        elif isinstance(body, dict) and body.get("stream"):
            self._stream(body)
        else:
            self._send(self._answer(body))
        if self.service.close_after_answer:
            self.close_connection = True

    def _answer(self, body: Any) -> Any:
        if self.path == "/generate":
            return self.service.answer(body)
        if self.path == "/tokenize":
            rows = [encode(text) for text in body["prompt"]]
            return {"tokens": rows, "count": [len(row) for row in rows]}
        if self.path == "/detokenize":
            return {"text": decode(body["tokens"])}
        if self.path == "/flush_cache":
            self.service.flush()
            return {"success": True}
        if self.path == "/model_info":
            return {
                "model_path": "toy",
                "chat_template": self.service.chat_template,
                "bos_token": "<s>",
                "eos_token": "<|im_end|>",
                "add_bos_token": True,
            }
        return {"status": "serving", "path": self.path}

    def _stream(self, body: Any) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number, data in enumerate(self.service.stream(body)):
            if number == self.service.break_stream_after:
                self.close_connection = True
                return
            if number == self.service.error_in_stream_after:
                self._event(json.dumps({"error": {"message": "it broke", "code": "boom"}}))
                break
            self._event(json.dumps(data))
        self._event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, data: str) -> None:
        raw = f"data: {data}\n\n".encode()
        self.wfile.write(f"{len(raw):x}\r\n".encode() + raw + b"\r\n")

    def _send(self, data: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        raw = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(raw)


def _handler(service: FakeService) -> type[BaseHTTPRequestHandler]:
    return type("Handler", (_Handler,), {"service": service})
