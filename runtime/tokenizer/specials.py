"""Control tokens in text: find them, and cut a text into plain pieces and token ids.

All tokens are found in one pass by a regular expression made of their prefix tree, so that 6,000
reserved tokens cost no more than one, and a text full of "<" no more than any other. The longest
token wins where one is a prefix of another.

This module does not encode plain text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from statewise.runtime.tokenizer.provenance import TRUSTED

RUNS = re.compile(TRUSTED + b"+")


@dataclass(frozen=True)
class SpecialToken:
    """A control token; `lstrip` / `rstrip`: it swallows whitespace on that side."""

    id: int
    text: str
    lstrip: bool = False
    rstrip: bool = False


@dataclass(frozen=True)
class Piece:
    """Plain text, or one control token."""

    start: int  # character offset of the piece in the whole text
    text: str = ""
    token_id: int = -1  # -1: plain text


class SpecialTokens:
    """The control tokens of one vocabulary."""

    def __init__(self, tokens: Iterable[SpecialToken]) -> None:
        self.by_text = {t.text: t for t in tokens if t.text}
        self.ids = frozenset(t.id for t in self.by_text.values())
        self._pattern = re.compile(prefix_pattern(self.by_text)) if self.by_text else None

    def cut(self, text: str, trust: bytes | None = None) -> Iterator[Piece]:
        """Cut a text at its control tokens.

        With `trust` (a byte per character), only those count whose every character is trusted.
        """
        at = 0
        for start, end in self._find(text, trust):
            if start < at:  # whitespace that the token before has swallowed
                continue
            token = self.by_text[text[start:end]]
            before = text[at:start].rstrip() if token.lstrip else text[at:start]
            if before:
                yield Piece(at, before)
            yield Piece(start, token_id=token.id)
            at = end
            while token.rstrip and at < len(text) and text[at].isspace():
                at += 1
        if at < len(text):
            yield Piece(at, text[at:])

    def _find(self, text: str, trust: bytes | None) -> Iterator[tuple[int, int]]:
        """Spans of the control tokens that lie within one run of trusted text."""
        if self._pattern is None:
            return
        runs = [(0, len(text))] if trust is None else [m.span() for m in RUNS.finditer(trust)]
        for start, end in runs:
            for found in self._pattern.finditer(text, start, end):
                yield found.span()


def prefix_pattern(words: Iterable[str]) -> str:
    """Regular expression that matches the longest of some words, sharing their prefixes."""
    ordered = sorted(set(words))
    return _pattern(ordered, 0)


def _pattern(words: list[str], depth: int) -> str:
    """Pattern of the words' rests from character `depth` on; words share what is before it."""
    shared = _shared_length(words, depth)
    head = re.escape(words[0][depth:shared])
    ends_here = len(words[0]) == shared
    groups: dict[str, list[str]] = {}
    for word in words[1:] if ends_here else words:
        groups.setdefault(word[shared], []).append(word)
    if not groups:
        return head
    rest = "|".join(_pattern(group, shared) for group in groups.values())
    return f"{head}(?:{rest})" + ("?" if ends_here else "")


def _shared_length(words: list[str], depth: int) -> int:
    """Length of the longest common prefix of sorted words, at least `depth`."""
    first, last = words[0], words[-1]
    while depth < min(len(first), len(last)) and first[depth] == last[depth]:
        depth += 1
    return depth
