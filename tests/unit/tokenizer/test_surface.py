"""Decoding token by token gives what decoding all at once gives."""

from __future__ import annotations

import pytest

from statewise.runtime.tokenizer.surface import (
    BYTE_OF,
    IncrementalDecoder,
    byte_fallback_bytes,
    byte_level_bytes,
    decode_bytes,
    metaspace_bytes,
)

PIECES = [b"a", b" ", "é".encode(), b"\xf0", b"\x9f", b"\x99\x82", b"\xff", b"", b"\xe2\x96"]


def stream(pieces: list[bytes], **options: bool) -> list[str]:
    decoder = IncrementalDecoder(lambda i: pieces[i], **options)
    return [decoder.push(i) for i in range(len(pieces))] + [decoder.finish()]


def test_text_is_released_at_whole_characters() -> None:
    smile = "🙂".encode()
    assert stream([b"a", smile[:1], smile[1:3], smile[3:] + b"b"]) == ["a", "", "", "🙂b", ""]


def test_broken_characters_become_one_replacement_each() -> None:
    assert stream([b"\xff", b"a", b"\xf0\x9f"]) == ["\ufffd", "a", "", "\ufffd"]
    assert "".join(stream([b"\xf0\x9f", b"a"])) == "\ufffda"


@pytest.mark.parametrize("first", range(len(PIECES)))
@pytest.mark.parametrize("second", range(len(PIECES)))
def test_streaming_equals_decoding_at_once(first: int, second: int) -> None:
    for third in PIECES:
        pieces = [PIECES[first], PIECES[second], third]
        assert "".join(stream(pieces)) == decode_bytes(b"".join(pieces))


def test_one_space_at_the_start_is_dropped_on_request() -> None:
    assert "".join(stream([b"", b" ", b" a"], strips_space=True)) == " a"
    assert "".join(stream([b" a"], strips_space=False)) == " a"
    assert "".join(stream([b"a", b" b"], strips_space=True)) == "a b"


def test_byte_level_alphabet_covers_every_byte_once() -> None:
    assert sorted(BYTE_OF.values()) == list(range(256))
    assert byte_level_bytes("Ġhi") == b" hi"
    assert byte_level_bytes("Ã©") == "é".encode()
    assert byte_level_bytes("a b") == b"a b"  # an added token: literal text
    assert byte_level_bytes("日") == "日".encode()


def test_sentencepiece_surfaces() -> None:
    assert byte_fallback_bytes("<0x0A>") == b"\n"
    assert byte_fallback_bytes("<0xF0>") == b"\xf0"
    assert byte_fallback_bytes("<0xG0>") == b"<0xG0>"
    assert byte_fallback_bytes("\u2581a\u2581") == b" a "
    assert metaspace_bytes("<0x0A>") == b"<0x0A>"
