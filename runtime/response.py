"""What the native API answers: text deltas of one request gathered into one JSON-able dict.

The server's /generate and the in-process engine build their answers here, so that both say the
same. Text is cumulative: an event of a stream holds everything so far.

    {"text", "output_ids", "meta_info": {id, finish_reason, counts, logprob lists, cache_report}}

Log probabilities are lists of [logprob, token id, text or null]; the lists of alternatives hold
one such list for each position (null for the first prompt token, which nothing precedes).

This module does not raise a request's error: whoever reads `finish` decides what it means.
"""

from __future__ import annotations

from typing import Any

import msgspec

from statewise.runtime.messages import (
    CacheReport,
    FinishReason,
    LogprobEntry,
    LogprobOptions,
    Pair,
    TextDelta,
    Usage,
)


class ResponseBuilder:
    """Gathers one request's deltas; `response` shows them."""

    def __init__(self, client_rid: str, logprob: LogprobOptions, started: float) -> None:
        self.client_rid = client_rid
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[LogprobEntry] = []
        self.prompt_logprobs: list[LogprobEntry] = []
        self.token_texts: dict[int, str] = {}
        self.finish: FinishReason | None = None
        self.usage = Usage()
        self.report: CacheReport | None = None
        self._options = logprob
        self._started = started  # monotonic seconds

    def add(self, delta: TextDelta) -> None:
        """Take the next delta."""
        assert self.finish is None, f"{delta.rid}: a delta after the last"
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.prompt_logprobs.extend(delta.prompt_logprobs)
        self.token_texts.update(delta.token_texts)
        self.usage = delta.usage
        self.report = delta.report or self.report
        self.finish = delta.finish

    def response(self, now: float) -> dict[str, Any]:
        """Everything so far as /generate answers it; `now` is monotonic seconds."""
        return {
            "text": self.text,
            "output_ids": list(self.token_ids),
            "meta_info": self._meta_info(now),
        }

    def _meta_info(self, now: float) -> dict[str, Any]:
        report = self.report
        meta: dict[str, Any] = {
            "id": self.client_rid,
            "finish_reason": finish_reason(self.finish, len(self.token_ids)),
            "prompt_tokens": self.usage.prompt_tokens,
            "completion_tokens": self.usage.completion_tokens,
            "cached_tokens": self.usage.cached_tokens,
            "cached_tokens_details": {
                "device": report.reused if report else 0,
                "host": _loaded(report, "host"),
                "storage": _loaded(report, "disk") + _loaded(report, "remote"),
            },
            "weight_version": self.usage.weight_version,
            "num_retractions": self.usage.num_retractions,
            "queue_time": self.usage.queue_s,
            "prefill_time": self.usage.prefill_s,
            "e2e_latency": now - self._started,
            "cache_report": cache_report(report),
        }
        if self._options.enabled:
            meta.update(self._logprob_lists())
        return meta

    def _logprob_lists(self) -> dict[str, Any]:
        lists: dict[str, Any] = {
            "input_token_logprobs": [self._shown(e) for e in self.prompt_logprobs],
            "output_token_logprobs": [self._shown(e) for e in self.logprobs],
        }
        if self._options.top:
            lists["input_top_logprobs"] = self._alternatives(self.prompt_logprobs, "top")
            lists["output_top_logprobs"] = self._alternatives(self.logprobs, "top")
        if self._options.token_ids:
            lists["input_token_ids_logprobs"] = self._alternatives(self.prompt_logprobs, "chosen")
            lists["output_token_ids_logprobs"] = self._alternatives(self.logprobs, "chosen")
        return lists

    def _text_of(self, token_id: int) -> str | None:
        return self.token_texts.get(token_id) if self._options.with_text else None

    def _shown(self, entry: LogprobEntry) -> list[Any]:
        return [entry.logprob, entry.token_id, self._text_of(entry.token_id)]

    def _alternatives(self, entries: list[LogprobEntry], which: str) -> list[Any]:
        out: list[Any] = []
        for entry in entries:
            pairs: tuple[Pair, ...] = getattr(entry, which)
            shown = [[logprob, token_id, self._text_of(token_id)] for logprob, token_id in pairs]
            out.append(None if entry.logprob is None else shown)
        return out


def finish_reason(finish: FinishReason | None, num_tokens: int) -> dict[str, Any] | None:
    """Return a finish reason as the native API shows it; None while the request runs."""
    if finish is None:
        return None
    if finish.kind == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.kind == "length":
        return {"type": "length", "length": num_tokens}
    return {"type": "abort", "message": finish.message}


def cache_report(report: CacheReport | None) -> dict[str, Any] | None:
    """Return a cache report as plain data, every field present."""
    if report is None:
        return None
    shown = {name: getattr(report, name) for name in report.__struct_fields__}
    shown["groups"] = [msgspec.structs.asdict(group) for group in report.groups]
    shown["verdicts"] = list(report.verdicts)
    return shown


def _loaded(report: CacheReport | None, tier: str) -> int:
    """Tokens whose state came back from a tier."""
    return report.loaded_from.get(tier, 0) if report else 0
