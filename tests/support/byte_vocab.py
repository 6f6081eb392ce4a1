"""A vocabulary of the 256 bytes and three special tokens, for grammars and detokenizing."""

from __future__ import annotations


class ByteVocabulary:
    """Implements `GrammarVocabulary`: token id = byte; 256 bos, 257 eos, 258 pad."""

    tokens = [bytes([i]) for i in range(256)] + [b"<bos>", b"<eos>", b"<pad>"]
    special_ids = (256, 257, 258)
    bos_id: int | None = 256
    eos_ids = (257,)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())
