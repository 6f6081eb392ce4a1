"""What each expression does to a state. Runs in the state's worker thread, one at a time.

Blocking calls to the backend happen without the run's lock; results are put in place under it.
`ForkPoint`, `Gather` and `Append` are the expressions that states make themselves to meet each
other; programs never write them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from statewise.frontend import reasoning
from statewise.frontend.backends.base import Completion, Prompt
from statewise.frontend.errors import VisionUnsupportedError
from statewise.frontend.expressions import (
    REASONING_SUFFIX,
    Argument,
    Checkpoint,
    Expr,
    Gen,
    Media,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Select,
    SeparateReasoning,
    Sequence,
    Text,
)
from statewise.frontend.sampling import SamplingOptions
from statewise.frontend.usage import Call

if TYPE_CHECKING:
    from statewise.frontend.executor import Executor


@dataclass(frozen=True)
class ForkPoint(Expr):
    """Publish the text so far and let the children go on from it."""

    children: tuple[tuple[Executor, tuple[str, ...]], ...]  # with the names each awaits


@dataclass(frozen=True)
class Gather(Expr):
    """Wait for the children and collect their values of `names` into lists."""

    children: tuple[Executor, ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class Append(Expr):
    """Wait for the children and append what each wrote after the fork."""

    children: tuple[Executor, ...]


def execute(state: Executor, expr: Expr) -> None:
    """Apply one expression to the state. Raises whatever the backend or the template raises."""
    _HANDLERS[type(expr)](state, expr)


def _sequence(state: Executor, expr: Sequence) -> None:
    for item in expr.items:
        execute(state, item)


def _text(state: Executor, expr: Text) -> None:
    state.append(expr.value)


def _gen(state: Executor, expr: Gen) -> None:
    state.transcript.check_can_generate()
    options = expr.options.over(state.session.options).with_stops(state.transcript.stops)
    start = len(state.transcript.text)
    if state.session.stream and (options.n or 1) == 1:
        results = [_streamed(state, expr, options)]
    else:
        results = state.session.backend.generate(_prompt(state), options, state.session.hints)
        state.append(results[0].text)
    for result in results:
        state.record(Call("gen", expr.name, result.meta_info))
    texts = [result.text for result in results]
    if state.reasoning_type is not None:
        texts = _split_reasoning(state, expr.name, texts)
        state.transcript.replace_tail(start, texts[0])
    metas = [result.meta_info for result in results]
    several = (options.n or 1) > 1
    _assign(state, expr.name, texts if several else texts[0], metas if several else metas[0])


def _streamed(state: Executor, expr: Gen, options: SamplingOptions) -> Completion:
    if expr.name is not None:
        with state.session.changed:
            state.variables.begin(expr.name)
            state.session.notify()
    text, meta = "", {}
    for piece in state.session.backend.stream(_prompt(state), options, state.session.hints):
        text, meta = text + piece.text, piece.meta_info
        with state.session.changed:
            if expr.name is not None:
                state.variables.extend(expr.name, piece.text, meta)
            state.append(piece.text)
            state.session.notify()
    return Completion(text, meta)


def _split_reasoning(state: Executor, name: str | None, texts: list[str]) -> list[str]:
    assert state.reasoning_type is not None, "called while reasoning is separated"
    pairs = [reasoning.split(text, state.reasoning_type) for text in texts]
    thoughts, answers = [p[0] for p in pairs], [p[1] for p in pairs]
    if name is not None:
        _assign(state, name + REASONING_SUFFIX, thoughts if len(texts) > 1 else thoughts[0], None)
    return answers


def _select(state: Executor, expr: Select) -> None:
    state.transcript.check_can_generate()
    session = state.session
    decision = session.backend.select(_prompt(state), expr.choices, expr.method, session.hints)
    state.record(Call("select", expr.name, decision.meta_info or {}))
    state.append(decision.decision)
    if state.reasoning_type is not None and expr.name is not None:
        _assign(state, expr.name + REASONING_SUFFIX, "", None)
    _assign(state, expr.name, decision.decision, decision.meta_info)


def _assign(state: Executor, name: str | None, value: Any, meta_info: Any) -> None:
    if name is not None:
        with state.session.changed:
            state.variables.assign(name, value, meta_info)
            state.session.notify()


def _prompt(state: Executor) -> Prompt:
    transcript = state.transcript
    return Prompt(transcript.text, tuple(transcript.messages), transcript.role, transcript.partial)


def _role_begin(state: Executor, expr: RoleBegin) -> None:
    state.grew(state.transcript.begin_role(expr.role))


def _role_end(state: Executor, expr: RoleEnd) -> None:
    state.grew(state.transcript.end_role())


def _scope_begin(state: Executor, expr: ScopeBegin) -> None:
    state.scopes.append(len(state.transcript.text))


def _scope_end(state: Executor, expr: ScopeEnd) -> None:
    _assign(state, expr.name, state.transcript.text[state.scopes.pop() :], None)


def _media(state: Executor, expr: Media) -> None:
    raise VisionUnsupportedError(f"the served model has no vision: it cannot read this {expr.kind}")


def _separate_reasoning(state: Executor, expr: SeparateReasoning) -> None:
    outer, state.reasoning_type = state.reasoning_type, expr.model_type
    try:
        execute(state, expr.inner)
    finally:
        state.reasoning_type = outer


def _checkpoint(state: Executor, expr: Checkpoint) -> None:
    _publish(state)


def _publish(state: Executor) -> None:
    """Have the text so far computed and its state kept."""
    text = state.transcript.text
    if text:
        hints = replace(state.session.hints, checkpoint=True)
        state.record(Call("publish", None, state.session.backend.publish(text, hints)))


def _argument(state: Executor, expr: Argument) -> None:
    state.append(str(expr))


def _fork_point(state: Executor, expr: ForkPoint) -> None:
    if len(expr.children) > 1:
        _publish(state)
    for child, awaited in expr.children:
        child.release(state, awaited)


def _gather(state: Executor, expr: Gather) -> None:
    values: dict[str, list[Any]] = {name: [] for name in expr.names}
    metas: dict[str, list[Any]] = {name: [] for name in expr.names}
    for child in expr.children:
        child.wait_drained()
        for name in expr.names:
            slot = child.variables.slots.get(name)
            if slot is not None:
                values[name].append(slot.value)
                metas[name].append(slot.meta_info)
        state.absorb(child)
    for name in expr.names:
        _assign(state, name, values[name], metas[name])


def _append(state: Executor, expr: Append) -> None:
    for child in expr.children:
        child.wait_drained()
        state.append(child.transcript.text[child.transcript.fork_start :])
        state.absorb(child)


_HANDLERS: dict[type[Expr], Callable[[Executor, Any], None]] = {
    Sequence: _sequence,
    Text: _text,
    Gen: _gen,
    Select: _select,
    RoleBegin: _role_begin,
    RoleEnd: _role_end,
    ScopeBegin: _scope_begin,
    ScopeEnd: _scope_end,
    Media: _media,
    SeparateReasoning: _separate_reasoning,
    Checkpoint: _checkpoint,
    Argument: _argument,
    ForkPoint: _fork_point,
    Gather: _gather,
    Append: _append,
}
