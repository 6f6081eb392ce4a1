"""How the next token is chosen, as a client may ask for it.

One frozen struct crosses every process unchanged. `normalized` checks ranges and turns "null
means default" into values; it is called once, where a request enters. Names and defaults follow
the native API (docs/api.md).
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from statewise.runtime.errors import InvalidRequestError
from statewise.runtime.stop_regex import compile_stop_regexes

MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_N = 128
MAX_TOP_LOGPROBS = 128
GREEDY_BELOW = 1e-6


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Sampling and stopping. `max_new_tokens=0` prefills only; `top_k=-1` means no limit."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: tuple[str, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    sampling_seed: int | None = None
    n: int = 1
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def grammar(self) -> tuple[str, str] | None:
        """(kind, text) of the one grammar asked for, or None."""
        for kind in ("json_schema", "regex", "ebnf"):
            text = getattr(self, kind)
            if text is not None:
                return kind, text
        return None


_FLOAT_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 1e4),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, 2.0),
}
_OPEN_BELOW = {"top_p", "repetition_penalty"}
_BOOLS = {"ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"}


def _bad(name: str, value: object, want: str) -> InvalidRequestError:
    shown = repr(value)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return InvalidRequestError(f"sampling parameter {name!r} is {shown}; it must be {want}")


def _as_int(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _bad(name, value, f"an integer from {low} to {high}")
    return value


def _as_float(name: str, value: object) -> float:
    low, high = _FLOAT_RANGES[name]
    want = f"a number {'above' if name in _OPEN_BELOW else 'from'} {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _bad(name, value, want)
    if not low <= value <= high or (name in _OPEN_BELOW and value == low):
        raise _bad(name, value, want)
    return float(value)


def _as_strings(name: str, value: object) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(s, str) for s in items):
        raise _bad(name, value, "a string or a list of strings")
    if not isinstance(value, str) and "" in items:
        raise _bad(name, value, "a list of strings that are not empty")
    if len(items) > MAX_STOPS or any(len(s) > MAX_STOP_CHARS for s in items):
        raise _bad(name, value, f"at most {MAX_STOPS} strings of {MAX_STOP_CHARS} characters")
    return tuple(s for s in items if s)


def _as_bias(value: object, vocab_size: int) -> tuple[tuple[int, float], ...]:
    pairs = value.items() if isinstance(value, dict) else value
    out = []
    try:
        for token, bias in pairs:  # type: ignore[attr-defined]
            token_id, amount = int(token), float(bias)
            if not 0 <= token_id < vocab_size or not -100.0 <= amount <= 100.0:
                raise ValueError(token)
            out.append((token_id, amount))
    except (TypeError, ValueError):
        want = f"a map from token ids below {vocab_size} to numbers from -100 to 100"
        raise _bad("logit_bias", value, want) from None
    return tuple(out)


def _checked(name: str, value: Any, vocab_size: int) -> Any:
    if name in _FLOAT_RANGES:
        return _as_float(name, value)
    if name in _BOOLS:
        if not isinstance(value, bool):
            raise _bad(name, value, "true or false")
        return value
    if name == "stop":
        return _as_strings(name, value)
    if name == "stop_regex":
        patterns = _as_strings(name, value)
        compile_stop_regexes(patterns)
        return patterns
    if name == "stop_token_ids":
        ids = [value] if isinstance(value, int) else value
        if not isinstance(ids, list | tuple) or len(ids) > MAX_STOPS:
            raise _bad(name, value, f"a list of at most {MAX_STOPS} token ids")
        return tuple(_as_int(name, i, 0, vocab_size - 1) for i in ids)
    if name == "logit_bias":
        return _as_bias(value, vocab_size)
    if name in ("json_schema", "regex", "ebnf"):
        if not isinstance(value, str):
            raise _bad(name, value, "a string")
        return value
    if name == "top_k":
        return -1 if value in (0, -1) else _as_int(name, value, 1, 1 << 31)
    high = {"n": MAX_N, "sampling_seed": (1 << 63) - 1}.get(name, 1 << 31)
    return _as_int(name, value, 1 if name == "n" else 0, high)


def normalized(fields: dict[str, Any], vocab_size: int) -> SamplingParams:
    """Check `fields` (a client's JSON object) and fill defaults.

    Unknown names, wrong types, out-of-range and non-finite numbers raise `InvalidRequestError`
    naming the field. None means default.
    """
    known = SamplingParams.__struct_fields__
    checked: dict[str, Any] = {}
    for name, value in fields.items():
        if name not in known:
            raise InvalidRequestError(f"unknown sampling parameter {name!r}")
        if value is not None:
            checked[name] = _checked(name, value, vocab_size)
    params = SamplingParams(**checked)
    if sum(g is not None for g in (params.json_schema, params.regex, params.ebnf)) > 1:
        raise InvalidRequestError("json_schema, regex and ebnf exclude each other")
    if params.min_new_tokens > params.max_new_tokens:
        raise InvalidRequestError(
            f"min_new_tokens {params.min_new_tokens} exceeds max_new_tokens {params.max_new_tokens}"
        )
    return params
