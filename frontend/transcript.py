"""The text and the conversation a state has built so far.

Text is what a language model continues; turns are what a chat interface sees. Both grow together
here, so that either kind of backend can be asked. The chat template is fetched when the first turn
opens: programs of plain text never ask for it.

What stands after a closed turn is provisional: the text a template writes between two turns can
differ from what it writes at the end, so the next turn's opening replaces it as long as nothing
else was appended. Not thread-safe: its executor runs one expression at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from statewise.frontend.chat_template import ChatTemplate, Turn
from statewise.frontend.errors import TemplateError


class Transcript:
    """Text, turns, and the open role of one state."""

    def __init__(self, template: Callable[[], ChatTemplate]) -> None:
        self._template = template
        self.text = ""
        self.role: str | None = None
        self.fork_start = 0  # length of the text when the state was forked off
        self._turns: list[Turn] = []
        self._role_start = 0  # where the open turn's content begins
        self._closing_start = -1  # where the last closed turn's content ended; -1: text followed
        self._folded: str | None = None  # content of an open turn that the template writes later

    def copy(self) -> Transcript:
        """Return an independent transcript that goes on from here."""
        other = Transcript(self._template)
        other.__dict__.update(self.__dict__)
        other._turns = list(self._turns)
        other.fork_start = len(self.text)
        return other

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Closed turns as chat messages."""
        return [{"role": turn.role, "content": turn.content} for turn in self._turns]

    @property
    def partial(self) -> str:
        """Content of the open turn so far."""
        if self._folded is not None:
            return self._folded
        return self.text[self._role_start :] if self.role else ""

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end an assistant turn, where the template has any."""
        return self._template().stops if self.role else ()

    def fill(self, value: str) -> str:
        """Append text; returns what the text grew by."""
        if self._folded is not None:
            self._folded += value
            return ""
        self.text += value
        if value:
            self._closing_start = -1
        return value

    def check_can_generate(self) -> None:
        """Raise `TemplateError` inside a turn whose text does not exist yet."""
        if self._folded is not None:
            raise TemplateError(
                "this model's chat template writes the system text into the next user turn; "
                "nothing can be generated inside the system turn"
            )

    def begin_role(self, role: str) -> str:
        """Open a turn; returns what the text grew by."""
        opening = self._template().opening(self._turns, role)
        self.role = role
        if opening is None:
            self._folded = ""
            return ""
        written = self.text[self._closing_start :] if self._closing_start >= 0 else ""
        if self._closing_start >= 0:
            self.text = self.text[: self._closing_start] + opening
            grown = opening.removeprefix(written)
        else:
            closing = self._template().closing(self._turns)
            grown = opening.removeprefix(closing)
            self.text += grown
        self._role_start = len(self.text)
        self._closing_start = -1
        return grown

    def end_role(self) -> str:
        """Close the open turn; returns what the text grew by."""
        assert self.role is not None, "roles are balanced at submission"
        written = self._folded is None
        content = self.partial.lstrip() if written else self.partial.strip()
        self._turns.append(Turn(self.role, content, written))
        self.role, self._folded = None, None
        if not written:
            return ""
        closing = self._template().closing(self._turns)
        self._closing_start = len(self.text)
        self.text += closing
        return closing

    def replace_tail(self, start: int, value: str) -> None:
        """Put `value` in place of everything from `start` on."""
        self.text = self.text[:start] + value
