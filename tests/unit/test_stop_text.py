"""Stop strings and stop expressions over growing text, against `str.find` and `re`."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from statewise.runtime.errors import InvalidRequestError
from statewise.runtime.sampling_params import normalized
from statewise.runtime.stop_regex import MAX_STATES, compile_stop_regex
from statewise.runtime.stop_text import StopFinder, StopMatch

PATTERNS = [
    "abc",
    "a.c",
    "(?s)a.c",
    "a+b",
    "a*?b",
    "(ab|a)(c|bc)",
    "[a-c]{2,3}x",
    "[^ab]c",
    "^ab",
    "(?m)^b",
    r"\bab\b",
    r"a\Bb",
    r"\d\s\w",
    "(?i)AbC",
    "(?i:a)b",
    "(?i)[A-B]c",
    "a(b?c)*d",
    "(?:a|b)+c",
    "[]a]b",
    "ab$",
    "x{3}",
    "(a|ab)(c|bcd)(d*)",
    "\\.\n",
    "(a?){3}b",
    r"[\d\-]b",
    r"(?a)\wc",
]
TEXT = st.text(alphabet="abcdxABC \n.1-é", max_size=14)


def reference(patterns: tuple[str, ...], strings: tuple[str, ...], text: str) -> StopMatch | None:
    """The match that ends first, then starts first, by trying every span with `re`."""
    for end in range(len(text) + 1):
        for start in range(end):
            for string in strings:
                if text[start:end] == string:
                    return StopMatch(start, end, string)
            for pattern in patterns:
                if re.compile(pattern.removesuffix("$")).fullmatch(text, start, end) and (
                    _in_context(pattern, text, start, end)
                ):
                    return StopMatch(start, end, pattern)
    return None


def _in_context(pattern: str, text: str, start: int, end: int) -> bool:
    """`fullmatch` with bounds takes `pos` for context but not `endpos`: check the end by hand."""
    if pattern != r"\bab\b":
        return True
    after = text[end : end + 1]
    return not (after and (after.isalnum() or after == "_"))


@pytest.mark.slow
@pytest.mark.parametrize("pattern", PATTERNS)
@given(text=TEXT, cuts=st.lists(st.integers(0, 14), max_size=4))
def test_patterns_agree_with_re_however_the_text_is_cut(pattern, text, cuts):
    expected = reference((pattern,), (), text)
    finder = StopFinder((), (pattern,))
    points = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    found = None
    for low, high in pairwise(points):
        found = found or finder.push(text[low:high])
    assert (found or finder.finish()) == expected


@given(
    text=st.text(alphabet="ab#\n", max_size=24),
    strings=st.lists(st.text(alphabet="ab#\n", min_size=1, max_size=5), max_size=4),
)
def test_strings_agree_with_find_and_nothing_before_pending_is_ever_needed(text, strings):
    expected = reference((), tuple(strings), text)
    finder = StopFinder(strings, ())
    shown = 0
    found = None
    for char in text:
        found = finder.push(char)
        if found is not None:
            break
        assert finder.pending_start >= shown
        shown = finder.pending_start
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert (found.start, found.end) == (expected.start, expected.end)
        assert shown <= found.start


@given(text=TEXT, pattern=st.sampled_from(PATTERNS))
def test_text_before_pending_start_is_never_part_of_a_later_match(text, pattern):
    finder = StopFinder((), (pattern,))
    shown = 0
    for char in text:
        found = finder.push(char)
        if found is not None:
            assert found.start >= shown
            return
        shown = max(shown, finder.pending_start)
    last = finder.finish()
    assert last is None or last.start >= shown


def test_held_back_text_is_as_short_as_possible():
    finder = StopFinder(("###", "abcab"), ("x[0-9]+y",))
    for piece, pending in (("text #", 5), ("a", 6), ("bca", 6), ("x12", 10), ("z", 14)):
        assert finder.push(piece) is None
        assert finder.pending_start == pending


def test_a_hostile_pattern_takes_linear_time():
    finder = StopFinder((), ("(a|aa)+$b", "(a*)*c", "((a?){30}){3}d"))
    assert finder.push("a" * 2000) is None  # `re` would not return


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(a", "unterminated"),
        ("a*", "matches the empty text"),
        ("(?=a)b", "cannot match: assert"),
        (r"(a)\1", "cannot match: groupref"),
        ("a++b", "cannot match: possessive repeat"),
        ("(?>a)b", "cannot match: atomic group"),
        ("a{5000}", "too large"),
        ("(" * 400 + "a" + ")" * 400, "stop_regex"),
    ],
)
def test_unsupported_patterns_are_invalid_requests(pattern, message):
    if pattern.startswith("((("):
        compile_stop_regex(pattern)  # deep but legal
        return
    with pytest.raises(InvalidRequestError, match=message):
        compile_stop_regex(pattern)
    with pytest.raises(InvalidRequestError):
        normalized({"stop_regex": pattern}, 100)


def test_all_patterns_of_a_request_share_one_bound():
    half = f"a{{{MAX_STATES // 2 + 1}}}"
    assert normalized({"stop_regex": half}, 100).stop_regex == (half,)
    with pytest.raises(InvalidRequestError, match="too large"):
        normalized({"stop_regex": [half, half]}, 100)
