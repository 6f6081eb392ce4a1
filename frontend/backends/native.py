"""The native generate API as a backend, whatever carries it.

`NativeBackend` builds requests and reads answers; its subclasses carry them: `RuntimeEndpoint` over
HTTP, `EngineBackend` within the process. Selection by log probability lives in `scoring`.

An answer that ended because the service gave up (`finish_reason` abort) is an error, never a
shorter text.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from statewise.frontend.backends import scoring
from statewise.frontend.backends.base import CacheHints, Completion, Prompt
from statewise.frontend.backends.http import error_text
from statewise.frontend.chat_template import ChatTemplate
from statewise.frontend.choices import ChoicesDecision, ChoicesMethod, Constrained
from statewise.frontend.errors import BackendError, TemplateError
from statewise.frontend.sampling import SamplingOptions

Body = dict[str, Any]


class NativeBackend(ABC):
    """A `Backend` over the native API.

    `chat_template` replaces the served model's: a template's text, or the name "plain".
    """

    def __init__(self, chat_template: str | None = None) -> None:
        self._override = chat_template
        self._template: ChatTemplate | None = None
        self._template_lock = threading.Lock()

    @abstractmethod
    def request(self, body: Body) -> Any:
        """Run one native generate request; returns its answer, a list for several prompts."""

    @abstractmethod
    def request_stream(self, body: Body) -> Iterator[Any]:
        """Run one native generate request; yields answers with the text so far."""

    @abstractmethod
    def model_info(self) -> dict[str, Any]:
        """Return what is served: `model_path`, `chat_template`, special tokens."""

    @abstractmethod
    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text as a prompt (with what the server puts before one)."""

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""

    def chat_template(self) -> ChatTemplate:
        """Return the text around turns. Raises `TemplateError` where the model has no template."""
        with self._template_lock:
            if self._template is None:
                self._template = self._make_template()
            return self._template

    def generate(
        self, prompt: Prompt, options: SamplingOptions, hints: CacheHints
    ) -> list[Completion]:
        """See `Backend`."""
        answer = self.request(_body(prompt.text, options, hints))
        return [_completion(item) for item in (answer if isinstance(answer, list) else [answer])]

    def stream(
        self, prompt: Prompt, options: SamplingOptions, hints: CacheHints
    ) -> Iterator[Completion]:
        """See `Backend`."""
        seen = 0
        for answer in self.request_stream({**_body(prompt.text, options, hints), "stream": True}):
            whole = _completion(answer)
            yield Completion(whole.text[seen:], whole.meta_info)
            seen = len(whole.text)

    def publish(self, text: str, hints: CacheHints) -> dict[str, Any]:
        """See `Backend`."""
        answer = self.request(_body(text, SamplingOptions(max_new_tokens=0), hints))
        return _completion(answer).meta_info

    def select(
        self, prompt: Prompt, choices: Sequence[str], method: ChoicesMethod, hints: CacheHints
    ) -> ChoicesDecision:
        """See `Backend`."""
        if isinstance(method, Constrained):
            return scoring.select_constrained(self, prompt.text, choices, hints)
        return scoring.select_scored(self, prompt.text, choices, method, hints)

    @abstractmethod
    def flush_cache(self) -> None:
        """See `Backend`."""

    @abstractmethod
    def get_server_info(self) -> dict[str, Any]:
        """See `Backend`."""

    def _make_template(self) -> ChatTemplate:
        if self._override is not None and "{" not in self._override:
            return ChatTemplate.named(self._override)
        info = self.model_info()
        source = self._override or info.get("chat_template")
        if not source:
            raise TemplateError(
                f"the served model ({info.get('model_path', 'unknown')}) has no chat template, so "
                "system, user and assistant turns have no form: use plain text, or give the "
                'backend a template, such as chat_template="plain"'
            )
        tokens = {k: v for k, v in info.items() if k.endswith("_token") and isinstance(v, str)}
        strip_bos = bool(info.get("add_bos_token", True))
        return ChatTemplate(source, tokens, strip_bos=strip_bos)


def _body(text: str, options: SamplingOptions, hints: CacheHints) -> Body:
    body: Body = {
        "text": text,
        "sampling_params": options.sampling_params(),
        **options.request_fields(),
    }
    return _hinted(body, hints)


def _hinted(body: Body, hints: CacheHints) -> Body:
    """Return the request with what it asks of the cache."""
    if hints.salt:
        body["cache_salt"] = hints.salt
    if hints.checkpoint:
        body["checkpoint"] = True
    if hints.exact:
        body["exact"] = True
    return body


def _completion(answer: Any) -> Completion:
    """Read one answer. Raises `BackendError` for an error or an aborted request."""
    if not isinstance(answer, dict) or "text" not in answer:
        message, code = error_text(answer)
        raise BackendError(message or "empty answer", code=code)
    meta = answer.get("meta_info") or {}
    finish = meta.get("finish_reason")
    if isinstance(finish, dict) and finish.get("type") == "abort":
        raise BackendError(
            f"the request was aborted: {finish.get('message') or 'no reason given'}",
            code=str(finish.get("code") or "aborted"),
        )
    return Completion(answer["text"] or "", meta)
