"""Reading a state's text, or one variable, while it is being written.

A reader remembers how far it has read; `poll` returns what is new, None when nothing is. Any number
of readers can follow one state. `poll` is called with the run's condition held.
"""

from __future__ import annotations

from typing import Any

from statewise.frontend.executor import Executor

Batch = list[tuple[str, Any]]  # (text, meta_info)


class PieceReader:
    """Follows the whole text."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._position = 0
        self.finished = False

    def poll(self) -> Batch | None:
        """Return new pieces; an empty batch at the end. Raises `ProgramError` on failure."""
        executor = self._executor
        settled = executor.poll_settled()
        if not executor.session.stream and not settled:
            return None
        new = executor.pieces[self._position :]
        self._position += len(new)
        if not new and settled:
            executor.raise_failure()
        self.finished = bool(settled) and not executor.failure()
        if new and not executor.session.stream:
            new = [executor.transcript.text]
        return [(piece, None) for piece in new] if new or self.finished else None


class VariableReader:
    """Follows one variable; a variable generated again goes on with its next text."""

    def __init__(self, executor: Executor, name: str) -> None:
        self._executor = executor
        self._name = name
        self._round = 0
        self._length = 0
        self.finished = False

    def poll(self) -> Batch | None:
        """Return new text of the variable; an empty batch at the end.

        Raises KeyError where nothing will assign it, `ProgramError` on failure.
        """
        slot = self._executor.variables.slots.get(self._name)
        if slot is None or not slot.round:
            return self._poll_value()
        if slot.round != self._round:
            self._round, self._length = slot.round, 0
        new = slot.partial[self._length :]
        self._length += len(new)
        self.finished = slot.is_ready
        if not new and not self.finished:
            self._executor.raise_failure()
            return None
        return [(new, slot.meta_info)] if new else []

    def _poll_value(self) -> Batch | None:
        """Return a variable that is not streamed, whole."""
        found = self._executor.poll_variable(self._name)
        if found is None:
            return None
        self.finished = True
        return [found]
