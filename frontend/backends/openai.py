"""Any service that speaks the OpenAI API, as a backend.

Chat models get the conversation: `gen` belongs into an assistant turn, first thing in it, because
the interface has no way to start an answer. Completion models get the text. What the interface
cannot say is refused by name, never dropped in silence, except for cache hints, which only save
work.

No client library is needed; requests go through the same small HTTP client as the native API.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from statewise.frontend.backends.base import CacheHints, Completion, Prompt
from statewise.frontend.backends.http import HttpClient, error_text
from statewise.frontend.backends.scoring import escape
from statewise.frontend.chat_template import PLAIN, ChatTemplate
from statewise.frontend.choices import ChoicesDecision, ChoicesMethod
from statewise.frontend.errors import BackendError
from statewise.frontend.sampling import SamplingOptions

DEFAULT_URL = "https://api.openai.com/v1"
_COMPLETION_MODELS = re.compile(r"(instruct$|^davinci|^babbage|^text-)")

# Options as the API names them; `_EXTRA` ones exist on most open servers, not at OpenAI.
_STANDARD = {
    "n": "n",
    "stop": "stop",
    "temperature": "temperature",
    "top_p": "top_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "sampling_seed": "seed",
}
_EXTRA = {
    "min_new_tokens": "min_tokens",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "ignore_eos": "ignore_eos",
    "stop_token_ids": "stop_token_ids",
    "regex": "regex",
    "ebnf": "ebnf",
}
_NEUTRAL = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": False, "n": 1}


class OpenAI:
    """`model` at an OpenAI-compatible `base_url`.

    The key is `api_key` or the environment's OPENAI_API_KEY. `is_chat_model` (guessed from the
    model's name) chooses between the two interfaces. `chat_template` only shapes `s.text()`.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        is_chat_model: bool | None = None,
        chat_template: ChatTemplate | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self.model_name = model_name
        url = base_url or os.environ.get("OPENAI_BASE_URL") or DEFAULT_URL
        key = api_key or os.environ.get("OPENAI_API_KEY")
        self._http = HttpClient(url, key, timeout_s=timeout_s)
        guess = _COMPLETION_MODELS.search(model_name) is None
        self.is_chat_model = guess if is_chat_model is None else is_chat_model
        self._template = chat_template or ChatTemplate.named(PLAIN)

    def chat_template(self) -> ChatTemplate:
        """Return the text around turns, as `s.text()` shows it."""
        return self._template

    def generate(
        self, prompt: Prompt, options: SamplingOptions, hints: CacheHints
    ) -> list[Completion]:
        """See `Backend`."""
        answer = self._http.call("POST", self._path, self._body(prompt, options, hints))
        choices = _choices(answer)
        if not choices:
            raise BackendError(f"an answer without choices: {answer!r:.200}")
        usage = answer.get("usage") or {}
        return [
            _completion(choice, usage if i == 0 else {}, answer.get("id"))  # it is of all together
            for i, choice in enumerate(choices)
        ]

    def stream(
        self, prompt: Prompt, options: SamplingOptions, hints: CacheHints
    ) -> Iterator[Completion]:
        """See `Backend`."""
        body = self._body(prompt, options, hints)
        body.update(stream=True, stream_options={"include_usage": True})
        finish: Any = None
        for event in self._http.events(self._path, body):
            usage = event.get("usage") or {} if isinstance(event, dict) else {}
            for choice in _choices(event) or [{}]:
                finish = choice.get("finish_reason") or finish
                piece = _completion({**choice, "finish_reason": finish}, usage, event.get("id"))
                yield piece

    def publish(self, text: str, hints: CacheHints) -> dict[str, Any]:
        """Do nothing: the interface cannot ask for it, and the next call computes it anyway."""
        return {}

    def select(
        self, prompt: Prompt, choices: Sequence[str], method: ChoicesMethod, hints: CacheHints
    ) -> ChoicesDecision:
        """Let the model write one of the choices; the interface cannot score them.

        Chat models are held to them by a JSON schema, completion models by a regular expression
        (which OpenAI's own service does not take). `method` has no say.
        """
        if self.is_chat_model:
            return self._select_by_schema(prompt, choices, hints)
        pattern = "(" + "|".join(escape(choice) for choice in choices) + ")"
        longest = max(len(choice.encode()) for choice in choices)
        options = SamplingOptions(temperature=0.0, max_new_tokens=longest + 1, regex=pattern)
        found = self.generate(prompt, options, hints)[0]
        return ChoicesDecision(_checked(found.text, choices), found.meta_info)

    def flush_cache(self) -> None:
        """Raise `BackendError`: the interface has no such call."""
        raise BackendError("the OpenAI interface cannot flush a cache")

    def get_server_info(self) -> dict[str, Any]:
        """Return what the service says of its models."""
        return {"models": _listed(self._http.call("GET", "/models"))}

    @property
    def _path(self) -> str:
        return "/chat/completions" if self.is_chat_model else "/completions"

    def _select_by_schema(
        self, prompt: Prompt, choices: Sequence[str], hints: CacheHints
    ) -> ChoicesDecision:
        schema = {
            "type": "object",
            "properties": {"choice": {"type": "string", "enum": list(choices)}},
            "required": ["choice"],
            "additionalProperties": False,
        }
        options = SamplingOptions(
            temperature=0.0, max_new_tokens=512, json_schema=json.dumps(schema)
        )
        found = self.generate(prompt, options, hints)[0]
        try:
            choice = json.loads(found.text)["choice"]
        except (ValueError, LookupError, TypeError):
            raise BackendError(f"the service did not hold to the choices: {found.text!r}") from None
        return ChoicesDecision(_checked(choice, choices), found.meta_info)

    def _body(self, prompt: Prompt, options: SamplingOptions, hints: CacheHints) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model_name}
        if self.is_chat_model:
            body["messages"] = _messages(prompt)
        else:
            body["prompt"] = prompt.text
        for names in (_STANDARD, _EXTRA):
            for ours, theirs in names.items():
                value = getattr(options, ours)
                if value is not None and value != _NEUTRAL.get(ours) and value != ():
                    body[theirs] = list(value) if isinstance(value, tuple) else value
        if options.max_new_tokens is not None:
            body["max_completion_tokens" if self.is_chat_model else "max_tokens"] = (
                options.max_new_tokens
            )
        body.update(_format(options))
        body.update(self._logprobs(options))
        if options.stop_regex:
            raise BackendError("the OpenAI interface takes no stop_regex")
        if hints.salt:
            body["cache_salt"] = hints.salt
        if hints.exact:
            body["exact"] = True
        return body

    def _logprobs(self, options: SamplingOptions) -> dict[str, Any]:
        if not options.return_logprob:
            return {}
        top = options.top_logprobs_num or 0
        return {"logprobs": True, "top_logprobs": top} if self.is_chat_model else {"logprobs": top}


def _messages(prompt: Prompt) -> list[dict[str, Any]]:
    if prompt.role != "assistant":
        raise BackendError("a chat model generates inside an assistant turn only")
    if prompt.partial.strip():
        raise BackendError(
            "a chat interface cannot continue an assistant turn that has text already: generate "
            "first in the turn, or use a completion model"
        )
    return list(prompt.messages)


def _format(options: SamplingOptions) -> dict[str, Any]:
    if options.json_schema is None:
        return {}
    schema = {"name": "answer", "schema": json.loads(options.json_schema), "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _choices(answer: Any) -> list[dict[str, Any]]:
    if not isinstance(answer, dict) or "error" in answer:
        message, code = error_text(answer)
        raise BackendError(message, code=code)
    return list(answer.get("choices") or [])


def _completion(choice: dict[str, Any], usage: dict[str, Any], call_id: Any) -> Completion:
    message = choice.get("message") or choice.get("delta") or {}
    text = message.get("content") if message else choice.get("text")
    meta = {
        "id": call_id,
        "finish_reason": {"type": choice.get("finish_reason")},
        "prompt_tokens": usage.get("prompt_tokens", 0),
        "completion_tokens": usage.get("completion_tokens", 0),
        "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        "logprobs": choice.get("logprobs"),
    }
    return Completion(text or "", meta)


def _listed(answer: Any) -> list[Any]:
    return list(answer.get("data") or []) if isinstance(answer, dict) else []


def _checked(choice: Any, choices: Sequence[str]) -> str:
    if choice not in choices:
        raise BackendError(f"the service wrote {choice!r}, which is none of the choices")
    return str(choice)
