"""What a program appends to its state: small immutable expressions, joined with `+`.

An expression says what to do, never how: it holds no text of the state and no result, so one
expression can be appended to many states (a fork group does that). Expressions are data classes
rather than closures so that a program can be traced and printed. This module runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from statewise.frontend.choices import ChoicesMethod
    from statewise.frontend.sampling import SamplingOptions

REASONING_SUFFIX = "_reasoning_content"
ARGUMENT_MARK = "\ufdd1"  # a noncharacter: no text holds it


class Expr:
    """Base of every expression; `+` with text or another expression makes a `Sequence`."""

    def __add__(self, other: object) -> Sequence:
        return Sequence(parts(self) + parts(as_expr(other)))

    def __radd__(self, other: object) -> Sequence:
        return Sequence(parts(as_expr(other)) + parts(self))


@dataclass(frozen=True)
class Text(Expr):
    """Constant text."""

    value: str


@dataclass(frozen=True)
class Sequence(Expr):
    """Expressions one after another."""

    items: tuple[Expr, ...]


@dataclass(frozen=True)
class Gen(Expr):
    """Let the model write; the result is the variable `name` (None: kept in the text only)."""

    name: str | None
    options: SamplingOptions


@dataclass(frozen=True)
class Select(Expr):
    """Let the model pick one of `choices`."""

    name: str | None
    choices: tuple[str, ...]
    method: ChoicesMethod


@dataclass(frozen=True)
class RoleBegin(Expr):
    """Open a turn of the conversation."""

    role: str


@dataclass(frozen=True)
class RoleEnd(Expr):
    """Close the open turn."""

    role: str


@dataclass(frozen=True)
class ScopeBegin(Expr):
    """Start recording the text into the variable `name`."""

    name: str


@dataclass(frozen=True)
class ScopeEnd(Expr):
    """End the recording; the variable gets the text in between."""

    name: str


@dataclass(frozen=True)
class Media(Expr):
    """An image or a video. `kind` is "image" or "video"."""

    kind: str
    source: object


@dataclass(frozen=True)
class SeparateReasoning(Expr):
    """Run `inner`; split each generated variable into its answer and its reasoning."""

    inner: Expr
    model_type: str


@dataclass(frozen=True)
class Checkpoint(Expr):
    """Publish the text so far and ask the server to keep the state at its end."""


@dataclass(frozen=True)
class Argument(Expr):
    """Stands for a program's argument while the program is traced.

    In text it shows as a mark, at which the common prefix is cut. Anything else that needs the
    argument's value (its length, its truth, its characters) raises TypeError, which ends the trace.
    """

    name: str

    def _unknown(self) -> TypeError:
        return TypeError(f"argument {self.name!r} has no value while the program is traced")

    def __format__(self, spec: str) -> str:
        return str(self)

    def __str__(self) -> str:
        return f"{ARGUMENT_MARK}{self.name}{ARGUMENT_MARK}"

    def __len__(self) -> int:
        raise self._unknown()

    def __bool__(self) -> bool:
        raise self._unknown()

    def __iter__(self) -> Iterator[object]:
        raise self._unknown()

    def __getitem__(self, key: object) -> object:
        raise self._unknown()


def as_expr(value: object) -> Expr:
    """Text or expression as an expression. Raises TypeError for anything else."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, str):
        return Text(value)
    raise TypeError(f"expected text or an expression, got {type(value).__name__}: {value!r:.80}")


def parts(expr: Expr) -> tuple[Expr, ...]:
    """Return the items of a sequence, or the expression alone."""
    return expr.items if isinstance(expr, Sequence) else (expr,)


def walk(expr: Expr) -> Iterator[Expr]:
    """Leaves in the order in which they run, `SeparateReasoning` before what it holds."""
    if isinstance(expr, Sequence):
        for item in expr.items:
            yield from walk(item)
        return
    yield expr
    if isinstance(expr, SeparateReasoning):
        yield from walk(expr.inner)


def declared_names(expr: Expr) -> Iterator[str]:
    """Variables the expression will assign, one entry for each assignment."""
    for leaf in walk(expr):
        if isinstance(leaf, Gen | Select | ScopeEnd) and leaf.name is not None:
            yield leaf.name
        elif isinstance(leaf, SeparateReasoning):
            yield from (name + REASONING_SUFFIX for name in declared_names(leaf.inner))


def role_turn(role: str, expr: object) -> Sequence:
    """Return a whole turn: begin, content (None: empty), end."""
    content = () if expr is None else parts(as_expr(expr))
    return Sequence((RoleBegin(role), *content, RoleEnd(role)))
