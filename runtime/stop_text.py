"""Where a growing text must stop: the first stop string or stop expression that completes.

All stops are read one character at a time, so the answer does not depend on how the text was cut
into pieces. The match that ends first wins; of those that end together, the one that starts first.

    finder = StopFinder(("###",), ())
    finder.push("text #")   -> None     finder.pending_start == 5: "#" may become a stop
    finder.push("## more")  -> StopMatch(start=5, end=8, text="###")
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from statewise.runtime.stop_regex import RegexRun, compile_stop_regexes


@dataclass(frozen=True)
class StopMatch:
    """Characters start..end-1 of the text completed a stop; `text` is what the client asked for."""

    start: int
    end: int
    text: str


@lru_cache(maxsize=1024)
def _failure(word: str) -> tuple[int, ...]:
    """KMP table: at i, the length of the longest proper prefix of word[:i+1] that ends there."""
    table = [0] * len(word)
    length = 0
    for i in range(1, len(word)):
        while length and word[i] != word[length]:
            length = table[length - 1]
        length += word[i] == word[length]
        table[i] = length
    return tuple(table)


class _StringRun:
    """One stop string along one text."""

    def __init__(self, word: str) -> None:
        self.word = word
        self.matched = 0  # longest prefix of the word that ends the text
        self._table = _failure(word)

    def push(self, char: str) -> bool:
        """Read one character; whether the word is complete."""
        while self.matched and char != self.word[self.matched]:
            self.matched = self._table[self.matched - 1]
        self.matched += char == self.word[self.matched]
        return self.matched == len(self.word)


class StopFinder:
    """All stops of one request along its text. Not used again after a match."""

    def __init__(self, strings: Iterable[str], patterns: tuple[str, ...]) -> None:
        self._strings = [_StringRun(s) for s in strings]
        programs = compile_stop_regexes(patterns)
        self._patterns = [
            (p, RegexRun(program)) for p, program in zip(patterns, programs, strict=True)
        ]
        self._length = 0

    def push(self, piece: str) -> StopMatch | None:
        """Read more text; the first stop it completes, or None."""
        if not self._strings and not self._patterns:
            self._length += len(piece)
            return None
        for char in piece:
            found = self._step(char)
            if found is not None:
                return found
        return None

    def finish(self) -> StopMatch | None:
        """End the text: a stop that only more text could have denied, or None."""
        found = [(run.finish(), text) for text, run in self._patterns]
        return _first([StopMatch(*span, text) for span, text in found if span is not None])

    @property
    def pending_start(self) -> int:
        """First character that may belong to a stop still to come; the text's length if none."""
        strings = (self._length - run.matched for run in self._strings)
        patterns = (run.pending_start for _, run in self._patterns)
        return min(self._length, min(strings, default=self._length), *patterns, self._length)

    def _step(self, char: str) -> StopMatch | None:
        self._length += 1
        found = [
            StopMatch(self._length - len(run.word), self._length, run.word)
            for run in self._strings
            if run.push(char)
        ]
        for text, run in self._patterns:
            span = run.push(char)
            if span is not None:
                found.append(StopMatch(*span, text))
        return _first(found)


def _first(matches: list[StopMatch]) -> StopMatch | None:
    return min(matches, key=lambda m: (m.end, m.start), default=None)
