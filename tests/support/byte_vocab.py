"""A vocabulary of the 256 bytes and three special tokens, for grammars and detokenizing."""

from __future__ import annotations

import codecs

from statewise.runtime.sampling_params import SamplingParams

SPECIAL = {256: "<bos>", 257: "<eos>", 258: "<pad>"}


class ByteDecoder:
    """Implements `TextDecoder`: whole UTF-8 characters; special tokens shown on request."""

    def __init__(self, *, skip_special_tokens: bool) -> None:
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if token_id in SPECIAL:
            return "" if self._skip else self._utf8.decode(b"", final=True) + SPECIAL[token_id]
        return self._utf8.decode(bytes([token_id]))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class ByteVocabulary:
    """Implements `GrammarVocabulary` and `TextVocabulary`: ids are bytes, then bos, eos, pad."""

    tokens = [bytes([i]) for i in range(256)] + [b"<bos>", b"<eos>", b"<pad>"]
    special_ids = (256, 257, 258)
    bos_id: int | None = 256
    eos_ids = (257,)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decoder(self, sampling: SamplingParams) -> ByteDecoder:
        return ByteDecoder(skip_special_tokens=sampling.skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        return SPECIAL.get(token_id) or bytes([token_id]).decode("latin-1")
