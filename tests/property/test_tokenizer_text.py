"""Text with origins behaves as str; cutting and decoding lose nothing, whatever the input."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from statewise.runtime.tokenizer.load import load_tokenizer
from statewise.runtime.tokenizer.provenance import TemplateText, join_texts, trust_of
from statewise.runtime.tokenizer.specials import SpecialToken, SpecialTokens
from statewise.runtime.tokenizer.surface import IncrementalDecoder, decode_bytes
from support.tiny import tiny_model

LETTERS = st.text(alphabet="ab <>|\n\u2028é", max_size=12)
PARTS = st.lists(st.tuples(st.booleans(), LETTERS), max_size=5)
TOKENS = ["<a>", "<ab>", "<a>b", "|", "<<", "a\n"]


def built(parts: list[tuple[bool, str]]) -> TemplateText:
    return join_texts(TemplateText.trusted(t) if trusted else t for trusted, t in parts)


def marked(parts: list[tuple[bool, str]]) -> str:
    """The same text with clients' characters moved to a private plane: the plain oracle."""
    return "".join(t if trusted else away(t) for trusted, t in parts)


def away(text: str) -> str:
    return "".join(chr(ord(c) + 0xF0000) for c in text)


def as_marked(text: str) -> str:
    pairs = zip(str.__str__(text), trust_of(text), strict=True)
    return "".join(c if trusted else away(c) for c, trusted in pairs)


# Operations whose result depends on positions only, so that they mean the same on marked text.
BY_POSITION: list[Callable[[str], str]] = [
    lambda t: t[2:],
    lambda t: t[:-1],
    lambda t: t[::2],
    lambda t: t[::-1],
    lambda t: t * 3,
    lambda t: t + t[1:],
    lambda t: t[-1:] + t,
]
# Operations that look at characters: value as of str, every piece's origins as at its place.
BY_VALUE: list[Callable[[str], list[str]]] = [
    lambda t: [t.strip()],
    lambda t: [t.lstrip("a<")],
    lambda t: [t.rstrip("b>")],
    lambda t: t.split(),
    lambda t: t.split("a"),
    lambda t: t.split("<", 1),
    lambda t: t.rsplit(None, 1),
    lambda t: t.rsplit("b", 2),
    lambda t: t.splitlines(),
    lambda t: t.splitlines(True),
    lambda t: list(t.partition("|")),
    lambda t: list(t.rpartition("|")),
    lambda t: [t.removeprefix("a")],
    lambda t: [t.removesuffix("b")],
]


@given(PARTS)
def test_operations_by_position_move_origins_with_characters(
    parts: list[tuple[bool, str]],
) -> None:
    text, oracle = built(parts), marked(parts)
    for operation in BY_POSITION:
        assert as_marked(operation(text)) == operation(oracle)


@given(PARTS)
def test_operations_by_value_are_those_of_str(parts: list[tuple[bool, str]]) -> None:
    text = built(parts)
    for operation in BY_VALUE:
        pieces = operation(text)
        assert [str.__str__(p) for p in pieces] == operation(text.plain)
        at, oracle = 0, as_marked(text)
        for piece in filter(None, pieces):
            assert isinstance(piece, TemplateText)
            at = oracle.index(as_marked(piece), at) + len(piece)


@given(PARTS, st.sampled_from(["a", "<", " ", "é", "zz"]), LETTERS, st.booleans())
def test_replace_is_that_of_str(
    parts: list[tuple[bool, str]], old: str, new: str, trusted: bool
) -> None:
    replacement = TemplateText.trusted(new) if trusted else new
    result = built(parts).replace(old, replacement)
    assert result.plain == built(parts).plain.replace(old, new)
    kept = sum(trust_of(built(parts)))
    assert trusted or sum(result.trust) <= kept


@given(PARTS)
def test_control_tokens_are_cut_only_from_trusted_text(parts: list[tuple[bool, str]]) -> None:
    text = built(parts)
    specials = SpecialTokens(SpecialToken(i, t) for i, t in enumerate(TOKENS))
    again, at = "", 0
    for piece in specials.cut(text.plain, text.trust):
        value = piece.text if piece.token_id < 0 else TOKENS[piece.token_id]
        assert piece.start == at
        if piece.token_id >= 0:
            assert text.trust[at : at + len(value)] == b"\x01" * len(value)
        again, at = again + value, at + len(value)
    assert again == text.plain


@given(st.text(max_size=40))
def test_no_message_makes_control_tokens(content: str) -> None:
    tokenizer = load_tokenizer(tiny_model("llama"))
    ids = tokenizer.encode_chat({"messages": [{"role": "user", "content": content}]})
    assert [i for i in ids if i > 255] == [260, 263, 261]
    assert tokenizer.decode(ids) == content


@given(st.binary(max_size=40), st.lists(st.integers(0, 40), max_size=8))
def test_streaming_equals_decoding_at_once(data: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(c for c in cuts if c <= len(data)), len(data)]
    pieces = [data[a:b] for a, b in itertools.pairwise(edges)]
    decoder = IncrementalDecoder(lambda i: pieces[i])
    text = "".join(decoder.push(i) for i in range(len(pieces))) + decoder.finish()
    assert text == decode_bytes(data)
