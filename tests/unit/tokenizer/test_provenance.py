"""Every character of a text keeps its origin through the operations templates use."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from statewise.runtime.tokenizer.provenance import TemplateText, join_texts, trust_of

T = TemplateText.trusted


def shown(text: str) -> str:
    """Trusted characters as they are, others in upper case (texts here are lower case)."""
    trust = trust_of(text)
    return "".join(c if t else c.upper() for c, t in zip(str.__str__(text), trust, strict=True))


MIXED = T("ab ") + "cd " + T("ef")


def test_plain_strings_are_a_clients() -> None:
    assert shown("abc") == "ABC"
    assert shown(TemplateText("abc")) == "ABC"
    assert shown(T("abc")) == "abc"
    assert type(MIXED.plain) is str
    assert MIXED == "ab cd ef"
    assert hash(MIXED) == hash("ab cd ef")


OPERATIONS: list[tuple[Callable[[TemplateText], str], str]] = [
    (lambda t: t + "x", "ab CD efX"),
    (lambda t: "x" + t, "Xab CD ef"),
    (lambda t: t * 2, "ab CD efab CD ef"),
    (lambda t: 2 * t, "ab CD efab CD ef"),
    (lambda t: t[1:4], "b C"),
    (lambda t: t[::-1], "fe DC ba"),
    (lambda t: t[3], "C"),
    (lambda t: t[-1], "f"),
    (lambda t: t[-8], "a"),
    (lambda t: str(t), "ab CD ef"),
    (lambda t: t.strip("af"), "b CD e"),
    (lambda t: t.lstrip("ab "), "CD ef"),
    (lambda t: t.rstrip("fe"), "ab CD "),
    (lambda t: t.removeprefix("ab "), "CD ef"),
    (lambda t: t.removesuffix(" ef"), "ab CD"),
    (lambda t: t.removeprefix("zz"), "ab CD ef"),
    (lambda t: t.replace("cd", T("x")), "ab x ef"),
    (lambda t: t.replace("b", "x"), "aX CD ef"),
    (lambda t: t.replace(" ", "", 1), "abCD ef"),
    (lambda t: T("-").join([t, "x"]), "ab CD ef-X"),
    (lambda t: t.lower(), "ab CD ef"),
    (lambda t: join_texts([t, "y"]), "ab CD efY"),
]


@pytest.mark.parametrize(("operation", "expected"), OPERATIONS)
def test_operation_keeps_origins(operation: Callable[[TemplateText], str], expected: str) -> None:
    assert shown(operation(MIXED)) == expected


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (lambda t: t.split(), ["ab", "CD", "ef"]),
        (lambda t: t.split(" "), ["ab", "CD", "ef"]),
        (lambda t: t.split(" ", 1), ["ab", "CD ef"]),
        (lambda t: t.rsplit(" ", 1), ["ab CD", "ef"]),
        (lambda t: t.rsplit(None, 1), ["ab CD", "ef"]),
        (lambda t: t.split("cd"), ["ab ", " ef"]),
        (lambda t: list(t.partition("cd")), ["ab ", "CD", " ef"]),
        (lambda t: list(t.rpartition(" ")), ["ab CD", " ", "ef"]),
        (lambda t: list(t.rpartition("z")), ["", "", "ab CD ef"]),
        (lambda t: list(t.partition("z")), ["ab CD ef", "", ""]),
    ],
)
def test_cutting_keeps_origins(
    operation: Callable[[TemplateText], list[str]], expected: list[str]
) -> None:
    assert [shown(part) for part in operation(MIXED)] == expected


def test_splitlines_keeps_origins() -> None:
    text = T("a\n") + "b\r\nc" + T("\n\nd")
    assert [shown(x) for x in text.splitlines()] == ["a", "B", "C", "", "d"]
    assert [shown(x) for x in text.splitlines(True)] == ["a\n", "B\r\n", "C\n", "\n", "d"]


def test_case_changes_that_change_the_length_lose_trust() -> None:
    assert trust_of(T("straße").upper()) == bytes(7)
    assert trust_of(T("abc").upper()) == b"\x01\x01\x01"


def test_operations_not_covered_give_a_clients_text() -> None:
    assert set(trust_of(T("a{}").format("b"))) == {0}
    assert set(trust_of(T("a%s") % "b")) == {0}
    assert set(trust_of(T("a").center(5))) == {0}
