"""Control tokens are found exactly, longest first, and only where they may be."""

from __future__ import annotations

import re

import pytest

from statewise.runtime.tokenizer.specials import SpecialToken, SpecialTokens, prefix_pattern

TOKENS = ["<a>", "<ab>", "<a>b", "[X]", "<a", "|", "<unused1>", "<unused12>"]


def specials(*tokens: SpecialToken) -> SpecialTokens:
    return SpecialTokens(tokens or [SpecialToken(i, t) for i, t in enumerate(TOKENS)])


def cut(text: str, trust: str = "") -> list[str | int]:
    mask = bytes(c == "^" for c in trust) if trust else None
    return [p.text if p.token_id < 0 else p.token_id for p in specials().cut(text, mask)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("plain", ["plain"]),
        ("<a>", [0]),
        ("<a>b", [2]),
        ("<a>c", [0, "c"]),
        ("x<ab>y", ["x", 1, "y"]),
        ("<ax", [4, "x"]),
        ("<<a>>", ["<", 0, ">"]),
        ("||", [5, 5]),
        ("<unused1><unused12><unused123>", [6, 7, "<unused123>"]),
        ("[X][x]", [3, "[x]"]),
    ],
)
def test_cut(text: str, expected: list[str | int]) -> None:
    assert cut(text) == expected


@pytest.mark.parametrize(
    ("text", "trust", "expected"),
    [
        ("<a> <a>", "^^^....", [0, " <a>"]),
        ("<a> <a>", "....^^^", ["<a> ", 0]),
        ("<a>b", "^^^.", [0, "b"]),  # a shorter token lies within the trusted part
        ("<a>b", ".^^^", ["<a>b"]),
        ("<ab>", "^^.^", [4, "b>"]),
        ("<<a>", ".^^^", ["<", 0]),
        ("|||", "^.^", [5, "|", 5]),
    ],
)
def test_cut_by_trust(text: str, trust: str, expected: list[str | int]) -> None:
    assert cut(text, trust) == expected


def test_whitespace_that_tokens_swallow() -> None:
    tokens = specials(SpecialToken(0, "<l>", lstrip=True), SpecialToken(1, "<r>", rstrip=True))
    pieces = [(p.start, p.text or p.token_id) for p in tokens.cut("a \n<l> b<r>  <r> c ")]
    assert pieces == [(0, "a"), (3, 0), (6, " b"), (8, 1), (13, 1), (17, "c ")]


def test_pattern_is_exactly_the_words() -> None:
    words = {"a", "ab", "abc", "abd", "b.c", "", "xyz"} - {""}
    pattern = re.compile(prefix_pattern(words))
    for text in [*words, "abcd", "x", "xy", "bxc", "c", "aba"]:
        assert (pattern.fullmatch(text) is not None) == (text in words), text


def test_many_reserved_tokens_cost_no_more_than_one() -> None:
    tokens = SpecialTokens([SpecialToken(i, f"<unused{i}>") for i in range(7000)])
    text = "<unused6999>" + "<" * 200_000 + "<unused0>"
    pieces = list(tokens.cut(text))
    assert [p.token_id for p in pieces] == [6999, -1, 0]
    assert tokens.ids == frozenset(range(7000))


def test_no_special_tokens() -> None:
    assert [p.text for p in SpecialTokens([]).cut("<a>")] == ["<a>"]
