"""Encoding with the `tokenizers` library: tokenizer.json, and byte-level GGUF vocabularies.

The library would recognise special tokens anywhere in a text; here it is told never to, because
`Tokenizer` cuts them out first, where they are allowed. How tokens become bytes is read from the
file's decoder; a decoder of a kind not known here is refused rather than guessed.

This module does not read GGUF files (`gguf_vocabulary` does).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import tokenizers

from statewise.runtime.errors import ModelLoadError
from statewise.runtime.tokenizer.specials import SpecialToken
from statewise.runtime.tokenizer.surface import (
    METASPACE,
    byte_fallback_bytes,
    byte_level_bytes,
    metaspace_bytes,
)

CACHED_TOKENS = 1 << 16
MAX_TOKEN_ID = (1 << 32) - 1  # the library's type


class HfCodec:
    """One `tokenizers.Tokenizer`; `inner` is used for texts that do not start the prompt."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        to_bytes: Callable[[str], bytes],
        strips_space: bool = False,
        inner: tokenizers.Tokenizer | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._inner = inner or tokenizer
        for each in (self._tokenizer, self._inner):
            each.encode_special_tokens = True
            each.no_truncation()
            each.no_padding()
        self._to_bytes = to_bytes
        self.strips_space = strips_space
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self.token_bytes = lru_cache(CACHED_TOKENS)(self._token_bytes)

    def encode(self, text: str, is_start: bool) -> list[int]:
        """Ids of a plain text."""
        tokenizer = self._tokenizer if is_start else self._inner
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def special_affixes(self) -> tuple[list[int], list[int]]:
        """Ids that the file's post-processor puts before and after a text."""
        plain: list[int] = self._tokenizer.encode("a", add_special_tokens=False).ids
        full: list[int] = self._tokenizer.encode("a", add_special_tokens=True).ids
        for start in range(len(full) - len(plain) + 1):
            if full[start : start + len(plain)] == plain:
                return full[:start], full[start + len(plain) :]
        return [], []

    def _token_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id <= MAX_TOKEN_ID:
            return b""
        piece = self._tokenizer.id_to_token(token_id)
        return b"" if piece is None else self._to_bytes(piece)


def codec_from_json(text: str, source: str) -> HfCodec:
    """Build a codec from the text of a tokenizer.json; ModelLoadError names `source`."""
    try:
        raw = json.loads(text)
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"{source}: not a tokenizer: {error}") from error
    to_bytes, strips_space = _surface(raw.get("decoder"), source)
    return HfCodec(tokenizer, to_bytes, strips_space, _inner_tokenizer(raw))


def special_tokens(text: str) -> list[SpecialToken]:
    """Control tokens that a tokenizer.json declares."""
    return [
        SpecialToken(t["id"], t["content"], t.get("lstrip", False), t.get("rstrip", False))
        for t in json.loads(text).get("added_tokens") or []
        if t.get("special")
    ]


def _surface(decoder: dict[str, Any] | None, source: str) -> tuple[Callable[[str], bytes], bool]:
    """How tokens become bytes, and whether a space at the start is dropped."""
    steps = _flat_steps(decoder)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return byte_level_bytes, False
    if kinds == ["Metaspace"]:
        return metaspace_bytes, steps[0].get("prepend_scheme", "always") != "never"
    is_known = set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    replaced = [s["pattern"] for s in steps if s["type"] == "Replace"]
    if is_known and kinds and all(p == {"String": METASPACE} for p in replaced):
        strips = any(s["type"] == "Strip" and s.get("start") == 1 for s in steps)
        return (byte_fallback_bytes if "ByteFallback" in kinds else metaspace_bytes), strips
    raise ModelLoadError(f"{source}: decoder {kinds or None} is not supported")


def _flat_steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _flat_steps(part)]
    return [decoder]


def _inner_tokenizer(raw: dict[str, Any]) -> tokenizers.Tokenizer | None:
    """Tokenizer for text after other text, where the file puts a space before the first only."""
    changed = json.dumps(raw.get("pre_tokenizer"))
    if '"prepend_scheme": "first"' not in changed:
        return None
    changed = changed.replace('"prepend_scheme": "first"', '"prepend_scheme": "never"')
    return tokenizers.Tokenizer.from_str(json.dumps(raw | {"pre_tokenizer": json.loads(changed)}))
