"""One call's answers as they come: whole, as an iterator, or as an asynchronous iterator.

    loop thread --post--> mailbox --> AnswerStream / AsyncAnswerStream --> dicts

A stream runs from the moment it is made. Closing or dropping it aborts what has not ended, and a
request that ends with an error aborts the others of its call and raises.

This module does not tokenize and does not start the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from statewise.runtime.clock import Clock
from statewise.runtime.engine.inputs import Call
from statewise.runtime.engine.loop import EngineLoop, Sink
from statewise.runtime.errors import (
    InvalidRequestError,
    OperatingError,
    PromptTooLongError,
    RefusedError,
    WorkerDiedError,
)
from statewise.runtime.messages import FinishReason, TextDelta, TokenizedRequest
from statewise.runtime.response import ResponseBuilder

# (index of the request in its call, what came)
News = tuple[int, TextDelta]
Post = Callable[[News], None]

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


class RunningCall:
    """A call's submitted requests and what they answered so far."""

    def __init__(
        self,
        loop: EngineLoop,
        clock: Clock,
        call: Call,
        tokenized: Sequence[TokenizedRequest],
        post: Post,
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._is_batch = call.is_batch
        started = clock.monotonic()
        self._builders = [ResponseBuilder(r.rid, r.logprob, started) for r in call.requests]
        self._open: set[int] = set()
        try:
            for index, request in enumerate(tokenized):
                loop.submit(request, _sink(index, post))
                self._open.add(index)
        except BaseException:
            self.abort()
            raise

    @property
    def is_complete(self) -> bool:
        """Whether every request has ended or been given up."""
        return not self._open

    def abort(self) -> None:
        """Give up what has not ended."""
        for index in self._open:
            self._loop.abort(self._builders[index].client_rid)
        self._open.clear()

    def add(self, news: News) -> None:
        """Take one delta; raises the error that its request ends with."""
        index, delta = news
        if delta.finish is not None:
            self._open.discard(index)
            if delta.finish.kind == "error":
                self.abort()
                raise error_of(delta.finish)
        self._builders[index].add(delta)

    def answer(self, index: int) -> dict[str, Any]:
        """One request's answer so far; with its index where there are several."""
        answer = self._builders[index].response(self._clock.monotonic())
        return {**answer, "index": index} if self._is_batch else answer

    def answers(self) -> Any:
        """Every answer: a list for a batch, else the one."""
        now = self._clock.monotonic()
        answers = [builder.response(now) for builder in self._builders]
        return answers if self._is_batch else answers[0]


def _sink(index: int, post: Post) -> Sink:
    return lambda delta: post((index, delta))


class AnswerStream(Iterator[dict[str, Any]]):
    """Answers with cumulative text, as they come."""

    def __init__(self, start: Callable[[Post], RunningCall]) -> None:
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._call: RunningCall | None = None  # `__del__` runs even where `start` raises
        self._call = start(self._news.put)

    def __next__(self) -> dict[str, Any]:
        """Wait for news; StopIteration when all have ended."""
        call = self._running()
        if call.is_complete:
            raise StopIteration
        return call.answer(self._take())

    def whole(self) -> Any:
        """Wait for all answers."""
        call = self._running()
        while not call.is_complete:
            self._take()
        return call.answers()

    def close(self) -> None:
        """Abort what has not ended."""
        if self._call is not None:
            self._call.abort()

    def __del__(self) -> None:
        self.close()

    def _running(self) -> RunningCall:
        assert self._call is not None
        return self._call

    def _take(self) -> int:
        """Wait for one delta; the index of its request."""
        try:
            news = self._news.get()
            self._running().add(news)
        except BaseException:
            self.close()
            raise
        return news[0]


class AsyncAnswerStream(AsyncIterator[dict[str, Any]]):
    """Answers with cumulative text, as they come; belongs to the event loop that made it."""

    def __init__(self, start: Callable[[Post], RunningCall]) -> None:
        self._events = asyncio.get_running_loop()
        self._news: asyncio.Queue[News] = asyncio.Queue()
        self._call: RunningCall | None = None
        self._call = start(self._post)

    def _post(self, news: News) -> None:
        # An event loop that was closed has nobody left who waits.
        with contextlib.suppress(RuntimeError):
            self._events.call_soon_threadsafe(self._news.put_nowait, news)

    async def __anext__(self) -> dict[str, Any]:
        """Wait for news; StopAsyncIteration when all have ended."""
        call = self._running()
        if call.is_complete:
            raise StopAsyncIteration
        return call.answer(await self._take())

    async def whole(self) -> Any:
        """Wait for all answers."""
        call = self._running()
        while not call.is_complete:
            await self._take()
        return call.answers()

    async def aclose(self) -> None:
        """Abort what has not ended."""
        self._abort()

    def __del__(self) -> None:
        self._abort()

    def _abort(self) -> None:
        if self._call is not None:
            self._call.abort()

    def _running(self) -> RunningCall:
        assert self._call is not None
        return self._call

    async def _take(self) -> int:
        """Wait for one delta; the index of its request."""
        try:
            news = await self._news.get()
            self._running().add(news)
        except BaseException:
            self._abort()
            raise
        return news[0]
