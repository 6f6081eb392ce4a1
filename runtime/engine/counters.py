"""Counters of one engine: what /metrics and /get_server_info show. Plain numbers, no library."""

from __future__ import annotations

from collections import Counter
from typing import Any

from statewise.runtime.counters import Histogram, Labelled, LabelledHistogram
from statewise.runtime.messages import CacheReport, FinishReason
from statewise.runtime.scheduler.request import Request


class EngineCounters:
    """Everything counted since the engine started."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.step_seconds = 0.0
        self.worker_seconds = 0.0  # of step_seconds, inside the worker
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.logical_hit_tokens = 0
        self.effective_reuse_tokens = 0
        self.repaired_tokens = 0
        self.loaded_tokens = 0
        self.lossy_tokens = 0
        self.recomputed_tokens = 0
        self.limiting_group: Counter[str] = Counter()
        self.levels: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self.ttft = Histogram()
        self.inter_token = Histogram()
        self.e2e = Histogram()
        self.queue = Histogram()
        self.shortfall_tokens = Labelled(
            "Tokens found in the tree and not used as they stood, by limiting group.", "group"
        )
        self.recoveries = Labelled(
            "Recoveries of admitted requests, by level and outcome.", "level", "outcome"
        )
        self.recovery_tokens = Labelled("Tokens computed to recover, by level.", "level")
        self.recovery_seconds = LabelledHistogram(
            "Time from admission to the end of a request's replays, by level.", "level"
        )
        self.admissions_refused = Labelled("Requests refused, by code.", "code")

    def admitted(self, request: Request, report: CacheReport) -> None:
        """A request began; its report says what was reused."""
        self.prompt_tokens += request.prompt_len
        self.logical_hit_tokens += report.matched
        self.effective_reuse_tokens += report.reused
        self.repaired_tokens += report.repaired
        self.loaded_tokens += report.loaded
        self.recomputed_tokens += report.recomputed
        self.levels[report.level] += 1
        if report.limiting_group:
            self.limiting_group[report.limiting_group] += 1
        short = report.matched - report.reused
        if short > 0:
            self.shortfall_tokens.add(report.limiting_group or "none", amount=short)

    def ended(self, request: Request, reason: FinishReason, now: float) -> None:
        """A request ended."""
        self.finished[reason.code or reason.kind] += 1
        self.lossy_tokens += request.report.lossy if request.report is not None else 0
        self.e2e.add(now - request.arrival)

    def as_dict(self) -> dict[str, Any]:
        """JSON form of what has no labels."""
        out: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Counter):
                out[name] = dict(value)
            elif isinstance(value, Histogram):
                out[name] = value.as_dict()
            elif not isinstance(value, (Labelled, LabelledHistogram)):
                out[name] = value
        return out
