"""Options: inheritance, types, schemas."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pydantic
import pytest

import statewise as sw
from statewise.frontend.expressions import Gen
from statewise.frontend.sampling import DTYPE_REGEX, SamplingOptions, json_schema_text


def options_of(expr: Any) -> SamplingOptions:
    assert isinstance(expr, Gen)
    return expr.options


def test_unset_options_inherit() -> None:
    base = SamplingOptions(temperature=1.0, stop="a", max_new_tokens=5)
    merged = SamplingOptions(temperature=0.0, stop=[]).over(base)
    assert (merged.temperature, merged.stop, merged.max_new_tokens) == (0.0, [], 5)


def test_stops_add_up_without_repetition() -> None:
    assert SamplingOptions(stop="a").with_stops(["b", "a"]).stop == ("a", "b")
    assert SamplingOptions().with_stops(["b"]).stop == ("b",)
    assert SamplingOptions(stop="a").with_stops([]).stop == "a"


def test_names_of_the_native_api() -> None:
    expr = sw.gen("x", max_tokens=3, min_tokens=1, seed=7, return_logprob=True, top_logprobs_num=2)
    options = options_of(expr)
    assert options.sampling_params() == {
        "max_new_tokens": 3,
        "min_new_tokens": 1,
        "sampling_seed": 7,
    }
    assert options.request_fields() == {"return_logprob": True, "top_logprobs_num": 2}


@pytest.mark.parametrize(
    ("dtype", "good", "bad"),
    [
        (int, ["1", "-20", "+3 ", "4\n", "24 hours\nand"], ["1.5", "x", "", "1x"]),
        (float, ["1", "1.5", ".5", "-2.", "3.25 km"], [".", "x", ""]),
        (bool, ["True", "False"], ["true", ""]),
        (str, ['"a b"', '""'], ["a", '"a"b"']),
    ],
)
def test_types_have_patterns(dtype: type, good: list[str], bad: list[str]) -> None:
    options = options_of(sw.gen("x", dtype=dtype))
    assert options.regex == DTYPE_REGEX[dtype.__name__]
    assert options_of(sw.gen("x", dtype=dtype.__name__)).regex == options.regex
    assert all(re.fullmatch(options.regex, text) for text in good)
    assert not any(re.fullmatch(options.regex, text) for text in bad)


def test_numbers_end_at_blanks() -> None:
    assert options_of(sw.gen_int("x", stop="!")).stop == ("!", " ", "\n")
    assert options_of(sw.gen("x", dtype=bool)).stop is None
    assert options_of(sw.gen_string("x", max_tokens=4)).max_new_tokens == 4


def test_grammars_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="dtype and regex exclude"):
        sw.gen("x", dtype=int, regex="a")
    with pytest.raises(ValueError, match="json_schema and ebnf"):
        sw.gen("x", json_schema="{}", ebnf="root ::= 'a'")
    with pytest.raises(ValueError, match="dtype must be one of"):
        sw.gen("x", dtype=list)


class Part(pydantic.BaseModel):
    age: int


class Model(pydantic.BaseModel):
    parts: list[Part]


class StructPart(msgspec.Struct):
    age: int


class Struct(msgspec.Struct):
    parts: list[StructPart]


def test_schemas_of_many_kinds() -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}}
    assert json.loads(json_schema_text(schema)) == schema
    assert json_schema_text('{"type": "string"}') == '{"type": "string"}'
    for kind in (Model, Struct):
        text = json_schema_text(kind)
        assert '"age"' in text
        assert '"integer"' in text
        assert text.count('"additionalProperties": false') == 2
    assert options_of(sw.gen("x", json_schema=Model)).json_schema == json_schema_text(Model)


def test_what_is_no_schema() -> None:
    with pytest.raises(ValueError, match="not valid JSON"):
        sw.gen("x", json_schema="{")
    with pytest.raises(TypeError, match="takes text, a dict, or a type"):
        sw.gen("x", json_schema=5)
    with pytest.raises(TypeError, match="no JSON schema"):
        sw.gen("x", json_schema=object)


def test_reasoning_marks_are_known() -> None:
    with pytest.raises(ValueError, match=r"unknown reasoning model type 'nope'.*qwen3"):
        sw.separate_reasoning(sw.gen("x"), "nope")
