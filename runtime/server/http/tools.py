"""Tool calls of the chat API: what the model is told, what it is held to, what its text means.

`auto` leaves the model free: calls are read from its text, in the two forms that the chat
templates of open models teach,

    <tool_call>{"name": ..., "arguments": {...}}</tool_call>      any number of them, text between
    {"name": ..., "parameters": {...}}                            the whole answer, and nothing else

`required` or a named tool holds the model to the second form by a grammar. In a stream, text that
may still turn out to be a call is held back; calls go out whole, at the end.

This module runs no tool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from statewise.runtime.clock import fresh_id
from statewise.runtime.errors import InvalidRequestError

OPEN_TAG = "<tool_call>"
CLOSE_TAG = "</tool_call>"
MAX_TOOLS = 128


class Function(msgspec.Struct):
    """A tool's function."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(msgspec.Struct):
    """A tool that the model may call."""

    function: Function
    type: str = "function"


@dataclass(frozen=True)
class ToolPlan:
    """What a request's tools mean: shown to the template, read from the text, forced."""

    shown: tuple[dict[str, Any], ...] = ()
    parses: bool = False
    schema: str | None = None  # a JSON schema the answer is held to


def plan_tools(
    tools: Sequence[Tool] | None, choice: str | dict[str, Any] | None, template: str | None
) -> ToolPlan:
    """Decide what a request's tools mean.

    Raises InvalidRequestError where the choice is unknown or the template takes no tools.
    """
    if not tools or choice == "none":
        return ToolPlan()
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(f"'tools' holds {len(tools)} tools; at most {MAX_TOOLS}")
    if template is None or "tools" not in template:
        raise InvalidRequestError("'tools': the served model's chat template takes no tools")
    shown = tuple(msgspec.to_builtins(tool) for tool in tools)
    if choice in (None, "auto"):
        return ToolPlan(shown, parses=True)
    return ToolPlan(shown, parses=True, schema=_call_schema(_chosen(tools, choice)))


def _chosen(tools: Sequence[Tool], choice: str | dict[str, Any] | None) -> list[Tool]:
    if choice == "required":
        return list(tools)
    function = choice.get("function") if isinstance(choice, dict) else None
    if not isinstance(function, dict):
        raise InvalidRequestError(
            "'tool_choice' must be none, auto, required or {type: function, function: {name}}"
        )
    chosen = [tool for tool in tools if tool.function.name == function.get("name")]
    if not chosen:
        raise InvalidRequestError(f"'tool_choice' names {function.get('name')!r}, no such tool")
    return chosen


def _call_schema(tools: Sequence[Tool]) -> str:
    """Return the schema of one call of one of `tools`."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "arguments": tool.function.parameters or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return msgspec.json.encode(calls[0] if len(calls) == 1 else {"anyOf": calls}).decode()


def parse_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Split an answer into its text and the calls in it; text that is no call stays text."""
    whole = _call_of(text.strip())
    if whole is not None:
        return "", [whole]
    kept: list[str] = []
    calls: list[dict[str, Any]] = []
    rest = text
    while OPEN_TAG in rest:
        before, _, after = rest.partition(OPEN_TAG)
        body, close, following = after.partition(CLOSE_TAG)
        call = _call_of(body.strip())
        kept.append(before)
        if call is None:
            kept.append(OPEN_TAG + body + close)
        else:
            calls.append(call)
        rest = following
    kept.append(rest)
    shown = "".join(kept)
    return (shown.strip() if calls else shown), calls


def _call_of(text: str) -> dict[str, Any] | None:
    """Return one call in the API's shape, or None where `text` is not a call's JSON."""
    if not text.startswith("{"):
        return None
    try:
        data = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    name = data.get("name")
    arguments = data.get("arguments", data.get("parameters"))
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    encoded = msgspec.json.encode(arguments).decode()
    return {
        "id": fresh_id("call_"),
        "type": "function",
        "function": {"name": name, "arguments": encoded},
    }


class StreamedText:
    """Lets a stream's text through as long as it cannot be the beginning of a call."""

    def __init__(self) -> None:
        self._held = ""
        self._is_holding = False  # a call may have begun: nothing more goes out before the end
        self._is_empty = True

    def push(self, text: str) -> str:
        """Take new text; returns what may go out now."""
        self._held += text
        if self._is_holding:
            return ""
        if self._is_empty and self._held.lstrip().startswith("{"):
            self._is_holding = True
            return ""
        at = self._held.find(OPEN_TAG)
        if at >= 0:
            self._is_holding = True
        else:
            at = len(self._held) - _overlap(self._held, OPEN_TAG)
        out, self._held = self._held[:at], self._held[at:]
        self._is_empty = self._is_empty and not out.strip()
        return out

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """At the end: the held text that is no call, and the calls."""
        return parse_calls(self._held)


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that is a beginning of `tag`."""
    for size in range(min(len(text), len(tag) - 1), 0, -1):
        if tag.startswith(text[-size:]):
            return size
    return 0
