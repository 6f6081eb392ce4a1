"""A run of positions to compute: what both the plan and the scheduler speak of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """Positions [start, end) to compute, writing groups of the bit mask `write_groups`.

    `num_layers` deep. A replay span computes tokens whose history is cached already.
    """

    start: int
    end: int
    write_groups: int
    num_layers: int
    is_replay: bool = False
