"""What all runs of a program begin with, found by running its body without a model.

The body runs with placeholders for its arguments over a backend that answers nothing. It ends at
the first model call, or where a placeholder's value is needed; the text up to there, cut where a
placeholder was written into it, is what every run shares. The body's own side effects happen, so a
program that must not run twice should not be traced: `run_batch` and `cache` trace.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from statewise.frontend.backends.base import Backend, CacheHints, Completion, Prompt
from statewise.frontend.chat_template import ChatTemplate
from statewise.frontend.choices import ChoicesDecision, ChoicesMethod
from statewise.frontend.executor import program_cause
from statewise.frontend.expressions import ARGUMENT_MARK, Argument
from statewise.frontend.running import Run
from statewise.frontend.sampling import SamplingOptions
from statewise.frontend.session import Session

if TYPE_CHECKING:
    from statewise.frontend.program import Function


@dataclass(frozen=True)
class Trace:
    """`prefix`: text that every run begins with; `ended_by`: what ended the trace."""

    prefix: str
    ended_by: str

    def __str__(self) -> str:
        return f"{self.prefix}<{self.ended_by}>"


class _ModelCall(Exception):  # noqa: N818 (an ending, not an error)
    """The program came to its first model call."""


class _NoModel:
    """A backend that ends the program at its first model call; publishing costs nothing."""

    def __init__(self, real: Backend) -> None:
        self.chat_template: Callable[[], ChatTemplate] = real.chat_template

    def generate(self, prompt: Prompt, options: SamplingOptions, hints: CacheHints) -> NoReturn:
        raise _ModelCall("a generation")

    def stream(
        self, prompt: Prompt, options: SamplingOptions, hints: CacheHints
    ) -> Iterator[Completion]:
        raise _ModelCall("a generation")

    def select(
        self, prompt: Prompt, choices: Sequence[str], method: ChoicesMethod, hints: CacheHints
    ) -> ChoicesDecision:
        raise _ModelCall("a selection")

    def publish(self, text: str, hints: CacheHints) -> dict[str, Any]:
        return {}

    def flush_cache(self) -> None:
        """Nothing is cached."""

    def get_server_info(self) -> dict[str, Any]:
        return {}


def trace(
    program: Function, backend: Backend, args: Sequence[Any], kwargs: dict[str, Any]
) -> Trace:
    """Run the program's body without a model; see the module."""
    given = {**program.bind_arguments, **kwargs}
    names = program.arg_names[len(args) :]
    arguments = program.arguments(
        args, {**{n: Argument(n) for n in names if n not in given}, **kwargs}
    )
    session = Session(_NoModel(backend), SamplingOptions(), use_thread=False)
    # A body may run an event loop of its own, which the caller's thread may already do.
    outcome: list[tuple[str, str]] = []
    thread = threading.Thread(target=lambda: outcome.append(_run(program, session, arguments)))
    thread.start()
    thread.join()
    prefix, ended_by = outcome[0]
    return Trace(prefix, ended_by)


def _run(program: Function, session: Session, arguments: inspect.BoundArguments) -> tuple[str, str]:
    run = Run(program.func, session, arguments)
    ended_by = "end"
    try:
        run.in_caller()
    except Exception as error:
        ended_by = str(program_cause(error)) or type(error).__name__
    run.executor.failure()
    prefix, marked, name = run.executor.transcript.text.partition(ARGUMENT_MARK)
    if marked:
        ended_by = f"argument {name.partition(ARGUMENT_MARK)[0]!r}"
    return prefix, ended_by
