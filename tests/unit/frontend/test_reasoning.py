"""Splitting reasoning from answers."""

from __future__ import annotations

import pytest

from statewise.frontend.reasoning import split


@pytest.mark.parametrize(
    ("text", "model_type", "expected"),
    [
        ("<think>a\nb</think>\n\nc", "qwen3", ("a\nb", "c")),
        ("plain", "qwen3", ("", "plain")),
        ("a</think>c", "qwen3", ("a", "c")),
        ("<think>a", "qwen3", ("a", "")),
        ("c <think> d", "qwen3", ("", "c <think> d")),
        ("a</think> c", "deepseek-r1", ("a", "c")),
        ("a", "deepseek-r1", ("a", "")),
        ("  <think>a</think>c", "DeepSeek-R1", ("a", "c")),
        ("◁think▷a◁/think▷c", "kimi", ("a", "c")),
        ("", "qwen3", ("", "")),
    ],
)
def test_split(text: str, model_type: str, expected: tuple[str, str]) -> None:
    assert split(text, model_type) == expected
