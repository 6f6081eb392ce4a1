"""Recoveries of admitted requests, from plan to end: counted, timed, told.

    begun       admitted with a plan; direct and recompute are over at once
    completed   the last replay has run
    abandoned   the request ended or was preempted before

This module does not plan and does not carry out.
"""

from __future__ import annotations

from typing import NamedTuple

from statewise.radix.plan import Level
from statewise.runtime.cache.lookup import Lookup
from statewise.runtime.engine.counters import EngineCounters
from statewise.runtime.events import EventLog

COMPLETED, ABANDONED = "completed", "abandoned"


class Open(NamedTuple):
    """A recovery whose replays are still to run."""

    level: str
    started: float  # monotonic seconds
    num_tokens: int


class Recoveries:
    """Recoveries of one engine."""

    def __init__(self, counters: EngineCounters, events: EventLog) -> None:
        self._counters = counters
        self._events = events
        self._open: dict[str, Open] = {}

    def begun(self, rid: str, lookup: Lookup, now: float, num_loaded: int = 0) -> None:
        """Request `rid` was admitted with the plan of `lookup`.

        `num_loaded` tokens' state had been copied back for it.
        """
        self.abandoned(rid)  # it was preempted amid an earlier one
        plan = lookup.plan
        if not lookup.is_hit:
            return
        self._tell(rid, lookup)
        if plan.replays:
            self._open[rid] = Open(plan.level.value, now, plan.replayed_tokens)
            return
        if num_loaded:
            self._counters.recovery_tokens.add(Level.LOAD.value, amount=num_loaded)
        level = Level.LOAD if num_loaded and plan.level is Level.DIRECT else plan.level
        self._counters.recoveries.add(level.value, COMPLETED)
        if plan.recomputed_tokens:
            self._counters.recovery_tokens.add(plan.level.value, amount=plan.recomputed_tokens)

    def _tell(self, rid: str, lookup: Lookup) -> None:
        if not self._events.is_on:
            return
        plan, match = lookup.plan, lookup.match
        assert match is not None, "a hit has a match"
        limiting = plan.limiting_group
        self._events.emit(
            "recovery_planned",
            rid=rid,
            level=plan.level.value,
            matched=max(match.logical_tokens, plan.position),
            position=plan.position,
            limiting_group="" if limiting is None else match.schema.groups[limiting].name,
            replays=[[r.start, r.end, r.num_layers, r.write_groups] for r in plan.replays],
            estimated_s=plan.recovery_s,
        )

    def completed(self, rid: str, now: float) -> None:
        """All replays of `rid` have run."""
        done = self._open.pop(rid, None)
        if done is None:
            return
        self._counters.recoveries.add(done.level, COMPLETED)
        self._counters.recovery_tokens.add(done.level, amount=done.num_tokens)
        self._counters.recovery_seconds.add(done.level, value=now - done.started)
        self._events.emit(
            "recovery_completed",
            rid=rid,
            level=done.level,
            num_tokens=done.num_tokens,
            seconds=now - done.started,
        )

    def abandoned(self, rid: str) -> None:
        """Request `rid` goes no further; nothing happens where no recovery is open."""
        left = self._open.pop(rid, None)
        if left is not None:
            self._counters.recoveries.add(left.level, ABANDONED)
            self._events.emit("recovery_abandoned", rid=rid, level=left.level)
