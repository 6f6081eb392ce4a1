"""The seam between `Tokenizer` and what turns plain text into ids.

Two kinds exist: `HfCodec` (the tokenizers library: tokenizer.json, byte-level BPE of GGUF files)
and `SentencePieceCodec` (SentencePiece vocabularies of GGUF files).
"""

from __future__ import annotations

from typing import Protocol


class TextCodec(Protocol):
    """Plain text to ids and ids to bytes; control tokens in text are not recognised."""

    vocab_size: int
    strips_space: bool  # decoding drops one space at the start of a text

    def encode(self, text: str, is_start: bool) -> list[int]:
        """Ids of a text; `is_start`: nothing stands before it in the prompt's text."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that a token stands for; b"" for an id without a token."""
        ...
