"""Limits and habits of one scheduler.

This module holds values only.
"""

from __future__ import annotations

from dataclasses import dataclass

from statewise.radix import CheckpointPolicy


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one scheduler."""

    token_budget: int  # tokens of one step
    max_running: int
    max_wait_s: float
    policy: str
    deterministic: bool
    eos_ids: frozenset[int]
    num_layers: int
    checkpoints: CheckpointPolicy
