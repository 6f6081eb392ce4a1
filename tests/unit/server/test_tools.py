"""Tool calls: what is told to the template, what is forced, what text means."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from statewise.runtime.errors import InvalidRequestError
from statewise.runtime.server.http.tools import (
    Function,
    StreamedText,
    Tool,
    parse_calls,
    plan_tools,
)

ADD = Tool(Function("add", parameters={"type": "object", "properties": {"a": {"type": "integer"}}}))
SUB = Tool(Function("sub"))
TEMPLATE = "{{ tools }}"


def call(name: str = "add", key: str = "arguments") -> str:
    return json.dumps({"name": name, key: {"a": 1}})


def tagged(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


def names_of(calls: list[dict[str, Any]]) -> list[str]:
    return [c["function"]["name"] for c in calls]


@pytest.mark.parametrize(
    ("text", "shown", "names"),
    [
        ("plain", "plain", []),
        ("", "", []),
        (tagged(call()), "", ["add"]),
        (f"Let me. {tagged(call())}{tagged(call('sub'))} Done.", "Let me.  Done.", ["add", "sub"]),
        (call(key="parameters"), "", ["add"]),
        (f"  {call()}\n", "", ["add"]),
        ("<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>", []),
        ('{"name": "add"}', '{"name": "add"}', []),
        ('{"a": 1}', '{"a": 1}', []),
        ("{broken", "{broken", []),
        ("<tool_call>" + call(), "", ["add"]),
        ("a <tool_call>", "a <tool_call>", []),
        ("<tool_call>" + "[" * 5000, "<tool_call>" + "[" * 5000, []),
    ],
)
def test_calls_are_told_from_text(text: str, shown: str, names: list[str]) -> None:
    seen, calls = parse_calls(text)
    assert (seen, names_of(calls)) == (shown, names)
    assert all(json.loads(c["function"]["arguments"]) == {"a": 1} for c in calls)


@given(
    st.sampled_from(
        ["plain text", f"hi {tagged(call())}", tagged(call()) + tagged(call("sub")), call(),
         "a < b <tool_x", "<tool_call>no</tool_call>", "  {} ", "<<tool_call>" + call()]
    ),
    st.lists(st.integers(1, 7), min_size=80, max_size=80),
)  # fmt: skip
def test_a_stream_shows_the_same_however_it_is_cut(text: str, sizes: list[int]) -> None:
    stream = StreamedText()
    out, at = "", 0
    for size in sizes:
        out += stream.push(text[at : at + size])
        at += size
    out += stream.push(text[at:])
    rest, calls = stream.finish()
    shown, whole_calls = parse_calls(text)
    assert (out + rest).strip() == shown.strip()
    assert names_of(calls) == names_of(whole_calls)


def test_text_that_cannot_be_a_call_is_not_held_back() -> None:
    stream = StreamedText()
    assert stream.push("hello <") == "hello "
    assert stream.push("b> <tool") == "<b> "
    assert stream.push("box") == "<toolbox"


def test_plans() -> None:
    assert plan_tools(None, "auto", None).shown == ()
    assert plan_tools([ADD], "none", None).parses is False
    auto = plan_tools([ADD], None, TEMPLATE)
    assert auto.parses
    assert auto.schema is None
    assert auto.shown[0]["function"]["name"] == "add"
    named = plan_tools([ADD, SUB], {"type": "function", "function": {"name": "add"}}, TEMPLATE)
    assert named.schema is not None
    assert json.loads(named.schema)["properties"]["name"] == {"const": "add"}
    required = plan_tools([ADD, SUB], "required", TEMPLATE)
    assert required.schema is not None
    assert len(json.loads(required.schema)["anyOf"]) == 2


@pytest.mark.parametrize(
    ("choice", "template", "message"),
    [
        ("auto", None, "takes no tools"),
        ("auto", "{{ messages }}", "takes no tools"),
        ("always", TEMPLATE, "tool_choice"),
        ({"function": {"name": "mul"}}, TEMPLATE, "'mul'"),
        ({}, TEMPLATE, "tool_choice"),
    ],
)
def test_plans_that_cannot_be(choice: Any, template: str | None, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        plan_tools([ADD], choice, template)
