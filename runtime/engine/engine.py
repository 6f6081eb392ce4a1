"""The in-process engine: the whole serving path without processes or sockets.

    with Engine(model_path="smollm2-135m") as engine:
        print(engine.generate("The capital of France is", {"max_new_tokens": 8})["text"])

Answers are the same dicts as the server's /generate (response.py builds both). All methods are
thread safe: one background thread runs the core, callers tokenize on their own threads. A request
that ends with an error raises it; the others of its call are aborted.

Importing this module imports no torch; making an `Engine` does. It does not serve anyone outside
this process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import msgspec
import numpy as np

from statewise.runtime import machine
from statewise.runtime.clock import Clock, SystemClock
from statewise.runtime.config import ServerArgs, checked
from statewise.runtime.detokenizer import DetokenizerCore
from statewise.runtime.engine.answers import AnswerStream, AsyncAnswerStream, Post, RunningCall
from statewise.runtime.engine.inputs import Call, read_call
from statewise.runtime.engine.loop import EngineLoop
from statewise.runtime.errors import InvalidRequestError
from statewise.runtime.messages import (
    CacheOptions,
    GenerateRequest,
    TokenizedRequest,
    pack_ids,
)
from statewise.runtime.server import requests as checks
from statewise.runtime.tokenizer.facts import facts_of
from statewise.runtime.tokenizer.load import load_tokenizer
from statewise.runtime.tokenizer.tokenizer import Tokenizer

DRAIN_S = 5.0  # for copies to slower tiers, at the end
_SECRETS = {"api_key", "admin_api_key", "rpc_secret_key_file"}


class Engine:
    """A model served within this process. Settings are those of the server, by name.

    Raises InvalidRequestError for settings that cannot be, ModelLoadError and PoolSizeError for a
    model that cannot be loaded. `progress` is called while weights load, with (bytes read, bytes
    in all, tensor name).
    """

    def __init__(
        self, *, progress: Callable[[int, int, str], None] | None = None, **settings: Any
    ) -> None:
        machine.wait_passively()
        from statewise.runtime.engine.build import build_runtime  # imports torch

        self.args: ServerArgs = checked(settings)
        self._clock: Clock = SystemClock()
        self._tokenizer = _tokenizer(self.args)
        built = build_runtime(self.args, progress, self._tokenizer)
        core = self._core = built.core(self._clock)
        self._vocab_size = built.model.vocab_size
        self._info = built.info(core)
        self.start_log: list[str] = built.start_log(core)
        self._loop = EngineLoop(core, DetokenizerCore(self._tokenizer))
        self._grammar = built.grammar
        self._loop.start()

    # ---------------------------------------------------------------- generating

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        *,
        stream: bool = False,
        **fields: Any,
    ) -> Any:
        """Run one prompt or a list of them; `fields` as `GenerateArguments`.

        Returns an answer, or a list where a list (or n > 1) was asked for. With `stream` returns
        an iterator of answers with cumulative text; closing or dropping it aborts the request.
        """
        call = self._read(prompt, sampling_params, stream, fields)
        answers = AnswerStream(partial(self._run, call))
        return answers if stream else answers.whole()

    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        *,
        stream: bool = False,
        **fields: Any,
    ) -> Any:
        """Do as `generate`; with `stream` the result is an asynchronous iterator."""
        call = self._read(prompt, sampling_params, stream, fields)
        answers = AsyncAnswerStream(partial(self._run, call))
        return answers if stream else await answers.whole()

    def _read(
        self, prompt: Any, sampling_params: Any, stream: bool, fields: dict[str, Any]
    ) -> Call:
        given = {"prompt": prompt, "sampling_params": sampling_params, **fields}
        return read_call(given, self._vocab_size, stream=stream, arrival=self._clock.wall())

    def _run(self, call: Call, post: Post) -> RunningCall:
        tokenized = [self._tokenized(request) for request in call.requests]
        return RunningCall(self._loop, self._clock, call, tokenized, post)

    def _tokenized(self, request: GenerateRequest) -> TokenizedRequest:
        if request.input_ids is not None:
            ids = request.input_ids
        else:
            assert request.text is not None
            ids = pack_ids(self.encode(request.text))
        if not ids:
            raise InvalidRequestError("the prompt is empty; at least one token is needed")
        checks.checked_prompt_logprob(request.logprob, len(ids) // 4)
        return TokenizedRequest(
            rid=request.rid,
            input_ids=ids,
            sampling=request.sampling,
            logprob=request.logprob,
            cache=request.cache,
            priority=request.priority,
            stream=request.stream,
            arrival=request.arrival,
        )

    # ---------------------------------------------------------------- text and ids

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with what a prompt begins with."""
        return self._needed().encode(text, add_special=True)

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of token ids."""
        return self._needed().decode(list(token_ids), skip_special=skip_special)

    def encode_chat(self, chat: dict[str, Any]) -> list[int]:
        """Token ids of a conversation: {"messages": [...], "tools": [...], ...}."""
        return self._needed().encode_chat(chat)

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text as a prompt."""
        return [self.encode(text) for text in texts]

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""
        return self.decode(ids, skip_special=False)

    def _needed(self) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidRequestError("this engine takes token ids only (skip_tokenizer_init)")
        return self._tokenizer

    # ---------------------------------------------------------------- questions and control

    def match(
        self,
        prompt: str | None = None,
        *,
        input_ids: Sequence[int] | None = None,
        cache_salt: str = "",
    ) -> dict[str, Any]:
        """Say what a request with this prompt would reuse now, by group, without running it."""
        if (prompt is None) == (input_ids is None):
            raise InvalidRequestError("exactly one of 'prompt' and 'input_ids' is needed")
        ids = self.encode(prompt) if prompt is not None else list(input_ids or [])
        packed = np.asarray(ids, dtype=np.int32)
        return self._loop.call(lambda core: core.match(packed, CacheOptions(salt=cache_salt)))

    def flush_cache(self) -> dict[str, Any]:
        """Drop all cached state that no request is using."""
        return self._loop.call(lambda core: core.flush())

    def cache_dump(self, form: str = "json") -> dict[str, Any]:
        """Return the tree as data, or as a picture in `text`: ascii, svg."""
        return self._loop.call(lambda core: core.cache_dump(form))

    def update_weights_from_disk(self, model_path: str, weight_version: str = "") -> dict[str, Any]:
        """Go on with other weights of the same architecture; running requests go on with them.

        Raises OperatingError where they cannot be loaded or do not fit; nothing has changed then.
        """
        return self._loop.call(lambda core: core.update_weights(model_path, weight_version))

    def abort(self, rid: str = "") -> None:
        """End a request by its id; empty: all."""
        self._loop.abort(rid)

    def model_info(self) -> dict[str, Any]:
        """Return what is served: limits, chat template, special tokens."""
        return {
            "model_path": self.args.model_path,
            "tokenizer_path": self.args.tokenizer_path or self.args.model_path,
            "served_model_name": self.args.served_model_name or self._info["model_name"],
            "is_generation": True,
            "weight_version": self._loop.call(lambda core: core.weight_version),
            **({} if self._tokenizer is None else facts_of(self._tokenizer)),
            **self._info,
        }

    def get_server_info(self) -> dict[str, Any]:
        """Return settings (no secrets), the model, and the state of the engine."""
        settings = msgspec.structs.asdict(self.args)
        return {
            **{name: value for name, value in settings.items() if name not in _SECRETS},
            "model": self._info,
            "internal_states": [self._loop.call(lambda core: core.stats())],
        }

    # ---------------------------------------------------------------- end

    def shutdown(self) -> None:
        """Abort what is open and stop the background threads; safe to call twice."""
        self._loop.close()
        self._core.close(DRAIN_S)
        if self._grammar is not None:
            self._grammar.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()


def _tokenizer(args: ServerArgs) -> Tokenizer | None:
    if args.skip_tokenizer_init:
        return None
    path = args.tokenizer_path or args.model_path
    return load_tokenizer(path, chat_template=args.chat_template)
