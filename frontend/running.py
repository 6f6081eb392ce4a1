"""Running a program's body: in the caller, in a thread of its own, or in an event loop.

Whichever it is, the session learns when the body ended and how, because a reader must know whether
more can come.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable
from typing import Any

from statewise.frontend.executor import Executor
from statewise.frontend.session import Session
from statewise.frontend.state import ProgramState


class Run:
    """One run: a body, its arguments, and the state it builds."""

    def __init__(
        self, func: Callable[..., Any], session: Session, arguments: inspect.BoundArguments
    ) -> None:
        self.executor = Executor(session)
        self.state = ProgramState(self.executor)
        self._func = func
        self._session = session
        self._arguments = arguments

    def start(self) -> ProgramState:
        """Run a plain body here, a streamed or asynchronous one in a thread of its own."""
        if self._session.stream or inspect.iscoroutinefunction(self._func):
            self._session.body_starts()
            context = contextvars.copy_context()
            thread = threading.Thread(
                target=context.run, args=(self._in_thread,), name="statewise-program"
            )
            thread.start()
        else:
            self.in_caller()
        return self.state

    def in_caller(self) -> None:
        """Run the body in this thread. Raises what the body raises."""
        self._session.enter_body()
        try:
            result = self._call()
            self.state.ret_value = asyncio.run(result) if inspect.iscoroutine(result) else result
        except BaseException as error:
            self._session.leave_body(error)
            raise
        self._session.leave_body(None)

    async def in_loop(self) -> ProgramState:
        """Run a coroutine body in the running loop and wait for all of it."""
        self._session.enter_body()
        try:
            self.state.ret_value = await self._call()
        except BaseException as error:
            self._session.leave_body(error)
            raise
        self._session.leave_body(None)
        await self.state.async_sync()
        return self.state

    def _in_thread(self) -> None:
        try:
            self.in_caller()
        except Exception:
            return  # the session holds it; whoever reads the state meets it

    def _call(self) -> Any:
        return self._func(self.state, *self._arguments.args, **self._arguments.kwargs)
