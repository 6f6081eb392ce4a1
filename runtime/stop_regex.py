"""Regular expressions over a growing text, matched one character at a time.

Python's `re` cannot say "this may become a match", which is what a stream must know before it
shows text to a client, and it can take exponential time on a hostile pattern. So `re`'s own parser
reads the pattern and a Thompson automaton runs it: time is linear in text and pattern, the first
match is the one that ends first, and the start of every match in progress is known.

    pattern --re parser--> tree --_Compiler--> program --RegexRun.push(char)--> start of a match

`$` holds at every point of a growing text. Not supported, and refused with a clear message:
backreferences, lookahead, lookbehind, atomic and possessive groups, patterns that match nothing.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser as sre_parser  # type: ignore[attr-defined]
from typing import Any

from statewise.runtime.errors import InvalidRequestError

MAX_STATES = 1024  # of all patterns of one request: bounds the work for one character

Predicate = Callable[[str], bool]
Check = Callable[[str, str], bool]  # (character before, character after); "" outside the text


@dataclass
class Program:
    """Instructions: at each index one of step (read a character), check, or split; MATCH last.

    `steps[i]` reads one character and goes to i + 1; `splits[i]` lists where to go without
    reading; `checks[i]` must hold between two characters to go to i + 1.
    """

    steps: dict[int, Predicate] = field(default_factory=dict)
    splits: dict[int, tuple[int, ...]] = field(default_factory=dict)
    checks: dict[int, Check] = field(default_factory=dict)
    match: int = 0  # index of the accepting state


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


def _ascii_only(test: Predicate) -> Predicate:
    return lambda c: c.isascii() and test(c)


def _category(name: Any, flags: int) -> Predicate:
    word = str(name).lower()
    test: Predicate = str.isdecimal
    if word.endswith("space"):
        test = str.isspace
    elif word.endswith("word"):
        test = _is_word
    if flags & re.ASCII:
        test = _ascii_only(test)
    return (lambda c: not test(c)) if "_not_" in word else test


def _member(item: tuple[Any, Any], flags: int) -> Predicate:
    op, value = item
    if op is sre.LITERAL:
        return lambda c: ord(c) == value
    if op is sre.RANGE:
        low, high = value
        return lambda c: low <= ord(c) <= high
    assert op is sre.CATEGORY, op
    return _category(value, flags)


def _any_case(test: Predicate, flags: int) -> Predicate:
    if not flags & re.IGNORECASE:
        return test
    return lambda c: any(test(v) for v in (c, c.lower(), c.upper()) if len(v) == 1)


def _char_class(items: list[tuple[Any, Any]], flags: int) -> Predicate:
    negate = bool(items) and items[0][0] is sre.NEGATE
    tests = [_member(item, flags) for item in items[negate:]]
    inside = _any_case(lambda c: any(test(c) for test in tests), flags)
    return (lambda c: not inside(c)) if negate else inside


def _boundary(before: str, after: str) -> bool:
    return (before != "" and _is_word(before)) != (after != "" and _is_word(after))


_CHECKS: dict[Any, Check] = {
    sre.AT_BEGINNING: lambda before, _: before == "",
    sre.AT_BEGINNING_STRING: lambda before, _: before == "",
    sre.AT_BOUNDARY: _boundary,
    sre.AT_NON_BOUNDARY: lambda before, after: not _boundary(before, after),
}
_ENDS = {sre.AT_END, sre.AT_END_STRING}


class _Compiler:
    """Writes one program; `self.size` is the index of the next instruction."""

    def __init__(self) -> None:
        self.program = Program()
        self.size = 0

    def _next(self) -> int:
        if self.size >= MAX_STATES:
            raise InvalidRequestError(f"stop_regex is too large: over {MAX_STATES} states")
        self.size += 1
        return self.size - 1

    def sequence(self, items: Iterable[tuple[Any, Any]], flags: int) -> None:
        for op, value in items:
            self.item(op, value, flags)

    def item(self, op: Any, value: Any, flags: int) -> None:
        if op is sre.SUBPATTERN:
            _, add, remove, inner = value
            self.sequence(inner, (flags | add) & ~remove)
        elif op is sre.BRANCH:
            self._branch(value[1], flags)
        elif op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            low, high, inner = value
            self._repeat((low, high), inner, flags)
        elif op is sre.AT:
            self._check(value, flags)
        else:
            self.program.steps[self._next()] = self._predicate(op, value, flags)

    def _predicate(self, op: Any, value: Any, flags: int) -> Predicate:
        if op is sre.LITERAL:
            return _any_case(lambda c: ord(c) == value, flags)
        if op is sre.NOT_LITERAL:
            same = _any_case(lambda c: ord(c) == value, flags)
            return lambda c: not same(c)
        if op is sre.ANY:
            return (lambda _: True) if flags & re.DOTALL else (lambda c: c != "\n")
        if op is sre.IN:
            return _char_class(value, flags)
        what = str(op).lower().replace("_", " ")
        raise InvalidRequestError(f"stop_regex uses what streams cannot match: {what}")

    def _check(self, where: Any, flags: int) -> None:
        if where in _ENDS:
            return
        check = _CHECKS[where]
        if where is sre.AT_BEGINNING and flags & re.MULTILINE:
            check = _line_start
        self.program.checks[self._next()] = check

    def _branch(self, options: list[Any], flags: int) -> None:
        fork = self._next()
        starts, jumps = [], []
        for option in options:
            starts.append(self.size)
            self.sequence(option, flags)
            jumps.append(self._next())
        self.program.splits[fork] = tuple(starts)
        for jump in jumps:
            self.program.splits[jump] = (self.size,)

    def _repeat(self, times: tuple[int, int], inner: Any, flags: int) -> None:
        low, high = times
        for _ in range(low):
            self.sequence(inner, flags)
        if high == sre.MAXREPEAT:
            loop = self._next()
            self.sequence(inner, flags)
            self.program.splits[self._next()] = (loop,)
            self.program.splits[loop] = (loop + 1, self.size)
            return
        forks = []
        for _ in range(high - low):
            forks.append(self._next())
            self.sequence(inner, flags)
        for fork in forks:
            self.program.splits[fork] = (fork + 1, self.size)


def _line_start(before: str, _after: str) -> bool:
    return before in ("", "\n")


@lru_cache(maxsize=256)
def compile_stop_regex(pattern: str) -> Program:
    """Translate a pattern; InvalidRequestError where it is malformed, unsupported or empty."""
    shown = repr(pattern[:80])
    try:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            tree = sre_parser.parse(pattern)
        if tree.getwidth()[0] == 0:
            raise InvalidRequestError(f"stop_regex {shown} matches the empty text")
        compiler = _Compiler()
        compiler.sequence(tree, tree.state.flags)
    except (re.error, RecursionError, OverflowError) as error:
        raise InvalidRequestError(f"stop_regex {shown}: {error}") from None
    compiler.program.match = compiler.size
    return compiler.program


def compile_stop_regexes(patterns: Iterable[str]) -> tuple[Program, ...]:
    """Translate all patterns of a request; InvalidRequestError as `compile_stop_regex`."""
    programs = tuple(compile_stop_regex(p) for p in patterns)
    if sum(p.match for p in programs) > MAX_STATES:
        raise InvalidRequestError(f"stop_regex is too large: over {MAX_STATES} states")
    return programs


class RegexRun:
    """One pattern along one text. Threads are states with the earliest start that reached them."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._threads: dict[int, int] = {}  # step or unresolved check -> start of its match
        self._before = ""
        self._length = 0

    def push(self, char: str) -> tuple[int, int] | None:
        """Read one character; (start, end) of a match that is now certain, else None."""
        moved: dict[int, int] = {0: self._length}
        for state, start in self._threads.items():
            _keep(moved, state, start)
        ready, found = self._close(moved, char)
        if found is not None:  # a check that needed this character ended a match before it
            return found, self._length
        self._before = char
        self._length += 1
        stepped: dict[int, int] = {}
        for state, start in ready.items():
            test = self._program.steps.get(state)
            if test is not None and test(char):
                _keep(stepped, state + 1, start)
        self._threads, found = self._close(stepped, None)
        return None if found is None else (found, self._length)

    def finish(self) -> tuple[int, int] | None:
        """End the text: a match that only a following character could have denied."""
        _, found = self._close(self._threads, "")
        return None if found is None else (found, self._length)

    @property
    def pending_start(self) -> int:
        """First character that a match in progress may include; the text's length if none."""
        return min(self._threads.values(), default=self._length)

    def _close(
        self, threads: dict[int, int], after: str | None
    ) -> tuple[dict[int, int], int | None]:
        """Follow splits and checks; `after` None: the next character is not known yet.

        Threads go in ascending order of start, so the first to reach a state is the earliest.
        """
        program = self._program
        seen: dict[int, int] = {}
        for state, start in sorted(threads.items(), key=_by_start):
            stack = [state]
            while stack:
                at = stack.pop()
                if at in seen:
                    continue
                seen[at] = start
                if at in program.splits:
                    stack.extend(program.splits[at])
                elif after is not None and self._passes(at, after):
                    stack.append(at + 1)
        waiting = {
            s: t
            for s, t in seen.items()
            if s in program.steps or (after is None and s in program.checks)
        }
        return waiting, seen.get(program.match)

    def _passes(self, state: int, after: str) -> bool:
        check = self._program.checks.get(state)
        return check is not None and check(self._before, after)


def _by_start(item: tuple[int, int]) -> int:
    return item[1]


def _keep(threads: dict[int, int], state: int, start: int) -> None:
    threads[state] = min(start, threads.get(state, start))
