"""The protocol between a program's interpreter and whatever answers it.

A backend gets the text and the conversation so far and returns completions with the service's own
`meta_info`. Calls block; the interpreter runs each state in its own thread, so a backend must be
thread-safe. Anything that satisfies `Backend` can be passed as `backend=`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from statewise.frontend.chat_template import ChatTemplate
from statewise.frontend.choices import ChoicesDecision, ChoicesMethod
from statewise.frontend.sampling import SamplingOptions


@dataclass(frozen=True)
class Prompt:
    """What the model has seen so far.

    `text` is the whole text, `messages` the closed turns, `role` the open turn and `partial` that
    turn's content; a backend uses the text or the conversation.
    """

    text: str
    messages: tuple[dict[str, Any], ...] = ()
    role: str | None = None
    partial: str = ""


@dataclass(frozen=True)
class CacheHints:
    """What a call asks of the cache.

    Whose state to share, whether to keep the prompt's end, and whether to rest on exact state only.
    """

    salt: str = ""
    checkpoint: bool = False
    exact: bool = False


@dataclass(frozen=True)
class Completion:
    """Generated text; in a stream, the text since the last completion."""

    text: str
    meta_info: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class Backend(Protocol):
    """A service that continues text. Every method raises `BackendError` when the service fails."""

    def chat_template(self) -> ChatTemplate:
        """Return the text around turns. Raises `TemplateError` where the model has no template."""

    def generate(
        self, prompt: Prompt, options: SamplingOptions, hints: CacheHints
    ) -> list[Completion]:
        """Continue the prompt; one completion for each of `options.n`."""

    def stream(
        self, prompt: Prompt, options: SamplingOptions, hints: CacheHints
    ) -> Iterator[Completion]:
        """Continue the prompt, a piece at a time; the last piece has the final `meta_info`."""

    def publish(self, text: str, hints: CacheHints) -> dict[str, Any]:
        """Compute and cache the text without generating; returns its `meta_info`."""

    def select(
        self, prompt: Prompt, choices: Sequence[str], method: ChoicesMethod, hints: CacheHints
    ) -> ChoicesDecision:
        """Pick the choice that continues the prompt best."""

    def flush_cache(self) -> None:
        """Drop everything cached."""

    def get_server_info(self) -> dict[str, Any]:
        """Return settings and state of the service."""
