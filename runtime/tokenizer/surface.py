"""Token ids back to text: every token is some bytes, and text is their concatenation.

    byte-level    each character of a token stands for one byte (GPT-2's table)
    metaspace     U+2581 stands for a space; <0x41> for the byte 0x41

Because tokens are bytes, decoding token by token (`IncrementalDecoder`) and all at once
(`decode_bytes`) give the same text: a character is released when its last byte has come, and bytes
that can never become a character turn into U+FFFD.

This module does not know special tokens.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable

METASPACE = "\u2581"
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_table() -> dict[str, int]:
    """Byte of each character in byte-level vocabularies: printable ones are themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    spare = 256
    for byte in range(256):
        if byte not in printable:
            table[chr(spare)] = byte
            spare += 1
    return table


BYTE_OF = byte_level_table()


def byte_level_bytes(piece: str) -> bytes:
    """Bytes of a byte-level token; a token with other characters is literal text."""
    try:
        return bytes([BYTE_OF[char] for char in piece])
    except KeyError:
        return piece.encode("utf-8", "replace")


def metaspace_bytes(piece: str) -> bytes:
    """Bytes of a SentencePiece-like token without byte fallback."""
    return piece.replace(METASPACE, " ").encode("utf-8", "replace")


def byte_fallback_bytes(piece: str) -> bytes:
    """Bytes of a SentencePiece-like token; <0xNN> is one byte."""
    if len(piece) == 6 and (found := BYTE_PIECE.fullmatch(piece)):
        return bytes([int(found[1], 16)])
    return metaspace_bytes(piece)


def decode_bytes(data: bytes) -> str:
    """Text of bytes; what is not UTF-8 becomes U+FFFD."""
    return data.decode("utf-8", "replace")


class IncrementalDecoder:
    """Decodes one output token by token; `token_bytes` gives b"" for tokens that are not shown.

    `strips_space`: drop one space at the very start (vocabularies that put one before every text;
    only where the output does not continue a prompt).
    """

    def __init__(self, token_bytes: Callable[[int], bytes], strips_space: bool = False) -> None:
        self._token_bytes = token_bytes
        self._strips_space = strips_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Text that is certain after one more token (whole characters only)."""
        return self._started(self._decoder.decode(self._token_bytes(token_id)))

    def finish(self) -> str:
        """Return what is left when no token follows (a broken character becomes U+FFFD)."""
        return self._started(self._decoder.decode(b"", final=True))

    def _started(self, text: str) -> str:
        if self._strips_space and text:
            self._strips_space = False
            return text.removeprefix(" ")
        return text
