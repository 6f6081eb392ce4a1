"""Chat templates: Jinja as model authors wrote them, rendered with the origin of every character.

The environment is sandboxed and immutable, trims blocks, and offers what published templates use:
`raise_exception`, `strftime_now`, `tojson` without HTML escapes, loop controls, `{% generation %}`.
On top, the code generator marks everything that stands in the template's source as trusted:

    <|im_start|>{{ 'user' + message.content }}     template text and string constants: trusted
                   ^^^^^^   ~~~~~~~~~~~~~~~        values from the conversation: a client's

so that the rendered prompt is a `TemplateText`, and control tokens in it can be told from text that
merely looks like them. Special tokens handed to the template, and the names of known roles, are
trusted too (templates build tokens such as '<|' + role + '|>').

This module does not know token ids, and reads no files.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from typing_extensions import override

from statewise.runtime.errors import InvalidRequestError, ModelLoadError
from statewise.runtime.tokenizer.provenance import TemplateText, join_texts

KNOWN_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
# Stands after the message that is to be continued; a noncharacter, so no text contains it.
CONTINUE_MARK = "\ufdd0"
# What a template's expressions raise on a conversation they were not written for.
RENDER_ERRORS = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class _OriginCodeGenerator(CodeGenerator):
    """Compiles string constants and template data to trusted text."""

    @override
    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        if type(node.value) is str:
            self.write(f"environment.trusted({node.value!r})")
        else:
            super().visit_Const(node, frame)

    @override
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("concat((")
        for part in node.nodes:
            self.write("str(")
            self.visit(part, frame)
            self.write("), ")
        self.write("))")

    @override
    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return f"environment.trusted({''.join(str(part) for part in group)!r})"


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part for training; its content is rendered as is."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    @override
    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _OriginEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose strings keep their origin."""

    code_generator_class = _OriginCodeGenerator
    concat = staticmethod(join_texts)
    trusted = staticmethod(TemplateText.trusted)


def _environment(now: Callable[[], float]) -> _OriginEnvironment:
    """Environment of all templates; `now` gives seconds since the epoch for `strftime_now`."""
    environment = _OriginEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,  # folding constants would lose their origin
        extensions=[_Generation, LoopControlExtension],
    )

    def strftime_now(form: str) -> str:
        return datetime.datetime.fromtimestamp(now()).astimezone().strftime(str(form))

    environment.filters["tojson"] = _to_json
    environment.filters["join"] = _join
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _join(values: Iterable[Any], separator: str = "", attribute: str | None = None) -> TemplateText:
    picked = (v if attribute is None else v[attribute] for v in values)
    return TemplateText.trusted("").join([]) + _glue(separator).join(str(v) for v in picked)


def _glue(separator: str) -> TemplateText:
    return separator if isinstance(separator, TemplateText) else TemplateText(separator)


class ChatTemplate:
    """One compiled template; `source` is what the server shows clients."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], now: Callable[[], float]
    ) -> None:
        """Compile. `special_tokens`: bos_token and the like, by the names templates use.

        Raises ModelLoadError for a template that is not valid Jinja.
        """
        self.source = source
        self._special = {k: TemplateText.trusted(v) for k, v in special_tokens.items()}
        try:
            self._template = _environment(now).from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelLoadError(f"chat template, line {error.lineno}: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        generation_prompt: bool = True,
        continue_last: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> TemplateText:
        """Render a conversation of plain data (strings, numbers, lists, objects).

        `continue_last` leaves the last message open, so that generation goes on with it.
        `variables` are the template's own switches (thinking on or off). InvalidRequestError where
        the template refuses the conversation.
        """
        prepared = [_prepared(message) for message in messages]
        if continue_last:
            _mark_last(prepared)
        arguments = {
            **self._special,
            **(variables or {}),
            "messages": prepared,
            "tools": tools,
            "add_generation_prompt": generation_prompt and not continue_last,
        }
        try:
            chunks = self._template.root_render_func(self._template.new_context(arguments))
            text = join_texts(chunks)
        except jinja2.TemplateError as error:
            raise InvalidRequestError(f"chat template: {error.message or error}") from error
        except RENDER_ERRORS as error:
            raise InvalidRequestError(f"chat template: {type(error).__name__}: {error}") from error
        return _cut_at_mark(text) if continue_last else text


def _prepared(message: Mapping[str, Any]) -> dict[str, Any]:
    """One message as templates expect it: no nulls, and a known role counts as the template's."""
    out = {key: value for key, value in message.items() if value is not None}
    role = out.get("role")
    if isinstance(role, str) and role in KNOWN_ROLES:
        out["role"] = TemplateText.trusted(role)
    return out


def _mark_last(messages: list[dict[str, Any]]) -> None:
    content = messages[-1].get("content") if messages else None
    if not isinstance(content, str):
        raise InvalidRequestError("the message to continue has no text")
    messages[-1]["content"] = content + CONTINUE_MARK


def _cut_at_mark(text: TemplateText) -> TemplateText:
    at = text.rfind(CONTINUE_MARK)
    if at < 0:
        raise InvalidRequestError("the chat template does not show the message to continue")
    return text[:at]
