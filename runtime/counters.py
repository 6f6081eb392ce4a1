"""Counters with labels and histograms, as plain numbers: no library, no lock, no clock.

Whoever counts owns one of these; whoever exports (runtime/server/metrics.py) gets `as_dict`, which
carries help text and label names with the values, so that a new counter needs no second place.

This module does not know what is counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Seconds; the usual bounds of serving dashboards.
LATENCY_BOUNDS = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0,
    10.0, 20.0, 40.0, 60.0, 80.0, 100.0,
)  # fmt: skip


@dataclass
class Histogram:
    """Bucket counts (not cumulative) over fixed upper bounds, with sum and count."""

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


class Labelled:
    """A counter for each combination of label values."""

    def __init__(self, text: str, *labels: str) -> None:
        self.text = text
        self.labels = labels
        self.values: dict[tuple[str, ...], float] = {}

    def add(self, *key: str, amount: float = 1) -> None:
        """Count `amount` under label values `key`, in the order of the labels."""
        assert len(key) == len(self.labels), f"{self.labels} got {key}"
        self.values[key] = self.values.get(key, 0) + amount

    def of(self, **wanted: str) -> float:
        """Sum over all combinations that have the label values named."""
        index = {name: self.labels.index(name) for name in wanted}
        return sum(
            value
            for key, value in self.values.items()
            if all(key[index[name]] == word for name, word in wanted.items())
        )

    def as_dict(self) -> dict[str, Any]:
        """JSON form: help, label names, [label values, number] pairs."""
        pairs = [[list(key), value] for key, value in self.values.items()]
        return {"help": self.text, "labels": list(self.labels), "values": pairs}


class LabelledHistogram:
    """A histogram for each combination of label values."""

    def __init__(self, text: str, *labels: str) -> None:
        self.text = text
        self.labels = labels
        self.values: dict[tuple[str, ...], Histogram] = {}

    def add(self, *key: str, value: float) -> None:
        """Count one observation under label values `key`."""
        assert len(key) == len(self.labels), f"{self.labels} got {key}"
        self.values.setdefault(key, Histogram()).add(value)

    def as_dict(self) -> dict[str, Any]:
        """JSON form: help, label names, [label values, histogram] pairs."""
        pairs = [[list(key), h.as_dict()] for key, h in self.values.items()]
        return {"help": self.text, "labels": list(self.labels), "values": pairs}


def labelled_of(owner: object) -> dict[str, Any]:
    """JSON form of every labelled counter that `owner` holds, by attribute name."""
    return {n: v.as_dict() for n, v in vars(owner).items() if isinstance(v, Labelled)}


def histograms_of(owner: object) -> dict[str, Any]:
    """JSON form of every labelled histogram that `owner` holds, by attribute name."""
    return {n: v.as_dict() for n, v in vars(owner).items() if isinstance(v, LabelledHistogram)}
