"""Telling a model's reasoning from its answer, by the marks its family writes.

Whole texts only: a text in the middle of its stream is not split.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_MODEL_TYPE = "deepseek-r1"


@dataclass(frozen=True)
class Marks:
    """`begin` and `end` around the reasoning; `opened`: the prompt already wrote `begin`."""

    begin: str
    end: str
    opened: bool = False


_THINK = Marks("<think>", "</think>")
MODEL_TYPES = {
    "deepseek-r1": Marks("<think>", "</think>", opened=True),
    "deepseek-v3": _THINK,
    "glm45": _THINK,
    "kimi": Marks("◁think▷", "◁/think▷"),
    "kimi_k2": Marks("<think>", "</think>", opened=True),
    "qwen3": _THINK,
    "qwen3-thinking": Marks("<think>", "</think>", opened=True),
    "step3": Marks("<think>", "</think>", opened=True),
    "minimax": Marks("<think>", "</think>", opened=True),
    "smollm3": _THINK,
}


def marks_of(model_type: str) -> Marks:
    """Return the marks of a model family. Raises ValueError naming the known families."""
    try:
        return MODEL_TYPES[model_type.lower()]
    except KeyError:
        known = ", ".join(sorted(MODEL_TYPES))
        raise ValueError(f"unknown reasoning model type {model_type!r}; known: {known}") from None


def split(text: str, model_type: str) -> tuple[str, str]:
    """`text` as (reasoning, answer).

    A text without an end mark is all reasoning if its reasoning was opened (by the text itself or,
    for families that say so, by the prompt), else all answer.
    """
    marks = marks_of(model_type)
    before, begun, after = text.partition(marks.begin)
    if begun and not before.strip():
        body = after
    elif marks.opened or marks.end in text:
        body = text
    else:
        return "", text
    thought, ended, answer = body.partition(marks.end)
    if not ended:
        return thought.strip(), ""
    return thought.strip(), answer.lstrip()
