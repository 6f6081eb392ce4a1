"""A prompt program: a function of a state, run once or many times.

The body of a plain program runs in the caller's thread and appends to the state; `run` returns when
the body has returned, while the model may still be writing. With `stream=True`, and for `async def`
bodies, the body runs in a thread of its own and `run` returns at once.

What the body itself raises leaves `run` unchanged where the body runs in the caller; otherwise
whoever reads the state meets it as a `ProgramError`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from statewise.frontend import batch, defaults, trace
from statewise.frontend.backends.base import CacheHints
from statewise.frontend.running import Run
from statewise.frontend.sampling import SamplingOptions, Strings
from statewise.frontend.session import Session
from statewise.frontend.state import ProgramState

PREFIX_WORTH_CACHING = 64  # characters; below it a prefill costs more than it saves


class Function:
    """A prompt program. Calling it is `run`.

    Raises TypeError for a function whose first parameter is not named `s`.
    """

    def __init__(
        self, func: Callable[..., Any], bound_arguments: dict[str, Any] | None = None
    ) -> None:
        signature = inspect.signature(func)
        names = list(signature.parameters)
        if not names or names[0] != "s":
            raise TypeError(f"the first parameter of {func!r} must be the state, named 's'")
        self.func = func
        self.bind_arguments = dict(bound_arguments or {})
        self.arg_names = names[1:]
        self._signature = signature.replace(
            parameters=[p for name, p in signature.parameters.items() if name != "s"]
        )
        functools.update_wrapper(self, func)

    @property
    def is_async(self) -> bool:
        """Whether the body is a coroutine function."""
        return inspect.iscoroutinefunction(self.func)

    def bind(self, **kwargs: Any) -> Function:
        """Return the same program with some arguments given; a call's own arguments win."""
        self._signature.bind_partial(**kwargs)
        return Function(self.func, {**self.bind_arguments, **kwargs})

    def run(  # noqa: PLR0913 (the language's own signature)
        self,
        *args: Any,
        max_new_tokens: int = 128,
        n: int = 1,
        stop: Strings | None = None,
        stop_token_ids: Sequence[int] | None = None,
        stop_regex: Strings | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        min_p: float = 0.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        ignore_eos: bool = False,
        return_logprob: bool | None = None,
        logprob_start_len: int | None = None,
        top_logprobs_num: int | None = None,
        return_text_in_logprobs: bool | None = None,
        stream: bool = False,
        backend: Any = None,
        use_thread: bool = True,
        cache_salt: str = "",
        exact: bool = False,
        **kwargs: Any,
    ) -> ProgramState:
        """Run once; the remaining arguments are the program's.

        Sampling options are the defaults of every `gen`. `cache_salt` keeps this run's cached state
        apart from that of other salts, `exact` has it rest on exact state only. Raises
        `ProgramError` at once with `use_thread=False`.
        """
        return self._new_run(locals()).start()

    def __call__(self, *args: Any, **kwargs: Any) -> ProgramState:
        """Run once, as `run` does."""
        return self.run(*args, **kwargs)

    async def arun(self, *args: Any, **kwargs: Any) -> ProgramState:
        """Run once in the running event loop; returns when everything has run.

        An `async def` body runs in this loop, a plain one in a thread. Takes `run`'s arguments and
        raises `ProgramError` where the program failed.
        """
        if not self.is_async:
            state = await asyncio.to_thread(self.run, *args, **kwargs)
            await state.async_sync()
            return state
        given = inspect.signature(self.run).bind(*args, **kwargs)
        given.apply_defaults()
        return await self._new_run(given.arguments).in_loop()

    def run_batch(  # noqa: PLR0913 (the language's own signature)
        self,
        batch_kwargs: Sequence[dict[str, Any] | Sequence[Any]],
        *,
        max_new_tokens: int = 128,
        n: int = 1,
        stop: Strings | None = None,
        stop_token_ids: Sequence[int] | None = None,
        stop_regex: Strings | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        min_p: float = 0.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        ignore_eos: bool = False,
        return_logprob: bool | None = None,
        logprob_start_len: int | None = None,
        top_logprobs_num: int | None = None,
        return_text_in_logprobs: bool | None = None,
        backend: Any = None,
        num_threads: int | str = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        return_exceptions: bool = False,
        cache_salt: str = "",
        exact: bool = False,
    ) -> Any:
        """Run once for each item (a dict or a tuple of arguments); results in the items' order.

        The constant text that all runs begin with is cached once before. `generator_style` returns
        an iterator that gives results as they become ready, in order. The first failure is raised
        and ends the batch, unless `return_exceptions` puts it in the result's place.
        """
        options = _options(locals())
        chosen = defaults.resolve(backend)
        bound = [self._item_arguments(item) for item in batch_kwargs]
        if len(bound) > 1:
            self._publish_prefix(chosen, CacheHints(cache_salt, checkpoint=True, exact=exact))

        def run_item(arguments: inspect.BoundArguments) -> ProgramState:
            session = Session(chosen, options, salt=cache_salt, exact=exact)
            state = Run(self.func, session, arguments).start()
            state.sync()
            return state

        results = batch.run_all(
            run_item,
            bound,
            num_threads=batch.thread_count(num_threads, len(bound)),
            progress_bar=progress_bar,
            return_exceptions=return_exceptions,
        )
        return results if generator_style else list(results)

    def trace(self, *args: Any, backend: Any = None, **kwargs: Any) -> trace.Trace:
        """Run the body without a model, up to its first use: what every run begins with.

        Arguments not given stand for themselves; needing one's value ends the trace too.
        """
        return trace.trace(self, defaults.resolve(backend), args, kwargs)

    def cache(self, backend: Any = None) -> str:
        """Cache the constant text that every run begins with; returns that text."""
        return self._publish_prefix(defaults.resolve(backend), CacheHints(checkpoint=True))

    def arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        """Call arguments over bound ones. Raises TypeError as a function call would."""
        given = self._signature.bind_partial(*args, **kwargs).arguments
        bound = {k: v for k, v in self.bind_arguments.items() if k not in given}
        for name, parameter in self._signature.parameters.items():
            is_needed = parameter.default is parameter.empty and name not in {**given, **bound}
            if is_needed and name in _RUN_OPTIONS:
                raise TypeError(
                    f"the program's argument {name!r} is also an option of run: "
                    "give it by position, with bind, or another name"
                )
        return self._signature.bind(*args, **{**bound, **kwargs})

    def _new_run(self, given: dict[str, Any]) -> Run:
        """Make a run from `run`'s arguments by name."""
        session = Session(
            defaults.resolve(given["backend"]),
            _options(given),
            given["stream"],
            given["use_thread"],
            given["cache_salt"],
            given["exact"],
        )
        return Run(self.func, session, self.arguments(given["args"], given["kwargs"]))

    def _item_arguments(self, item: Any) -> inspect.BoundArguments:
        if isinstance(item, dict):
            return self.arguments((), item)
        if isinstance(item, list | tuple):
            return self.arguments(item, {})
        raise TypeError(f"a batch item must be a dict or a tuple of arguments, not {item!r:.80}")

    def _publish_prefix(self, backend: Any, hints: CacheHints) -> str:
        prefix = trace.trace(self, backend, (), {}).prefix
        if len(prefix) <= PREFIX_WORTH_CACHING:
            return ""
        backend.publish(prefix, hints)
        return prefix

    def __repr__(self) -> str:
        return f"<statewise program {getattr(self.func, '__name__', self.func)}>"


_RUN_OPTIONS = frozenset(inspect.signature(Function.run).parameters) - {"self", "args", "kwargs"}
_OPTION_NAMES = frozenset(SamplingOptions.__dataclass_fields__)


def _options(given: dict[str, Any]) -> SamplingOptions:
    """Pick the sampling options among a call's local names."""
    return SamplingOptions(**{k: v for k, v in given.items() if k in _OPTION_NAMES})
