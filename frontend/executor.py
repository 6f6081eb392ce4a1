"""One state's stream of expressions, run in order while the program goes on.

    submit ----> queue ----> worker thread ----> interpreter ----> transcript, variables
                   |
                   held until the fork point in the parent's own stream is reached

A worker thread lives only while there is work, so a state needs no closing and leaves no thread
behind. Constant text needs no thread at all when nothing is queued before it. With
`use_thread=False` everything runs in the caller.

A failure ends the stream: the queue is dropped, states forked further on fail with it, and everyone
who waits gets a `ProgramError`. Appending to a failed state does nothing, so that where a program
meets its failure does not depend on how fast its threads are: it does so where it reads.

A fork does not wait for the stream either: the children exist at once, and are held until the
parent's worker has published the common prefix and hands them the text.
"""

from __future__ import annotations

import contextvars
import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from statewise.frontend import interpreter
from statewise.frontend.errors import ProgramError
from statewise.frontend.expressions import Expr, RoleBegin, RoleEnd, Text, declared_names, walk
from statewise.frontend.interpreter import Append, ForkPoint, Gather
from statewise.frontend.session import Session
from statewise.frontend.transcript import Transcript
from statewise.frontend.usage import Call
from statewise.frontend.variables import Variables

log = logging.getLogger("statewise.frontend")


class Executor:
    """Runs one state's expressions. All public methods may be called from any thread."""

    def __init__(self, session: Session, transcript: Transcript | None = None) -> None:
        self.session = session
        self.variables = Variables()
        self.calls: list[Call] = []
        self.pieces: list[str] = []  # what the text grew by, in order
        self.error: BaseException | None = None
        self.scopes: list[int] = []  # where in the text the open variable scopes began
        self.reasoning_type: str | None = None  # set while reasoning is being separated
        self._transcript = transcript or Transcript(session.backend.chat_template)
        self._queue: deque[Expr] = deque()
        self._running = False
        self._held = False
        self._joined = False
        self._error_seen = False
        self._role: str | None = None  # as of the last submitted expression

    # -- building the stream

    def submit(self, expr: Expr) -> None:
        """Append an expression. Raises `ProgramError` for turns that do not nest."""
        self._check(expr)
        with self.session.changed:
            if self.error is not None:
                _abandon([expr], self.error)
                return
            self.variables.declare(_declared(expr))
            self._queue.append(expr)
            if self._running or self._held:
                return
            self._fill_texts()
            if not self._queue:
                self.session.notify()
                return
            self._running = True
        self._start()

    def fork(self, size: int) -> list[Executor]:
        """States that go on from here, side by side."""
        children = []
        with self.session.changed:
            for _ in range(size):
                child = Executor(self.session, self._transcript)
                child._held = True
                child._role = self._role
                children.append((child, tuple(child.variables.inherit(self.variables))))
        self.submit(ForkPoint(tuple(children)))
        return [child for child, _ in children]

    def join(self, children: Sequence[Executor], mode: str) -> None:
        """End the children and bring back what they made.

        "gather_variable" makes a list of each variable that is new in them;
        "concate_and_append" appends their texts. Raises ValueError for another mode.
        """
        if mode == "gather_variable":
            with self.session.changed:
                own = set(self.variables.slots)
                new = [n for child in children for n in child.variables.slots if n not in own]
            self.submit(Gather(tuple(children), tuple(dict.fromkeys(new))))
        elif mode == "concate_and_append":
            self.submit(Append(tuple(children)))
        else:
            raise ValueError(
                f"join mode must be gather_variable or concate_and_append, not {mode!r}"
            )
        for child in children:
            child._joined = True

    def set_variable(self, name: str, value: Any) -> None:
        """Set a variable from the program."""
        with self.session.changed:
            self.variables.put(name, value)
            self.session.notify()

    # -- polls: called with the run's condition held; None means "not yet"

    def poll_variable(self, name: str) -> tuple[Any, Any] | None:
        """(value, meta_info). Raises KeyError where it cannot come, `ProgramError` on failure."""
        slot = self.variables.slots.get(name)
        if slot is not None and slot.is_ready:
            return slot.value, slot.meta_info
        self.raise_failure()
        if slot is None and not self.session.more_may_come():
            raise KeyError(name)
        return None

    def poll_idle(self) -> bool | None:
        """Return True once everything submitted has run. Raises `ProgramError` on failure."""
        self.raise_failure()
        return True if self._is_settled() else None

    def poll_settled(self) -> bool | None:
        """Return True when nothing more runs, failed or not."""
        return True if self.error is not None or self._is_settled() else None

    def raise_failure(self) -> None:
        """Raise `ProgramError` if this state, or the body that feeds it, failed."""
        error = self.error or self.session.body_error
        if error is not None:
            self._error_seen = True
            raise program_error(error)

    def wait_drained(self) -> None:
        """Wait until everything submitted has run, whatever the body may still append.

        Raises `ProgramError` on failure.
        """

        def poll() -> bool | None:
            self.raise_failure()
            return True if self.is_drained() else None

        self.session.wait_for(poll)

    def failure(self) -> BaseException | None:
        """Return what made this state, or the body that feeds it, fail. Counts as read."""
        error = self.error or self.session.body_error
        self._error_seen = self._error_seen or error is not None
        return program_cause(error) if error is not None else None

    def is_drained(self) -> bool:
        """Whether everything submitted has run. The caller holds the run's condition."""
        return not self._queue and not self._running and not self._held

    def _is_settled(self) -> bool:
        return self.is_drained() and not self.session.more_may_come()

    # -- running the stream

    def append(self, value: str) -> None:
        """Append text; for the interpreter."""
        with self.session.changed:
            grown = self._transcript.fill(value)
            self._grew(grown)

    def grew(self, piece: str) -> None:
        """Tell readers of the stream what the text grew by; for the interpreter."""
        with self.session.changed:
            self._grew(piece)

    def record(self, call: Call) -> None:
        """Keep what a call cost; for the interpreter."""
        with self.session.changed:
            self.calls.append(call)

    def absorb(self, child: Executor) -> None:
        """Take over a joined child's calls; for the interpreter."""
        with self.session.changed:
            self.calls.extend(child.calls)

    @property
    def transcript(self) -> Transcript:
        """Text and turns as of the last executed expression."""
        return self._transcript

    def fail(self, error: BaseException) -> None:
        """End the stream with `error`."""
        with self.session.changed:
            if self.error is None:
                self.error = error
            dropped = list(self._queue)
            self._queue.clear()
            self._held = False
            _abandon(dropped, error)
            self.session.notify()

    def release(self, parent: Executor, awaited: Sequence[str]) -> None:
        """Go on from the parent's text; for the parent's worker at the fork point."""
        with self.session.changed:
            self._transcript = parent.transcript.copy()
            self.variables.receive(parent.variables, awaited)
            self._held = False
            self._fill_texts()
            self.session.notify()
            if not self._queue or self._running:
                return
            self._running = True
        self._start()

    def _start(self) -> None:
        if self.session.use_thread:
            context = contextvars.copy_context()
            threading.Thread(
                target=context.run, args=(self._drain,), name="statewise-state"
            ).start()
            return
        self._drain()
        if self.error is not None:
            self._error_seen = True
            raise program_error(self.error)

    def _drain(self) -> None:
        """Run queued expressions until there are none."""
        while True:
            with self.session.changed:
                self._fill_texts()
                if not self._queue:
                    self._running = False
                    self.session.notify()
                    return
                expr = self._queue.popleft()
            try:
                interpreter.execute(self, expr)
            except BaseException as error:
                _abandon([expr], error)
                self.fail(error)
                if not isinstance(error, Exception):
                    raise

    def _fill_texts(self) -> None:
        """Run the constant text at the head of the queue. The caller holds the condition."""
        while self._queue and isinstance(self._queue[0], Text):
            expr = self._queue.popleft()
            assert isinstance(expr, Text)
            self._grew(self._transcript.fill(expr.value))

    def _grew(self, piece: str) -> None:
        if piece:
            self.pieces.append(piece)
            self.session.notify()

    def _check(self, expr: Expr) -> None:
        if self._joined:
            raise ProgramError("the state was joined; nothing can be appended to it any more")
        role = self._role
        for leaf in walk(expr):
            if isinstance(leaf, RoleBegin):
                if role is not None:
                    raise ProgramError(f"a {leaf.role} turn begins inside a {role} turn")
                role = leaf.role
            elif isinstance(leaf, RoleEnd):
                if role != leaf.role:
                    raise ProgramError(f"a {leaf.role} turn ends, but {role or 'none'} is open")
                role = None
        self._role = role

    def __del__(self) -> None:
        if getattr(self, "error", None) is not None and not self._error_seen:
            log.error("a program failed and nobody read its results: %r", self.error)


def program_cause(error: BaseException) -> BaseException:
    """Return what was first raised, under any number of `ProgramError`s."""
    while isinstance(error, ProgramError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def program_error(error: BaseException) -> ProgramError:
    """`error` as a fresh `ProgramError` with the cause chained."""
    error = program_cause(error)
    if isinstance(error, ProgramError):
        return error
    failure = ProgramError(f"the program failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _declared(expr: Expr) -> Sequence[str]:
    return expr.names if isinstance(expr, Gather) else tuple(declared_names(expr))


def _abandon(exprs: Sequence[Expr], error: BaseException) -> None:
    """States that would have started at these expressions fail with their parent."""
    for expr in exprs:
        if isinstance(expr, ForkPoint):
            for child, _ in expr.children:
                child._error_seen = True  # the parent carries it
                child.fail(error)
