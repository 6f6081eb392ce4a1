"""The words of the language: constructors of expressions, as a program writes them.

Names, order and defaults of arguments follow the frontend that people already know
(docs/frontend.md lists them). Everything here only builds and checks expressions; wrong arguments
fail at the line that wrote them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

from statewise.frontend import reasoning
from statewise.frontend.choices import ChoicesMethod, token_length_normalized
from statewise.frontend.expressions import (
    Checkpoint,
    Expr,
    Gen,
    Media,
    RoleBegin,
    RoleEnd,
    Select,
    SeparateReasoning,
    as_expr,
    role_turn,
)
from statewise.frontend.expressions import Sequence as ExprSequence
from statewise.frontend.program import Function
from statewise.frontend.sampling import SamplingOptions, Strings, dtype_stops, grammar_options


@overload
def function(func: Callable[..., Any]) -> Function: ...
@overload
def function(
    func: None = None, num_api_spec_tokens: int | None = None
) -> Callable[[Callable[..., Any]], Function]: ...
def function(
    func: Callable[..., Any] | None = None, num_api_spec_tokens: int | None = None
) -> Function | Callable[[Callable[..., Any]], Function]:
    """Make a prompt program of a function whose first parameter is `s`, plain or `async`.

    `num_api_spec_tokens` is accepted for programs written elsewhere; it only saves calls there.
    """
    del num_api_spec_tokens
    return Function(func) if func is not None else Function


def gen(  # noqa: PLR0913 (the language's own signature)
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: Strings | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: Strings | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: type | str | None = None,
    choices: Sequence[str] | None = None,
    choices_method: ChoicesMethod | None = None,
    regex: str | None = None,
    json_schema: object = None,
    ebnf: str | None = None,
    seed: int | None = None,
    repetition_penalty: float | None = None,
) -> Expr:
    """Let the model write; the result is variable `name`. None inherits from the run.

    `dtype` is int, float, bool or str (the value stays text); `json_schema` takes text, a dict, a
    pydantic model or a msgspec type; `choices` makes this a `select`; `n` above 1 gives a list, the
    first of which enters the text. Raises ValueError for options that exclude each other.
    """
    if choices is not None:
        method = choices_method or token_length_normalized
        return select(name, choices, temperature or 0.0, method)
    options = SamplingOptions(
        max_new_tokens=max_tokens,
        min_new_tokens=min_tokens,
        n=n,
        stop=stop,
        stop_token_ids=stop_token_ids,
        stop_regex=stop_regex,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        repetition_penalty=repetition_penalty,
        ignore_eos=ignore_eos,
        sampling_seed=seed,
        return_logprob=return_logprob,
        logprob_start_len=logprob_start_len,
        top_logprobs_num=top_logprobs_num,
        return_text_in_logprobs=return_text_in_logprobs,
        **grammar_options(dtype, regex, json_schema, ebnf),
    )
    return Gen(name, options.with_stops(dtype_stops(dtype)))


def gen_int(  # noqa: PLR0913 (the language's own signature)
    name: str | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    stop: Strings | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: Strings | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
) -> Expr:
    """Let the model write an integer: `gen` with `dtype=int`."""
    return gen(dtype=int, **locals())


def gen_string(  # noqa: PLR0913 (the language's own signature)
    name: str | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    stop: Strings | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: Strings | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
) -> Expr:
    """Let the model write a quoted string: `gen` with `dtype=str`."""
    return gen(dtype=str, **locals())


def select(
    name: str | None = None,
    choices: Sequence[str] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesMethod = token_length_normalized,
) -> Select:
    """Let the model pick one of `choices`; the pick is variable `name` and enters the text.

    Raises ValueError for no choices, an empty choice, or a temperature (picking is deterministic).
    """
    if not choices or isinstance(choices, str):
        raise ValueError("select needs a list of at least one choice")
    if "" in choices:
        raise ValueError(f"a choice must not be empty: {list(choices)!r:.200}")
    if temperature > 1e-5:
        raise ValueError("select is deterministic: its temperature must be 0")
    return Select(name, tuple(choices), choices_method)


def system(expr: str | Expr | None = None) -> ExprSequence:
    """Make a system turn."""
    return role_turn("system", expr)


def user(expr: str | Expr | None = None) -> ExprSequence:
    """Make a user turn."""
    return role_turn("user", expr)


def assistant(expr: str | Expr | None = None) -> ExprSequence:
    """Make an assistant turn."""
    return role_turn("assistant", expr)


def system_begin() -> RoleBegin:
    """Open a system turn."""
    return RoleBegin("system")


def system_end() -> RoleEnd:
    """Close a system turn."""
    return RoleEnd("system")


def user_begin() -> RoleBegin:
    """Open a user turn."""
    return RoleBegin("user")


def user_end() -> RoleEnd:
    """Close a user turn."""
    return RoleEnd("user")


def assistant_begin() -> RoleBegin:
    """Open an assistant turn."""
    return RoleBegin("assistant")


def assistant_end() -> RoleEnd:
    """Close an assistant turn."""
    return RoleEnd("assistant")


def image(expr: object) -> Media:
    """Add an image. Accepted everywhere; running it fails until a served model has vision."""
    return Media("image", expr)


def video(path: str, num_frames: int = 8) -> Media:
    """Add a video. Accepted everywhere; running it fails until a served model has vision."""
    return Media("video", (path, num_frames))


def separate_reasoning(
    expr: str | Expr | None = None, model_type: str | None = None
) -> SeparateReasoning:
    """Split what `expr` generates: `x` keeps the answer, `x_reasoning_content` the reasoning.

    Raises ValueError for a `model_type` whose marks are not known.
    """
    kind = model_type or reasoning.DEFAULT_MODEL_TYPE
    reasoning.marks_of(kind)
    return SeparateReasoning(as_expr("" if expr is None else expr), kind)


def checkpoint() -> Checkpoint:
    """Publish the text so far and ask the server to keep the state at its end."""
    return Checkpoint()
