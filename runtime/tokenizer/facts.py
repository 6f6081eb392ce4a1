"""What clients may know of a tokenizer, as plain data: /model_info and `Engine.model_info`.

This module does not load a tokenizer.
"""

from __future__ import annotations

from typing import Any, Protocol


class LoadedTokenizer(Protocol):
    """What is asked of a tokenizer here."""

    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    vocab_size: int

    @property
    def chat_template(self) -> str | None:
        """Source of the chat template; None for a base model."""
        ...

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Token ids of a text."""
        ...

    def token_text(self, token_id: int) -> str:
        """One token's text."""
        ...


def facts_of(tokenizer: LoadedTokenizer) -> dict[str, Any]:
    """Return special tokens, the chat template, and whether prompts begin with BOS."""
    named = {
        "bos_token": tokenizer.bos_token_id,
        "eos_token": tokenizer.eos_token_id,
        "pad_token": tokenizer.pad_token_id,
    }
    texts = {n: None if i is None else tokenizer.token_text(i) for n, i in named.items()}
    prefix = tokenizer.encode("", add_special=True)
    return {
        **texts,
        "chat_template": tokenizer.chat_template,
        "add_bos_token": bool(prefix) and prefix[0] == tokenizer.bos_token_id,
        "tokenizer_vocab_size": tokenizer.vocab_size,
    }
