"""From token deltas to text deltas: decoding, stop strings, and one last delta per request.

    TokenDelta --decode--> text --find stops--> TextDelta (what no stop can take back)
                                     |
                                     +--------> StopMatched (to the scheduler), then silence
                                                until its terminal delta, which fills the usage

The scheduler works on token ids and runs ahead; what it generates after a stop is swallowed here.
Tokens are taken one by one, so the final text and token count do not depend on how they were cut
into deltas. Stops are looked for in the text after the first `min_new_tokens` tokens. Of a request
that does not stream, what follows the first delta is held and shown in few large ones.

This module has no sockets and no threads, and does not know a tokenizer's kind.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from statewise.runtime.messages import (
    FinishReason,
    LogprobEntry,
    StopMatched,
    TextDelta,
    TokenDelta,
)
from statewise.runtime.sampling_params import SamplingParams
from statewise.runtime.stop_text import StopFinder, StopMatch

MAX_HELD_TOKENS = 256  # of a request that does not stream: bounds the size of one delta


class TextDecoder(Protocol):
    """Decodes one output token by token."""

    def push(self, token_id: int) -> str:
        """Text that is certain after one more token (whole characters only)."""
        ...

    def finish(self) -> str:
        """Return what is left when no token follows (a broken character becomes U+FFFD)."""
        ...


class TextVocabulary(Protocol):
    """What detokenizing needs of a tokenizer."""

    def decoder(self, sampling: SamplingParams) -> TextDecoder:
        """Return a decoder for one request's output."""
        ...

    def token_text(self, token_id: int) -> str:
        """One token's text on its own, for log probabilities."""
        ...


class _Output:
    """One request's text so far: shown up to `_shown`, the rest held back in `_held`."""

    def __init__(
        self, sampling: SamplingParams, decoder: TextDecoder | None, *, stream: bool
    ) -> None:
        self.sampling = sampling
        self.stream = stream
        self.num_tokens = 0
        self.match: StopMatch | None = None
        self.waiting: list[TextDelta] = []  # made, not sent: more will come before the end
        self._decoder = decoder
        self._finder = StopFinder(sampling.stop, sampling.stop_regex)
        self._shown = 0  # characters of the finder's text that were shown
        self._held = ""

    def is_stopped(self) -> bool:
        """Whether a stop string or expression has completed."""
        return self.match is not None

    def push(self, token_id: int) -> str:
        """Take one token; text that is safe to show. Sets `match` where a stop completed."""
        self.num_tokens += 1
        piece = "" if self._decoder is None else self._decoder.push(token_id)
        return self._take(piece)

    def skip(self) -> None:
        """Count a token whose text is not shown (a stop id)."""
        self.num_tokens += 1

    def finish(self) -> str:
        """Everything that is left; `match` may be set by what only more text could deny."""
        text = self._take("" if self._decoder is None else self._decoder.finish())
        if self.match is None:
            self.match = self._finder.finish()
            text += self._cut() if self.match else self._held
            self._held = ""
        return text

    def _take(self, piece: str) -> str:
        if self.num_tokens <= self.sampling.min_new_tokens:
            return piece
        self._held += piece
        self.match = self._finder.push(piece)
        if self.match is not None:
            return self._cut()
        safe = self._finder.pending_start - self._shown
        text, self._held = self._held[:safe], self._held[safe:]
        self._shown += safe
        return text

    def _cut(self) -> str:
        """Text up to the stop, or through it where it is not trimmed."""
        assert self.match is not None
        end = self.match.end if self.sampling.no_stop_trim else self.match.start
        return self._held[: end - self._shown]


class DetokenizerCore:
    """All open requests' outputs. `vocabulary` None: ids pass through without text."""

    def __init__(self, vocabulary: TextVocabulary | None) -> None:
        self._vocabulary = vocabulary
        self._outputs: dict[str, _Output] = {}

    @property
    def num_open(self) -> int:
        """Requests whose terminal delta has not come."""
        return len(self._outputs)

    def clear(self) -> None:
        """Forget all requests: the scheduler that ran them is gone."""
        self._outputs.clear()

    def feed(self, delta: TokenDelta) -> tuple[list[TextDelta], list[StopMatched]]:
        """Take one delta; what to send to the server and to the scheduler.

        Deltas of a request that was never opened (its first delta was lost with a process) are
        dropped, except a terminal one, which always passes.
        """
        if delta.sampling is not None and delta.rid not in self._outputs:
            self._outputs[delta.rid] = self._open(delta.sampling, delta.stream)
        output = self._outputs.get(delta.rid)
        if output is None:
            return ([_terminal_only(delta)] if delta.finish is not None else []), []
        if delta.finish is not None:
            del self._outputs[delta.rid]
            return [_merged([*output.waiting, self._last(output, delta)])], []
        if output.is_stopped():
            return [], []
        text, count = _advance(output, delta.token_ids)
        stops = []
        if output.match is not None:
            stops.append(StopMatched(delta.rid, output.match.text, output.num_tokens))
        return self._due(output, self._shown(output, delta, text, count)), stops

    def _open(self, sampling: SamplingParams, stream: bool) -> _Output:
        decoder = None if self._vocabulary is None else self._vocabulary.decoder(sampling)
        return _Output(sampling, decoder, stream=stream)

    def _due(self, output: _Output, shown: TextDelta) -> list[TextDelta]:
        """What to send now: all news of a stream; else the first, and what is too much to hold."""
        if not (shown.text or shown.token_ids or shown.prompt_logprobs):
            return []
        output.waiting.append(shown)
        num_held = sum(len(delta.token_ids) for delta in output.waiting)
        is_first = num_held == output.num_tokens
        if not output.stream and not is_first and num_held < MAX_HELD_TOKENS:
            return []
        out, output.waiting = output.waiting, []
        return [_merged(out)]

    def _last(self, output: _Output, delta: TokenDelta) -> TextDelta:
        """Build the terminal delta: the rest of the text, and why the request ended."""
        assert delta.finish is not None
        text, count = "", 0
        if not output.is_stopped():
            ids = delta.token_ids
            hidden = bool(ids) and _ends_with_hidden_token(output.sampling, delta.finish)
            text, count = _advance(output, ids[:-1] if hidden else ids)
            if not output.is_stopped():
                if hidden:
                    output.skip()
                    count += 1
                text += output.finish()
        shown = self._shown(output, delta, text, count)
        finish = delta.finish
        if output.match is not None and finish.kind != "abort":
            finish = FinishReason("stop", output.match.text)
        usage = msgspec.structs.replace(delta.usage, completion_tokens=output.num_tokens)
        return msgspec.structs.replace(shown, finish=finish, usage=usage)

    def _shown(self, output: _Output, delta: TokenDelta, text: str, count: int) -> TextDelta:
        logprobs = delta.logprobs[:count]
        return TextDelta(
            delta.rid,
            text,
            delta.token_ids[:count],
            logprobs,
            delta.prompt_logprobs,
            usage=msgspec.structs.replace(delta.usage, completion_tokens=output.num_tokens),
            report=delta.report,
            token_texts=self._token_texts((*delta.prompt_logprobs, *logprobs)),
        )

    def _token_texts(self, entries: Iterable[LogprobEntry]) -> tuple[tuple[int, str], ...]:
        if self._vocabulary is None:
            return ()
        named: dict[int, None] = {}
        for entry in entries:
            named[entry.token_id] = None
            named.update((token_id, None) for _, token_id in (*entry.top, *entry.chosen))
        return tuple((i, self._vocabulary.token_text(i)) for i in named)


def _advance(output: _Output, token_ids: tuple[int, ...]) -> tuple[str, int]:
    """Push tokens until one completes a stop; the text to show and the tokens taken."""
    text = []
    for count, token_id in enumerate(token_ids, start=1):
        text.append(output.push(token_id))
        if output.is_stopped():
            return "".join(text), count
    return "".join(text), len(token_ids)


def _ends_with_hidden_token(sampling: SamplingParams, finish: FinishReason) -> bool:
    """Whether the last token is a stop id, which is counted and not shown."""
    return finish.kind == "stop" and isinstance(finish.matched, int) and not sampling.no_stop_trim


def _merged(deltas: list[TextDelta]) -> TextDelta:
    """Make one delta of several of one request, in order."""
    last = deltas[-1]
    if len(deltas) == 1:
        return last
    return msgspec.structs.replace(
        last,
        text="".join(d.text for d in deltas),
        token_ids=tuple(i for d in deltas for i in d.token_ids),
        logprobs=tuple(e for d in deltas for e in d.logprobs),
        prompt_logprobs=tuple(e for d in deltas for e in d.prompt_logprobs),
        report=last.report or next((d.report for d in deltas if d.report), None),
        token_texts=tuple({pair: None for d in deltas for pair in d.token_texts}),
    )


def _terminal_only(delta: TokenDelta) -> TextDelta:
    return TextDelta(delta.rid, finish=delta.finish, usage=delta.usage, report=delta.report)
