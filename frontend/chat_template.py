r"""What a model's chat template writes around a turn, asked from the template itself.

A program appends text piece by piece, a template renders whole conversations. To get the text
between two turns, the conversation is rendered with a *mark* in place of each turn's content:

    marks       [user m0] [assistant m1] [user m2 ...
    rendered    <s>user\n m0 </s>\n<s>assistant\n m1 </s>\n<s>user\n m2 </s>\n
                 opening(0)  |--- opening(1) ------|  |-- opening(2) --|  |closing|

so default system prompts, folded system turns (the template writes the system text into the first
user turn) and special first turns come out as the template has them, for any template and without
guessing from a model's name. Marks instead of contents, because templates trim and rewrite what
they know (a stripped reasoning block, say), while a program's text only grows.

Where the template refuses a conversation (two assistant turns in a row, for some), the text a turn
of that role has in an ordinary conversation is used: a program decides its own turns.

This module does not tokenize, and it never sends anything.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from statewise.frontend.errors import TemplateError

PLAIN = "plain"
_PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m.role.upper() + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"
)
_PLAIN_STOPS = ("\nUSER:", "\nSYSTEM:")


@dataclass(frozen=True)
class Turn:
    """A turn of the conversation. `written`: its content is in the program's text already."""

    role: str
    content: str
    written: bool = True


def _mark(index: int) -> str:
    return f"statewise-turn-{index:06d}-content"


class ChatTemplate:
    """The text around turns, for one template. Thread-safe; holds no conversation.

    `strip_bos`: the server puts the begin-of-text token before a prompt itself, so a template that
    writes it too would double it. `stops` are strings that end an assistant turn.
    """

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, str] | None = None,
        *,
        strip_bos: bool = True,
        stops: Sequence[str] = (),
    ) -> None:
        self.stops = tuple(stops)
        self._special = dict(special_tokens or {})
        self._usual_cache: dict[str, tuple[str | None, str]] = {}
        self._bos = self._special.get("bos_token", "") if strip_bos else ""
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template is malformed: {error}") from error

    @classmethod
    def named(cls, name: str) -> ChatTemplate:
        """Return a built-in template: "plain", with SYSTEM:, USER: and ASSISTANT: lines."""
        if name != PLAIN:
            raise TemplateError(f"unknown chat template name {name!r}; known: {PLAIN}")
        return cls(_PLAIN_TEMPLATE, stops=_PLAIN_STOPS)

    def opening(self, turns: Sequence[Turn], role: str) -> str | None:
        """Text from the end of the last written content to where a new turn's content starts.

        None: the template writes nothing for this turn until the next one begins (a folded system
        turn). Raises `TemplateError` where the template can write no such turn at all.
        """
        marked = [*turns, Turn(role, "")]
        refused = None
        try:
            head = self._head(marked)
            if head is not None:
                return _after_written(head, turns)
            if role == "system":
                return None
        except TemplateError as error:
            refused = error
        prefix = self._usual(role)[0]
        if prefix is None or not all(turn.written for turn in turns):
            why = refused or "it renders no text for it"
            raise TemplateError(f"the model's chat template cannot write a {role} turn here: {why}")
        return self.closing(turns) + prefix

    def closing(self, turns: Sequence[Turn]) -> str:
        """Text after the last turn's content; empty for no turns or an unwritten last turn."""
        if not turns or not turns[-1].written:
            return ""
        try:
            rendered = self._render(turns)
            _, mark, after = rendered.rpartition(_mark(len(turns) - 1))
            if mark:
                return after
        except TemplateError:
            pass
        return self._usual(turns[-1].role)[1]

    def _head(self, marked: Sequence[Turn]) -> str | None:
        """Return what is written before the last turn's content; None where it is left out."""
        if marked[-1].role == "assistant" and len(marked) > 1:
            prompt = self._generation_prompt(marked[:-1])
            if prompt is not None:
                return prompt
        before, mark, _ = self._render(marked).rpartition(_mark(len(marked) - 1))
        return before if mark else None

    def _generation_prompt(self, turns: Sequence[Turn]) -> str | None:
        """Return the conversation with the words that start an answer, if the template has any."""
        try:
            with_prompt = self._render(turns, generation=True)
        except TemplateError:
            return None
        return with_prompt if with_prompt != self._render(turns) else None

    def _usual(self, role: str) -> tuple[str | None, str]:
        """(prefix, suffix) of a role in an ordinary conversation; prefix None: not renderable."""
        if role not in self._usual_cache:
            self._usual_cache[role] = self._ordinary_turn(role)
        return self._usual_cache[role]

    def _ordinary_turn(self, role: str) -> tuple[str | None, str]:
        history = [] if role == "system" else [Turn("user", ""), Turn("assistant", "")]
        if role == "assistant":
            history = history[:1]
        marked = [*history, Turn(role, "")]
        try:
            head = self._head(marked)
            _, mark, suffix = self._render(marked).rpartition(_mark(len(marked) - 1))
        except TemplateError:
            return None, ""
        if head is None or not mark:
            return None, ""
        before = self._render(history).rpartition(_mark(len(history) - 1))[2] if history else ""
        return _after_written(head, history).removeprefix(before), suffix

    def _render(self, turns: Sequence[Turn], *, generation: bool = False) -> str:
        messages = [{"role": turn.role, "content": _mark(i)} for i, turn in enumerate(turns)]
        try:
            text = self._template.render(
                messages=messages,
                add_generation_prompt=generation,
                tools=None,
                documents=None,
                **self._special,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            raise TemplateError(str(error) or type(error).__name__) from error
        return text.removeprefix(self._bos) if self._bos else text


def _after_written(head: str, turns: Sequence[Turn]) -> str:
    """Cut `head` after the last written turn's mark; fill in the unwritten turns after it."""
    last_written = max((i for i, turn in enumerate(turns) if turn.written), default=-1)
    if last_written >= 0:
        _, mark, head = head.rpartition(_mark(last_written))
        if not mark:
            raise TemplateError("the template leaves out an earlier turn")
    for i in range(last_written + 1, len(turns)):
        if _mark(i) not in head:
            raise TemplateError(f"the template leaves out the {turns[i].role} turn before it")
        head = head.replace(_mark(i), turns[i].content)
    return head


def _raise(message: str) -> str:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **layout)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks answers for training; rendering takes its body as it is."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares an instance attribute)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return the statements up to `{% endgeneration %}`."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.cache
def _environment() -> jinja2.Environment:
    """Templates come from model files: they run sandboxed and change nothing."""
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
    )
    env.filters["tojson"] = _to_json
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return env
