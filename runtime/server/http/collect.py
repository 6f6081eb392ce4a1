"""From deltas to answers: one collector for each open request, whole or piece by piece.

A slow reader loses nothing: what has arrived meanwhile is merged, so a stream's events may hold
several tokens. A request that ended with an error raises; its status and code travel along.

This module does not know the shape of any API's answer.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from statewise.runtime.messages import GenerateRequest, LogprobEntry
from statewise.runtime.response import ResponseBuilder
from statewise.runtime.server.broker import Reply
from statewise.runtime.server.http.errors import FailedRequestError
from statewise.runtime.server.service import Service


class Collector:
    """One request's answer so far, and what of it was already taken."""

    def __init__(self, index: int, request: GenerateRequest, started: float) -> None:
        self.index = index
        self.request = request
        self.answer = ResponseBuilder(request.rid, request.logprob, started)
        self._text_taken = 0
        self._logprobs_taken = 0
        self._tokens_shown = 0

    @property
    def finish_kind(self) -> str | None:
        """stop, length or abort once the request has ended; None before."""
        return None if self.answer.finish is None else self.answer.finish.kind

    def is_due(self, interval: int) -> bool:
        """Whether there is enough new for an event; if so, counting starts again."""
        num_tokens = len(self.answer.token_ids)
        is_first = self._tokens_shown == 0
        if self.finish_kind is None and not is_first and num_tokens - self._tokens_shown < interval:
            return False
        self._tokens_shown = num_tokens
        return True

    def take_text(self) -> str:
        """Return the text since the last call."""
        text = self.answer.text[self._text_taken :]
        self._text_taken = len(self.answer.text)
        return text

    def take_logprobs(self) -> list[LogprobEntry]:
        """Return the generated tokens' entries since the last call."""
        entries = self.answer.logprobs[self._logprobs_taken :]
        self._logprobs_taken = len(self.answer.logprobs)
        return entries


def collectors(service: Service, requests: Sequence[GenerateRequest]) -> list[Collector]:
    """One collector for each request, in order."""
    now = service.clock.monotonic()
    return [Collector(index, request, now) for index, request in enumerate(requests)]


async def _absorb(reply: Reply, group: Sequence[Collector]) -> list[Collector]:
    """Wait for news; returns the requests that have some, or none when all have ended."""
    touched: dict[int, Collector] = {}
    for index, delta in await reply.next():
        if delta.finish is not None and delta.finish.kind == "error":
            raise FailedRequestError(delta.finish)
        group[index].answer.add(delta)
        touched[index] = group[index]
    return list(touched.values())


async def run_all(service: Service, requests: Sequence[GenerateRequest]) -> list[Collector]:
    """Run the requests to their ends. Raises FailedRequestError if one of them fails."""
    group = collectors(service, requests)
    with service.broker.open(requests) as reply:
        while await _absorb(reply, group):
            pass
    return group


async def run_stream(
    service: Service, requests: Sequence[GenerateRequest]
) -> AsyncGenerator[Collector, None]:
    """Run the requests; yields a collector each time it has news worth an event.

    After a request's first token that is `--stream-interval` tokens, or its end. Raises
    FailedRequestError if one fails. Closing the generator aborts what has not ended.
    """
    group = collectors(service, requests)
    interval = service.args.stream_interval
    with service.broker.open(requests) as reply:
        while touched := await _absorb(reply, group):
            for collector in touched:
                if collector.is_due(interval):
                    yield collector
