"""Structured events: one JSON object for each thing that happened to cached state or a request.

    {"at": 1764463210.120391, "event": "transition", "group": "window", "from": "windowed", ...}

They go to the logger `statewise.events`, which is silent until somebody attaches a handler
(`--log-events FILE` does) or asks it for INFO. `docs/observability.md` lists the events.

This module does not decide what is an event, and reads no clock: the handler stamps the time.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec

from statewise.radix.forms import Transition
from statewise.radix.validation import Verdict

EVENTS = logging.getLogger("statewise.events")
EVENTS.addHandler(logging.NullHandler())
EVENTS.propagate = False
MAX_PAGES = 64  # of one verdict that an event names

_encoder = msgspec.json.Encoder()


class EventLog:
    """Writes events; the sink of the tree's transitions. Costs a look at a level while silent."""

    def __init__(self, logger: logging.Logger = EVENTS) -> None:
        self._logger = logger

    @property
    def is_on(self) -> bool:
        """Whether anybody listens."""
        return self._logger.level != logging.NOTSET and self._logger.isEnabledFor(logging.INFO)

    def emit(self, event: str, **fields: Any) -> None:
        """Write one event; fields are JSON-able."""
        if self.is_on:
            self._logger.info("%s", _encoder.encode({"event": event, **fields}).decode())

    def on_transition(self, event: Transition) -> None:
        """See `EventSink`."""
        self.emit(
            "transition",
            group=event.group,
            before=event.before.value,
            after=event.after.value,
            cause=event.cause.value,
            num_pages=event.num_pages,
        )

    def failed(self, group: str, verdict: Verdict, source: str) -> None:
        """Something failed validation."""
        self.emit(
            "validation_failed",
            layer=verdict.layer.name.lower(),
            condition=verdict.condition.value,
            group=group,
            pages=list(verdict.pages[:MAX_PAGES]),
            num_pages=len(verdict.pages),
            position=verdict.position,
            layers=verdict.layers,
            detail=verdict.detail,
            source=source,
        )


class JsonLines(logging.Formatter):
    """Puts the time, in seconds since the epoch, in front of an event's fields."""

    def format(self, record: logging.LogRecord) -> str:
        """One line of JSON."""
        return f'{{"at":{record.created:.6f},{record.getMessage()[1:]}'


def log_to_file(path: str) -> logging.Handler:
    """Append events to `path` from now on; raises OSError where it cannot be written."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(JsonLines())
    EVENTS.addHandler(handler)
    EVENTS.setLevel(logging.INFO)
    return handler
