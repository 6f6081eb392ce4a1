"""How a generation is asked for: options of a run, overridden by options of one `gen`.

`SamplingOptions` holds what a program may say; every field is None where nothing was said, so that
"inherit from the run" and "the server's default" are one rule. Conversion to the native request
happens here; ranges are checked by the server, which knows the model.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

# Regular expressions of `dtype`, in the common subset of Python's and the server's grammar engine.
# A blank ends a number (`NUMBER_STOPS`), and anything may follow it: the model's next word usually
# comes in one token with its blank, and forbidding it would make the model go on with digits.
_REST = r"([ \n](.|\n)*)?"
DTYPE_REGEX = {
    "int": r"[+-]?[0-9]+" + _REST,
    "float": r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)" + _REST,
    "bool": r"(True|False)",
    "str": r'"[^"\\\n]*"',
}
NUMBER_STOPS = (" ", "\n")

Strings = str | Sequence[str]


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Options of one generation; None means "as the run says", then "as the server does"."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    n: int | None = None
    stop: Strings | None = None
    stop_token_ids: Sequence[int] | None = None
    stop_regex: Strings | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    sampling_seed: int | None = None
    regex: str | None = None
    json_schema: str | None = None
    ebnf: str | None = None
    # asked beside the sampling parameters
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None

    def over(self, base: SamplingOptions) -> SamplingOptions:
        """Complete these options with `base` where they say nothing."""
        said = {k: v for k, v in self._items() if v is not None}
        return dataclasses.replace(base, **said)

    def with_stops(self, extra: Sequence[str]) -> SamplingOptions:
        """Return the same with more stop strings."""
        if not extra:
            return self
        own = [self.stop] if isinstance(self.stop, str) else list(self.stop or ())
        return dataclasses.replace(self, stop=tuple(dict.fromkeys([*own, *extra])))

    def _items(self) -> list[tuple[str, Any]]:
        return [(f.name, getattr(self, f.name)) for f in dataclasses.fields(self)]

    def sampling_params(self) -> dict[str, Any]:
        """Return the native API's `sampling_params`."""
        return {
            name: _plain(value)
            for name, value in self._items()
            if value is not None and name not in REQUEST_FIELDS
        }

    def request_fields(self) -> dict[str, Any]:
        """Return what the native API takes beside `sampling_params`."""
        return {
            name: value
            for name, value in self._items()
            if value is not None and name in REQUEST_FIELDS
        }


REQUEST_FIELDS = frozenset(
    {"return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs"}
)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple | set | frozenset) else value


def dtype_name(dtype: type | str) -> str:
    """`int`, `"int"`, ... as a name. Raises ValueError for a type that has no pattern."""
    name = dtype if isinstance(dtype, str) else dtype.__name__
    name = {"string": "str", "integer": "int", "boolean": "bool"}.get(name, name)
    if name not in DTYPE_REGEX:
        raise ValueError(f"dtype must be one of {', '.join(DTYPE_REGEX)}, not {dtype!r}")
    return name


def grammar_options(
    dtype: type | str | None, regex: str | None, json_schema: object, ebnf: str | None
) -> dict[str, str]:
    """Return the one grammar asked for, as options. Raises ValueError where several are given."""
    given = {"dtype": dtype, "regex": regex, "json_schema": json_schema, "ebnf": ebnf}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise ValueError(f"{' and '.join(named)} exclude each other")
    if dtype is not None:
        return {"regex": DTYPE_REGEX[dtype_name(dtype)]}
    if json_schema is not None:
        return {"json_schema": json_schema_text(json_schema)}
    return {name: cast(str, given[name]) for name in named}


def dtype_stops(dtype: type | str | None) -> tuple[str, ...]:
    """Stop strings that end a value of this type."""
    return NUMBER_STOPS if dtype is not None and dtype_name(dtype) in ("int", "float") else ()


def json_schema_text(schema: object) -> str:
    """Return a JSON schema as text, from text, a dict, a pydantic model, or a type msgspec knows.

    A schema made from a class allows the class's fields only, unless it says otherwise.
    Raises ValueError for text that is not JSON and TypeError for what no schema can be made of.
    """
    if isinstance(schema, str):
        try:
            json.loads(schema)
        except ValueError as error:
            raise ValueError(f"json_schema is not valid JSON: {error}") from None
        return schema
    if isinstance(schema, dict):
        return json.dumps(schema)
    maker = getattr(schema, "model_json_schema", None)  # a pydantic model
    if maker is not None:
        return json.dumps(_closed(maker()))
    if isinstance(schema, type):
        return _msgspec_schema(schema)
    raise TypeError(f"json_schema takes text, a dict, or a type, not {type(schema).__name__}")


def _closed(schema: Any) -> Any:
    """Return the schema with every object that lists its properties held to them."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(value) for name, value in schema.items()}
    if isinstance(closed.get("properties"), dict) and closed.get("type") == "object":
        closed.setdefault("additionalProperties", False)
    return closed


def _msgspec_schema(schema: type) -> str:
    import msgspec

    try:
        return json.dumps(_closed(msgspec.json.schema(schema)))
    except TypeError as error:
        raise TypeError(f"no JSON schema can be made of {schema.__name__}: {error}") from None
