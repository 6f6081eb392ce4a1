"""The tokenizer that a GGUF file carries: byte-level BPE ("gpt2") or SentencePiece ("llama").

Token types say which tokens are control tokens (never made from plain text) and which are
user-defined (always whole). The file also says whether a prompt begins with a BOS token.

This module does not encode; it builds what does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, models

from statewise.runtime.errors import ModelLoadError
from statewise.runtime.models.gguf_file import GgufFile
from statewise.runtime.tokenizer.codec import TextCodec
from statewise.runtime.tokenizer.hf_codec import HfCodec
from statewise.runtime.tokenizer.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from statewise.runtime.tokenizer.sentencepiece_codec import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    PieceTable,
    SentencePieceCodec,
)
from statewise.runtime.tokenizer.specials import SpecialToken
from statewise.runtime.tokenizer.surface import byte_level_bytes


@dataclass(frozen=True)
class GgufVocabulary:
    """What a GGUF file says about its tokenizer."""

    codec: TextCodec
    specials: list[SpecialToken]
    special_names: dict[str, int]  # bos_token, eos_token, ... -> id
    prefix_ids: list[int]
    suffix_ids: list[int]
    chat_template: str | None


def read_vocabulary(file: GgufFile) -> GgufVocabulary:
    """Build the tokenizer of an open file; ModelLoadError where it is absent or of another kind."""
    kind = file.text("tokenizer.ggml.model")
    tokens = file.strings("tokenizer.ggml.tokens")
    if kind is None or not tokens:
        raise file.fail("no tokenizer in the metadata ('tokenizer.ggml.tokens')")
    types = _types(file, len(tokens))
    names = _special_names(file, len(tokens))
    if kind == "gpt2":
        pre = _pre_tokenizer(file)
        codec: TextCodec = _bpe_codec(file, tokens, types, pre)
        adds_bos = file.flag("tokenizer.ggml.add_bos_token", pre.adds_bos)
    elif kind == "llama":
        codec = _sentencepiece_codec(file, tokens, types)
        adds_bos = file.flag("tokenizer.ggml.add_bos_token", True)
    else:
        raise file.fail(f"tokenizer {kind!r} is not supported; known: gpt2, llama")
    adds_eos = file.flag("tokenizer.ggml.add_eos_token", False)
    controls = (CONTROL, UNKNOWN) if kind == "llama" else (CONTROL,)
    return GgufVocabulary(
        codec=codec,
        specials=[SpecialToken(i, tokens[i]) for i, t in enumerate(types) if t in controls],
        special_names=names,
        prefix_ids=[names["bos_token"]] if adds_bos and "bos_token" in names else [],
        suffix_ids=[names["eos_token"]] if adds_eos and "eos_token" in names else [],
        chat_template=file.text("tokenizer.chat_template"),
    )


def _types(file: GgufFile, num_tokens: int) -> list[int]:
    types = file.numbers("tokenizer.ggml.token_type", num_tokens)
    return [NORMAL] * num_tokens if types is None else [int(t) for t in types.tolist()]


def _special_names(file: GgufFile, num_tokens: int) -> dict[str, int]:
    keys = {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "unk_token": "unknown_token_id",
        "pad_token": "padding_token_id",
    }
    ids = {name: file.integer(f"tokenizer.ggml.{key}") for name, key in keys.items()}
    for name, token_id in ids.items():
        if token_id is not None and not 0 <= token_id < num_tokens:
            raise file.fail(f"{name} {token_id} is outside the vocabulary ({num_tokens})")
    return {name: int(token_id) for name, token_id in ids.items() if token_id is not None}


def _pre_tokenizer(file: GgufFile) -> PreTokenizer:
    name = file.text("tokenizer.ggml.pre")
    if name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise file.fail(f"pre-tokenizer {name!r} is not supported; known: {known}")
    return PRE_TOKENIZERS[name]


def _bpe_codec(file: GgufFile, tokens: list[str], types: list[int], pre: PreTokenizer) -> HfCodec:
    pairs = [m.partition(" ") for m in file.strings("tokenizer.ggml.merges") or []]
    merges = [(left, right) for left, _, right in pairs]
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        model: Any = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignores_merges)
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"{file.path}: not a BPE vocabulary: {error}") from error
    tokenizer = tokenizers.Tokenizer(model)
    normalizer = pre.normalizer()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre.splitter()
    for kind, is_special in ((CONTROL, True), (USER_DEFINED, False)):
        chosen = [t for t, k in zip(tokens, types, strict=True) if k == kind]
        tokenizer.add_tokens([AddedToken(t, special=is_special, normalized=False) for t in chosen])
    return HfCodec(tokenizer, byte_level_bytes)


def _sentencepiece_codec(file: GgufFile, tokens: list[str], types: list[int]) -> SentencePieceCodec:
    scores = file.numbers("tokenizer.ggml.scores", len(tokens))
    if scores is None:
        raise file.fail("the SentencePiece vocabulary has no scores ('tokenizer.ggml.scores')")
    unknown = file.integer("tokenizer.ggml.unknown_token_id")
    if unknown is None:
        unknown = types.index(UNKNOWN) if UNKNOWN in types else 0
    return SentencePieceCodec(
        PieceTable(
            tokens,
            [float(s) for s in scores.tolist()],
            types,
            unknown,
            file.flag("tokenizer.ggml.add_space_prefix", True),
            str(file.path),
        )
    )
