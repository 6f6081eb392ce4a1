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

import asyncio
import contextlib
import queue
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import msgspec
import numpy as np

from statewise.runtime import machine
from statewise.runtime.clock import Clock, SystemClock
from statewise.runtime.config import ServerArgs, checked
from statewise.runtime.detokenizer import DetokenizerCore
from statewise.runtime.engine.inputs import Call, read_call
from statewise.runtime.engine.loop import EngineLoop
from statewise.runtime.errors import (
    InvalidRequestError,
    OperatingError,
    PromptTooLongError,
    RefusedError,
    WorkerDiedError,
)
from statewise.runtime.messages import (
    CacheOptions,
    FinishReason,
    GenerateRequest,
    TextDelta,
    TokenizedRequest,
    pack_ids,
)
from statewise.runtime.response import WEIGHT_VERSION, ResponseBuilder
from statewise.runtime.server import requests as checks
from statewise.runtime.tokenizer.facts import facts_of
from statewise.runtime.tokenizer.load import load_tokenizer
from statewise.runtime.tokenizer.tokenizer import Tokenizer

# (index of the request in its call, what came)
News = tuple[int, TextDelta]
Post = Callable[[News], None]

_SECRETS = {"api_key", "admin_api_key", "rpc_secret_key_file"}
_ERRORS = (PromptTooLongError, InvalidRequestError, RefusedError, WorkerDiedError)


def error_of(finish: FinishReason) -> OperatingError:
    """Return the exception that a terminal error stands for."""
    for kind in _ERRORS:
        if kind.code == finish.code:
            return kind(finish.message)
    client_side = 400 <= finish.http_status < 500
    error = InvalidRequestError(finish.message) if client_side else OperatingError(finish.message)
    error.code = finish.code or error.code
    error.http_status = finish.http_status
    return error


class _Answers:
    """What one call's requests answered so far."""

    def __init__(self, call: Call, started: float) -> None:
        self._builders = [ResponseBuilder(r.rid, r.logprob, started) for r in call.requests]
        self._is_batch = call.is_batch
        self._num_open = len(self._builders)

    @property
    def are_complete(self) -> bool:
        """Whether every request has ended."""
        return self._num_open == 0

    def add(self, news: News) -> None:
        """Take one delta; raises the error that it ends with."""
        index, delta = news
        if delta.finish is not None:
            if delta.finish.kind == "error":
                raise error_of(delta.finish)
            self._num_open -= 1
        self._builders[index].add(delta)

    def one(self, index: int, now: float) -> dict[str, Any]:
        """One request's answer so far; marked with its index where there are several."""
        answer = self._builders[index].response(now)
        return {**answer, "index": index} if self._is_batch else answer

    def all(self, now: float) -> Any:
        """Every answer: a list for a batch, else the one."""
        answers = [builder.response(now) for builder in self._builders]
        return answers if self._is_batch else answers[0]


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
        core = built.core(self._clock)
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
        an iterator of answers with cumulative text; abandoning it aborts the request.
        """
        call = self._read(prompt, sampling_params, stream, fields)
        return self._stream(call) if stream else self._gather(call)

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
        return self._async_stream(call) if stream else await self._async_gather(call)

    def _read(
        self, prompt: Any, sampling_params: Any, stream: bool, fields: dict[str, Any]
    ) -> Call:
        given = {"prompt": prompt, "sampling_params": sampling_params, **fields}
        return read_call(given, self._vocab_size, stream=stream, arrival=self._clock.wall())

    def _gather(self, call: Call) -> Any:
        news: queue.SimpleQueue[News] = queue.SimpleQueue()
        answers = _Answers(call, self._clock.monotonic())
        with self._running(call, news.put):
            while not answers.are_complete:
                answers.add(news.get())
        return answers.all(self._clock.monotonic())

    def _stream(self, call: Call) -> Iterator[dict[str, Any]]:
        news: queue.SimpleQueue[News] = queue.SimpleQueue()
        answers = _Answers(call, self._clock.monotonic())
        with self._running(call, news.put):
            while not answers.are_complete:
                item = news.get()
                answers.add(item)
                yield answers.one(item[0], self._clock.monotonic())

    async def _async_gather(self, call: Call) -> Any:
        news, post = _async_mailbox()
        answers = _Answers(call, self._clock.monotonic())
        with self._running(call, post):
            while not answers.are_complete:
                answers.add(await news.get())
        return answers.all(self._clock.monotonic())

    async def _async_stream(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        news, post = _async_mailbox()
        answers = _Answers(call, self._clock.monotonic())
        with self._running(call, post):
            while not answers.are_complete:
                item = await news.get()
                answers.add(item)
                yield answers.one(item[0], self._clock.monotonic())

    @contextlib.contextmanager
    def _running(self, call: Call, post: Post) -> Iterator[None]:
        """Submit a call's requests; aborts those still open when the caller leaves."""
        tokenized = [self._tokenized(request) for request in call.requests]
        submitted: list[str] = []
        try:
            for index, request in enumerate(tokenized):
                self._loop.submit(request, _sink(index, post))
                submitted.append(request.rid)
            yield
        except BaseException:
            for rid in submitted:
                self._loop.abort(rid)
            raise

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

    def cache_dump(self) -> dict[str, Any]:
        """Return the tree as data."""
        return self._loop.call(lambda core: core.cache_dump())

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
            "weight_version": WEIGHT_VERSION,
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


def _sink(index: int, post: Post) -> Callable[[TextDelta], None]:
    return lambda delta: post((index, delta))


def _async_mailbox() -> tuple[asyncio.Queue[News], Post]:
    """Make a queue for the running event loop, and how another thread puts into it."""
    loop = asyncio.get_running_loop()
    news: asyncio.Queue[News] = asyncio.Queue()

    def post(item: News) -> None:
        # An event loop that was closed has nobody left who waits.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(news.put_nowait, item)

    return news, post
