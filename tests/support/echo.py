"""A whole server without a model: bytes are tokens, and a request's output repeats its prompt.

The process machinery around it is the real one; each process has a module of its own
(echo_tokenizer, echo_scheduler, echo_detokenizer), because the supervisor starts modules.

Steps take `ECHO_STEP_S` seconds (environment), so that a test can catch requests in the middle.
A prompt that begins with "crash" ends the scheduler the way native code would.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from statewise.runtime.errors import ModelLoadError
from statewise.runtime.messages import (
    CacheOptions,
    FinishReason,
    LogprobEntry,
    TokenDelta,
    TokenizedRequest,
    Usage,
    unpack_ids,
)

VOCAB_SIZE = 259
CONTEXT_LEN = 4096
EOS = 257
MODULES = {
    "tokenizer": "support.echo_tokenizer",
    "scheduler": "support.echo_scheduler",
    "detokenizer": "support.echo_detokenizer",
}


class ByteTokenizer:
    """Implements the tokenizer process's `Tokenizer`."""

    vocab_size = VOCAB_SIZE

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int], *, skip_special: bool) -> str:
        return bytes(i for i in token_ids if i < 256).decode(errors="replace")

    def encode_chat(self, chat: dict[str, Any]) -> list[int]:
        last = chat["messages"][-1]["content"]
        return list(last.encode())


class EchoEngine:
    """Implements the scheduler process's `Engine`: one token a step for each request."""

    def __init__(self) -> None:
        self._step_s = float(os.environ.get("ECHO_STEP_S", "0"))
        self._open: dict[str, tuple[TokenizedRequest, list[int], list[int]]] = {}
        self._outbox: list[TokenDelta] = []
        self.num_flushes = 0
        self.is_stalled = False

    def add_request(self, request: TokenizedRequest) -> None:
        prompt = unpack_ids(request.input_ids).tolist()
        if bytes(prompt[:5]) == b"crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if len(prompt) >= CONTEXT_LEN:
            message = f"the prompt has {len(prompt)} tokens; the context holds {CONTEXT_LEN}"
            reason = FinishReason("error", None, message, "prompt_too_long", 400)
            self._outbox.append(TokenDelta(request.rid, finish=reason))
            return
        self._open[request.rid] = (request, prompt, [])

    def abort(self, rid: str, message: str) -> None:
        self._finish(rid, FinishReason("abort", None, message, "aborted", 499))

    def stop_matched(self, rid: str, matched: str, num_tokens: int) -> None:
        if rid in self._open:
            del self._open[rid][2][num_tokens:]
            self._finish(rid, FinishReason("stop", matched))

    def _finish(self, rid: str, reason: FinishReason) -> None:
        if rid in self._open:
            request, prompt, output = self._open.pop(rid)
            sampling = None if output else request.sampling
            usage = Usage(len(prompt), len(output))
            self._outbox.append(TokenDelta(rid, finish=reason, usage=usage, sampling=sampling))

    def has_work(self) -> bool:
        return bool(self._open) or bool(self._outbox)

    def idle(self) -> bool:
        """Nothing to do in the background."""
        return False

    def abandon(self, drain_s: float, *, between_steps: bool) -> None:
        """Nothing to be saved."""

    def step(self) -> list[TokenDelta]:
        if self._open and self._step_s:
            time.sleep(self._step_s)
        for rid in list(self._open):
            self._advance(rid)
        out, self._outbox = self._outbox, []
        return out

    def _advance(self, rid: str) -> None:
        request, prompt, output = self._open[rid]
        limit = min(request.sampling.max_new_tokens, CONTEXT_LEN - len(prompt))
        if limit == 0:
            self._finish(rid, FinishReason("length"))
            return
        token = prompt[len(output) % len(prompt)]
        output.append(token)
        logprobs: tuple[LogprobEntry, ...] = ()
        prompt_logprobs: tuple[LogprobEntry, ...] = ()
        if request.logprob.enabled:
            logprobs = (LogprobEntry(-0.5, token, ((-0.5, token), (-1.5, EOS))),)
            if len(output) == 1 and request.logprob.start >= 0:
                rest = prompt[request.logprob.start + 1 :]
                first = LogprobEntry(None, prompt[request.logprob.start])
                prompt_logprobs = (first, *(LogprobEntry(-0.25, t) for t in rest))
        finish = FinishReason("length") if len(output) >= limit else None
        if token == EOS and not request.sampling.ignore_eos:
            finish = FinishReason("stop", EOS)
        self._outbox.append(
            TokenDelta(
                rid,
                (token,),
                logprobs,
                prompt_logprobs,
                finish,
                Usage(len(prompt), len(output)),
                sampling=request.sampling if len(output) == 1 else None,
                stream=request.stream,
            )
        )
        if finish is not None:
            del self._open[rid]

    def match(self, input_ids: NDArray[np.int32], cache_options: CacheOptions) -> dict[str, Any]:
        return {"prompt": len(input_ids), "matched": 0, "salt": cache_options.salt}

    def flush(self) -> dict[str, Any]:
        self.num_flushes += 1
        return {"freed_blocks": 0, "open_requests": len(self._open)}

    def stats(self) -> dict[str, Any]:
        return {
            "num_running": len(self._open),
            "num_waiting": 0,
            "num_open": len(self._open),
            "pools": {"full": {"total": 10, "free": 10, "running": 0}},
            "counters": {"num_steps": 1, "prompt_tokens": 0, "levels": {"none": 1}},
        }

    def update_weights(self, model_path: str, weight_version: str) -> dict[str, Any]:
        """Nothing to load; a path with "missing" in it is missing."""
        if "missing" in model_path:
            raise ModelLoadError(f"{model_path}: no such directory")
        return {"num_paused_requests": 0, "weight_version": weight_version or "default"}

    def cache_dump(self, form: str) -> dict[str, Any]:
        return {"nodes": []} if form == "json" else {"text": f"<{form} & nothing>"}
