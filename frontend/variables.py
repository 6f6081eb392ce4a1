"""A state's variables: values, values still to come, and values that are being written.

    declare  pending += 1     an expression that assigns it was submitted
    begin    partial = ""     its generation started streaming
    extend   partial += ...   more text arrived
    assign   pending -= 1     the value is there
    put                       the program set it itself

A variable is ready when it has a value and no assignment is outstanding, so that a loop which
generates "x" again and again reads its own last one. No locking here: the executor holds the run's
condition around every call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_NOTHING = object()


class Slot:
    """One variable."""

    __slots__ = ("meta_info", "num_pending", "partial", "round", "value")

    def __init__(self) -> None:
        self.num_pending = 0
        self.value: Any = _NOTHING
        self.meta_info: Any = None
        self.partial = ""  # text of the round being streamed
        self.round = 0  # how many generations have started

    @property
    def has_value(self) -> bool:
        """Whether any assignment was made."""
        return self.value is not _NOTHING

    @property
    def is_ready(self) -> bool:
        """Whether the value is the last one asked for."""
        return self.has_value and self.num_pending == 0


class Variables:
    """Names to slots."""

    def __init__(self) -> None:
        self.slots: dict[str, Slot] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.slots

    def declare(self, names: Iterable[str]) -> None:
        """Expect an assignment of each name."""
        for name in names:
            self._slot(name).num_pending += 1

    def begin(self, name: str) -> None:
        """Start a value that arrives piece by piece."""
        slot = self._slot(name)
        slot.partial = ""
        slot.round += 1

    def extend(self, name: str, text: str, meta_info: Any) -> None:
        """Add what arrived of the value."""
        slot = self._slot(name)
        slot.partial += text
        slot.meta_info = meta_info

    def assign(self, name: str, value: Any, meta_info: Any = None) -> None:
        """Put a declared value in place."""
        slot = self._slot(name)
        slot.num_pending -= 1
        slot.value, slot.meta_info = value, meta_info

    def put(self, name: str, value: Any) -> None:
        """Set a value that was not declared."""
        self._slot(name).value = value

    def inherit(self, parent: Variables) -> list[str]:
        """Take over the parent's variables at a fork; returns the names still to come."""
        awaited = []
        for name, slot in parent.slots.items():
            mine = self._slot(name)
            if slot.num_pending:
                mine.num_pending = 1
                awaited.append(name)
            else:
                mine.value, mine.meta_info = slot.value, slot.meta_info
        return awaited

    def receive(self, parent: Variables, awaited: Iterable[str]) -> None:
        """Take the values that the awaited names got in the parent."""
        for name in awaited:
            source = parent.slots[name]
            mine = self._slot(name)
            mine.num_pending -= 1
            if not mine.has_value:
                mine.value, mine.meta_info = source.value, source.meta_info

    def _slot(self, name: str) -> Slot:
        return self.slots.setdefault(name, Slot())
