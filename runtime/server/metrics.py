"""Counters and gauges for Prometheus: what the server sees, and what the scheduler last said.

Requests are counted here as they pass; the scheduler's own numbers come with its heartbeats and
are turned into metrics when somebody scrapes, so a scrape never waits for a step. Names are ours
(`statewise:`); with `--sglang-metrics` the most used ones appear under SGLang's names as well, for
dashboards people have.

This module does not measure: it is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from statewise.runtime.messages import TextDelta

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_OURS = "statewise:"
_SGLANG = "sglang:"
_BUCKETS = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60,
    80, 100, 200, 400,
)  # fmt: skip
# Where a group's blocks are; they add up to the pool.
BLOCK_STATES = ("free", "limbo", "cached", "running", "loading")
# Counters of the engine (its `stats()["counters"]`) and the help text of each.
_ENGINE_COUNTERS = {
    "num_steps": "Steps of the model.",
    "step_seconds": "Seconds spent in steps.",
    "logical_hit_tokens": "Prompt tokens found in the cache's tree.",
    "effective_reuse_tokens": "Prompt tokens whose state was used as it stood.",
    "repaired_tokens": "Tokens replayed to make trailing or partial state exact.",
    "loaded_tokens": "Tokens whose state was copied back from a slower tier.",
    "lossy_tokens": "Tokens used whose state rests on lossy copies of slower tiers.",
    "recomputed_tokens": "Tokens found in the tree and yet computed again.",
}
_ENGINE_LABELLED = {
    "limiting_group": ("group", "Requests whose reuse ended where this group's state did."),
    "levels": ("level", "Requests by the level of recovery they needed."),
}


class Metrics:
    """One server's metrics. Implements the broker's `Observer`."""

    def __init__(self, model_name: str, *, with_sglang_names: bool) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name}
        self._prefixes = (_OURS, _SGLANG) if with_sglang_names else (_OURS,)
        self.engine_stats: Callable[[], dict[str, Any]] = dict  # set by whoever has them
        self._requests = self._counter("requests_total", "Requests accepted.")
        self._prompt_tokens = self._counter("prompt_tokens_total", "Prompt tokens of requests.")
        self._cached_tokens = self._counter("cached_tokens_total", "Prompt tokens not computed.")
        self._generated = self._counter("generation_tokens_total", "Tokens generated.")
        self._ttft = self._histogram("time_to_first_token_seconds", "Time to the first token.")
        self._e2e = self._histogram("e2e_request_latency_seconds", "Time to the last token.")
        self._finished = Counter(
            f"{_OURS}finished_requests_total", "Requests ended, by reason.",
            ["model_name", "reason"], registry=self._registry,
        )  # fmt: skip
        self._http = Counter(
            f"{_OURS}http_responses_total", "Answers of the HTTP server, by route and status.",
            ["route", "status"], registry=self._registry,
        )  # fmt: skip
        self._errors = Counter(
            f"{_OURS}errors_total", "Errors answered, by code.", ["code"], registry=self._registry
        )
        self._deaths = Counter(
            f"{_OURS}process_deaths_total", "Child processes that died.", ["process"],
            registry=self._registry,
        )  # fmt: skip
        self._serving = Gauge(
            f"{_OURS}serving", "1 while requests are taken.", registry=self._registry
        )
        self._registry.register(self)

    def _counter(self, name: str, text: str) -> list[Counter]:
        return [
            Counter(prefix + name, text, list(self._labels), registry=self._registry)
            for prefix in self._prefixes
        ]

    def _histogram(self, name: str, text: str) -> list[Histogram]:
        return [
            Histogram(
                prefix + name, text, list(self._labels), registry=self._registry, buckets=_BUCKETS
            )
            for prefix in self._prefixes
        ]

    def _add(self, counters: list[Counter], amount: float) -> None:
        for counter in counters:
            counter.labels(**self._labels).inc(amount)

    def _observe(self, histograms: list[Histogram], value: float) -> None:
        for histogram in histograms:
            histogram.labels(**self._labels).observe(value)

    # ------------------------------------------------------------- Observer

    def opened(self) -> None:
        """See `Observer`."""
        self._add(self._requests, 1)

    def first_token(self, wait_s: float) -> None:
        """See `Observer`."""
        self._observe(self._ttft, wait_s)

    def ended(self, delta: TextDelta, duration_s: float) -> None:
        """See `Observer`."""
        assert delta.finish is not None
        self._add(self._prompt_tokens, delta.usage.prompt_tokens)
        self._add(self._generated, delta.usage.completion_tokens)
        self._add(self._cached_tokens, delta.usage.cached_tokens)
        self._observe(self._e2e, duration_s)
        reason = delta.finish.code or delta.finish.kind
        self._finished.labels(reason=reason, **self._labels).inc()

    # ------------------------------------------------------------- the rest of the server

    def answered(self, route: str, status: int) -> None:
        """Count an HTTP answer."""
        self._http.labels(route, str(status)).inc()

    def failed(self, code: str) -> None:
        """Count an error that was answered."""
        self._errors.labels(code).inc()

    def process_died(self, process: str) -> None:
        """Count a death."""
        self._deaths.labels(process).inc()

    def state_changed(self, is_serving: bool) -> None:
        """Show whether requests are taken."""
        self._serving.set(1 if is_serving else 0)

    def render(self) -> bytes:
        """All metrics in the text format."""
        return prometheus_client.generate_latest(self._registry)

    # ------------------------------------------------------------- the engine's numbers

    def collect(self) -> Iterator[Metric]:
        """Turn the engine's last words into metrics (called by the registry)."""
        stats = self.engine_stats()
        if not stats:
            return
        counters = stats.get("counters", {})
        yield from self._gauges(stats, counters)
        for name, text in _ENGINE_COUNTERS.items():
            if name in counters:
                yield self._family(CounterMetricFamily, _OURS + name, text, counters[name])
        for name, (label, text) in _ENGINE_LABELLED.items():
            family = CounterMetricFamily(_OURS + name, text, labels=["model_name", label])
            for key, value in counters.get(name, {}).items():
                family.add_metric([*self._labels.values(), key], value)
            yield family
        if "inter_token" in counters:
            for prefix in self._prefixes:
                yield self._engine_histogram(
                    f"{prefix}inter_token_latency_seconds",
                    "Time between two tokens of a request.",
                    [([], counters["inter_token"])],
                )
        if "queue" in counters:
            name, text = f"{_OURS}queue_seconds", "Time from arrival to admission."
            yield self._engine_histogram(name, text, [([], counters["queue"])])
        for name, data in stats.get("labelled", {}).items():
            yield self._labelled(_OURS + name, data)
        for name, data in stats.get("histograms", {}).items():
            yield self._engine_histogram(_OURS + name, data["help"], data["values"], data["labels"])
        yield self._blocks(stats.get("pools", {}))
        yield from self._tiers(stats.get("tiers", []))

    def _labelled(self, name: str, data: dict[str, Any]) -> Metric:
        family = CounterMetricFamily(name, data["help"], labels=["model_name", *data["labels"]])
        for key, value in data["values"]:
            family.add_metric([*self._labels.values(), *key], value)
        return family

    def _family(self, kind: Any, name: str, text: str, value: float) -> Metric:
        family = kind(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        metric: Metric = family
        return metric

    def _gauges(self, stats: dict[str, Any], counters: dict[str, Any]) -> Iterator[Metric]:
        asked = counters.get("prompt_tokens", 0)
        reused = counters.get("effective_reuse_tokens", 0)
        gauges = {
            "num_running_reqs": ("Requests that run.", stats.get("num_running", 0)),
            "num_queue_reqs": ("Requests that wait.", stats.get("num_waiting", 0)),
            "token_usage": ("Share of the fullest pool in use.", usage_of(stats.get("pools", {}))),
            "cache_hit_rate": ("Share of prompt tokens reused.", reused / asked if asked else 0.0),
        }
        if "state_inconsistency_rate" in stats:
            text = "Hits at which validation found damaged or stale state, of all hits."
            rate = stats["state_inconsistency_rate"]
            yield self._family(GaugeMetricFamily, _OURS + "state_inconsistency_rate", text, rate)
        for name, (text, value) in gauges.items():
            for prefix in self._prefixes:
                yield self._family(GaugeMetricFamily, prefix + name, text, value)

    def _blocks(self, pools: dict[str, dict[str, int]]) -> Metric:
        family = GaugeMetricFamily(
            f"{_OURS}blocks", "Blocks by state group, tier and state.",
            labels=["model_name", "group", "tier", "state"],
        )  # fmt: skip
        for group, states in pools.items():
            for state in BLOCK_STATES:
                if state in states:
                    key = [*self._labels.values(), group, "device", state]
                    family.add_metric(key, states[state])
        return family

    def _tiers(self, tiers: Sequence[dict[str, Any]]) -> Iterator[Metric]:
        """What slower tiers hold, and what happened to their pages."""
        if not tiers:
            return
        labels = list(self._labels)
        used = GaugeMetricFamily(
            f"{_OURS}tier_bytes", "Bytes in slower tiers.", labels=[*labels, "tier"]
        )
        online = GaugeMetricFamily(
            f"{_OURS}tier_online", "1 while a tier reads and writes.", labels=[*labels, "tier"]
        )
        pages = GaugeMetricFamily(
            f"{_OURS}tier_pages", "Pages in slower tiers.", labels=[*labels, "tier", "group"]
        )
        events = CounterMetricFamily(
            f"{_OURS}tier_events", "What happened in slower tiers: pages, bytes, errors.",
            labels=[*labels, "tier", "event"],
        )  # fmt: skip
        for tier in tiers:
            key = [*self._labels.values(), tier["tier"]]
            used.add_metric(key, tier["used_bytes"])
            online.add_metric(key, float(tier["state"] == "online"))
            for group, count in tier["pages_by_group"].items():
                pages.add_metric([*key, group], count)
            for event, count in tier["counters"].items():
                events.add_metric([*key, event], count)
        yield from (used, online, pages, events)

    def _engine_histogram(
        self,
        name: str,
        text: str,
        values: Sequence[tuple[Sequence[str], dict[str, Any]]],
        labels: Sequence[str] = (),
    ) -> Metric:
        family = HistogramMetricFamily(name, text, labels=[*self._labels, *labels])
        for key, data in values:
            total = 0
            buckets = []
            for bound, count in zip([*data["bounds"], float("inf")], data["counts"], strict=True):
                total += count
                buckets.append(("+Inf" if bound == float("inf") else str(bound), total))
            family.add_metric([*self._labels.values(), *key], buckets, data["sum"])
        return family


def usage_of(pools: dict[str, dict[str, int]]) -> float:
    """Return the share of blocks in use by running requests, of the pool with the most."""
    return max((p["running"] / p["total"] for p in pools.values() if p.get("total")), default=0.0)
