"""Counters of one engine: what /metrics and /get_server_info show. Plain numbers, no library."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from statewise.runtime.messages import CacheReport, FinishReason
from statewise.runtime.scheduler.request import Request

# Seconds; the usual bounds of serving dashboards.
LATENCY_BOUNDS = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0,
    10.0, 20.0, 40.0, 60.0, 80.0, 100.0,
)  # fmt: skip


@dataclass
class Histogram:
    """Cumulative-free bucket counts over fixed upper bounds, with sum and count."""

    bounds: tuple[float, ...] = LATENCY_BOUNDS
    counts: list[int] = field(default_factory=list)
    total: float = 0.0
    num: int = 0

    def __post_init__(self) -> None:
        """One bucket per bound and one above all."""
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        """Count one observation."""
        self.total += value
        self.num += 1
        for i, bound in enumerate(self.bounds):
            if value <= bound:
                self.counts[i] += 1
                return
        self.counts[-1] += 1

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "bounds": list(self.bounds), "counts": self.counts, "sum": self.total, "num": self.num,
        }  # fmt: skip


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
        self.recomputed_tokens = 0
        self.limiting_group: Counter[str] = Counter()
        self.levels: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self.ttft = Histogram()
        self.inter_token = Histogram()
        self.e2e = Histogram()

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

    def ended(self, request: Request, reason: FinishReason, now: float) -> None:
        """A request ended."""
        self.finished[reason.code or reason.kind] += 1
        self.e2e.add(now - request.arrival)

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        out: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Counter):
                out[name] = dict(value)
            elif isinstance(value, Histogram):
                out[name] = value.as_dict()
            else:
                out[name] = value
        return out
