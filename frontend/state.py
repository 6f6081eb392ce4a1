"""What a program holds: its state, and groups of forked states.

    s += "text" + sw.gen("x")     append (returns at once)
    s["x"]                        wait for that variable only
    s.text(), s.sync()            wait for everything
    forks = s.fork(2)             states that go on side by side
    forks.join()                  bring their variables back as lists

Whoever waits on a state that failed gets a `ProgramError` with the cause chained. States are meant
for one program; results may be read from any thread.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from statewise.frontend import usage
from statewise.frontend.executor import Executor
from statewise.frontend.expressions import (
    Expr,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    as_expr,
    role_turn,
)
from statewise.frontend.streaming import PieceReader, VariableReader


class ProgramState:
    """The state of a running or finished program."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._ret_value: Any = None

    # -- building

    def __iadd__(self, other: str | Expr) -> ProgramState:
        if other is None:
            raise ValueError("None was appended to a state; did an expression return nothing?")
        self._executor.submit(as_expr(other))
        return self

    def system(self, expr: str | Expr | None = None) -> Any:
        """Append a system turn, or open one with `with s.system():`."""
        return self._turn("system", expr)

    def user(self, expr: str | Expr | None = None) -> Any:
        """Append a user turn, or open one with `with s.user():`."""
        return self._turn("user", expr)

    def assistant(self, expr: str | Expr | None = None) -> Any:
        """Append an assistant turn, or open one with `with s.assistant():`."""
        return self._turn("assistant", expr)

    def var_scope(self, name: str) -> AbstractContextManager[None]:
        """Record the text appended in a `with` block into variable `name`."""
        return self._block(ScopeBegin(name), ScopeEnd(name))

    def _turn(self, role: str, expr: str | Expr | None) -> Any:
        if expr is None:
            return self._block(RoleBegin(role), RoleEnd(role))
        turn = role_turn(role, expr)
        self._executor.submit(turn)
        return turn

    @contextmanager
    def _block(self, begin: Expr, end: Expr) -> Iterator[None]:
        self._executor.submit(begin)
        yield
        self._executor.submit(end)

    # -- forks

    def fork(
        self, size: int = 1, position_ids_offset: list[int] | None = None
    ) -> ProgramStateGroup:
        """`size` states that go on from here side by side; their common prefix is computed once.

        `position_ids_offset` is accepted for programs written elsewhere and has no effect.
        """
        del position_ids_offset
        if size < 1:
            raise ValueError(f"a fork needs at least one branch, not {size}")
        return ProgramStateGroup([ProgramState(e) for e in self._executor.fork(int(size))], self)

    @contextmanager
    def copy(self, position_ids_offset: list[int] | None = None) -> Iterator[ProgramState]:
        """Make a state that goes on from here, joined at the end of the `with` block."""
        group = self.fork(1, position_ids_offset)
        try:
            yield group[0]
        finally:
            group.join()

    # -- reading

    def __getitem__(self, name: str) -> Any:
        return self.get_var(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self.set_var(name, value)

    def __contains__(self, name: str) -> bool:
        return name in self._executor.variables

    def get_var(self, name: str) -> Any:
        """Wait for the variable's value. Raises KeyError if nothing will assign it."""
        return self._executor.session.wait_for(lambda: self._executor.poll_variable(name))[0]

    async def async_get(self, name: str) -> Any:
        """`get_var` without blocking the event loop."""
        found = await self._executor.session.wait_for_async(
            lambda: self._executor.poll_variable(name)
        )
        return found[0]

    def set_var(self, name: str, value: Any) -> None:
        """Set a variable; the text does not change."""
        self._executor.set_variable(name, value)

    def get_meta_info(self, name: str, timeout: float | None = None) -> Any:
        """Return the backend's figures of the call that made the variable; a list where `n` > 1.

        Waits up to `timeout` seconds, then raises TimeoutError.
        """
        executor = self._executor
        return executor.session.wait_for(lambda: executor.poll_variable(name), timeout)[1]

    def text(self) -> str:
        """Return the whole text, when everything appended so far has run."""
        self.sync()
        return self._executor.transcript.text

    def messages(self) -> list[dict[str, Any]]:
        """Return the closed turns as chat messages, when everything appended so far has run."""
        self.sync()
        return self._executor.transcript.messages

    def sync(self) -> None:
        """Wait until everything appended so far has run. Raises `ProgramError` on failure."""
        self._executor.session.wait_for(self._executor.poll_idle)

    async def async_sync(self) -> None:
        """`sync` without blocking the event loop."""
        await self._executor.session.wait_for_async(self._executor.poll_idle)

    def error(self) -> BaseException | None:
        """Return what made the program fail, or None; waits as `sync` does and raises nothing."""
        self._executor.session.wait_for(self._executor.poll_settled)
        return self._executor.failure()

    @property
    def ret_value(self) -> Any:
        """What the program's function returned; waits for it where it runs in another thread."""
        session = self._executor.session
        session.wait_for(lambda: None if session.more_may_come() else True)
        if session.body_error is not None:
            self._executor.raise_failure()
        return self._ret_value

    @ret_value.setter
    def ret_value(self, value: Any) -> None:
        self._ret_value = value

    def usage(self) -> usage.Usage:
        """Tokens over all calls so far, joined forks included; waits as `sync` does."""
        self.sync()
        return usage.total(self._executor.calls)

    def cache_report(self) -> list[dict[str, Any]]:
        """Return what each call found in the cache, in order; waits as `sync` does."""
        self.sync()
        return usage.cache_report(self._executor.calls)

    # -- streaming

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """Pieces of the text, or of one variable, as they arrive.

        A run that was not started with `stream=True` gives one piece at the end. Raises
        `ProgramError` where the program failed, after what arrived before it.
        """
        reader = self._reader(var_name)
        while True:
            batch = self._executor.session.wait_for(reader.poll)
            yield from (text for text, _ in batch)
            if reader.finished:
                return

    async def text_async_iter(
        self, var_name: str | None = None, return_meta_data: bool = False
    ) -> AsyncIterator[Any]:
        """`text_iter` without blocking the event loop.

        `return_meta_data` (for a variable) yields pairs of text and `meta_info`.
        """
        reader = self._reader(var_name)
        while True:
            for piece in await self._executor.session.wait_for_async(reader.poll):
                yield piece if return_meta_data else piece[0]
            if reader.finished:
                return

    def _reader(self, var_name: str | None) -> PieceReader | VariableReader:
        if var_name is None:
            return PieceReader(self._executor)
        return VariableReader(self._executor, var_name)

    def __repr__(self) -> str:
        executor = self._executor
        with executor.session.changed:
            what = (
                "failed" if executor.error else "running" if not executor.is_drained() else "idle"
            )
            return f"<ProgramState {what}, {len(executor.transcript.text)} characters>"


class ProgramStateGroup:
    """Forked states, in order."""

    def __init__(self, states: list[ProgramState], src_state: ProgramState) -> None:
        self.states = states
        self.src_state = src_state

    def join(self, mode: str = "gather_variable") -> None:
        """End the branches and bring back what they made.

        "gather_variable": each variable that is new in the branches becomes a list in the source
        state. "concate_and_append": the branches' texts are appended to it, in order.
        """
        self.src_state._executor.join([state._executor for state in self.states], mode)

    def __len__(self) -> int:
        return len(self.states)

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self.states)

    def __getitem__(self, index: int) -> ProgramState:
        return self.states[index]

    def __setitem__(self, index: int, value: ProgramState) -> None:
        """Exists for `forks[i] += ...`, which assigns the same state back."""
        if self.states[index] is not value:
            raise ValueError("a branch cannot be replaced by another state")

    def __iadd__(
        self, other: str | Expr | list[Any] | tuple[Any, ...] | Callable[[int], Any]
    ) -> ProgramStateGroup:
        """Append to every branch: one expression, one each from a list, or `other(i)`."""
        if isinstance(other, list | tuple):
            if len(other) != len(self.states):
                raise ValueError(f"{len(other)} expressions for {len(self.states)} branches")
            for state, item in zip(self.states, other, strict=True):
                state += item
        elif callable(other):
            for index, state in enumerate(self.states):
                state += other(index)
        else:
            for state in self.states:
                state += other
        return self
