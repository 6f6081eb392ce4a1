"""Deterministic tiny random checkpoints: whole models for tests and for trying a server offline.

`make_tiny_model` writes what a Hugging Face directory holds: config.json, generation_config.json,
safetensors (one file, or shards with an index), tokenizer.json (bytes are tokens) and a chat
template. Weights come from (seed, tensor name) alone, so the same call writes the same bytes
everywhere, and one changed size does not change the other tensors. The scales are chosen such that
logits differ clearly from position to position and depend on the whole context: a model that
ignores its cache gives other text.

A new architecture is one entry in `RECIPES`: its config, and its tensors with shapes.

This module does not train anything, and does not need torch or transformers.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from statewise.runtime.models.tiny_hybrid import HYBRID_RECIPES
from statewise.runtime.models.tiny_recipes import (
    BOS_ID,
    DENSE_RECIPES,
    EOS_ID,
    PAD_ID,
    VOCAB_SIZE,
    Recipe,
    TensorSpec,
    TinySize,
    token_ids,
)

__all__ = [
    "BOS_ID",
    "CHAT_TEMPLATE",
    "EOS_ID",
    "PAD_ID",
    "RECIPES",
    "VOCAB_SIZE",
    "Recipe",
    "TensorSpec",
    "TinySize",
    "fill",
    "make_tiny_model",
]

RECIPES: dict[str, Recipe] = DENSE_RECIPES | HYBRID_RECIPES

NAMED_SPECIALS = (
    "<|bos|>",
    "<|eos|>",
    "<|pad|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<|end|>",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tiny_model(
    arch: str,
    path: str | Path,
    *,
    size: TinySize | None = None,
    seed: int = 0,
    shards: int = 1,
    config: dict[str, Any] | None = None,
) -> Path:
    """Write a tiny checkpoint of `arch` into directory `path` (made if absent) and return it.

    `config` overrides entries of config.json (rope scaling, tied embeddings, layer types).
    Raises ValueError for an unknown architecture.
    """
    if arch not in RECIPES:
        raise ValueError(f"unknown tiny architecture {arch!r}; known: {', '.join(sorted(RECIPES))}")
    recipe = RECIPES[arch]
    settings = recipe.config(size or TinySize()) | (config or {})
    target = Path(path)
    target.mkdir(parents=True, exist_ok=True)
    _write_json(target / "config.json", settings)
    _write_json(target / "generation_config.json", token_ids() | {"do_sample": False})
    write_weights(target, [(s, fill(s, seed)) for s in recipe.tensors(settings)], shards)
    write_tokenizer(target)
    return target


def fill(spec: TensorSpec, seed: int) -> NDArray[Any]:
    """Values of one tensor: a function of seed and name only."""
    rng = np.random.default_rng([seed, zlib.crc32(spec.name.encode())])
    if spec.draw is not None:
        return np.ascontiguousarray(spec.draw(rng, spec.shape))
    normal = rng.standard_normal(spec.shape, dtype=np.float32)
    return np.asarray(spec.mean + spec.std * normal, dtype=np.float32)


def write_weights(
    target: Path, tensors: list[tuple[TensorSpec, NDArray[Any]]], shards: int
) -> None:
    """Write model.safetensors, or `shards` files with model.safetensors.index.json."""
    if shards == 1:
        values = {spec.name: value for spec, value in tensors}
        save_file(values, target / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for index in range(shards):
        name = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        part = {spec.name: value for spec, value in tensors[index::shards]}
        save_file(part, target / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    size_bytes = sum(value.nbytes for _, value in tensors)
    _write_json(
        target / "model.safetensors.index.json",
        {"metadata": {"total_size": size_bytes}, "weight_map": weight_map},
    )


def write_tokenizer(target: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json: token b is byte b, specials from 256."""
    _write_json(target / "tokenizer.json", byte_tokenizer())
    _write_json(
        target / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": NAMED_SPECIALS[0],
            "eos_token": NAMED_SPECIALS[1],
            "pad_token": NAMED_SPECIALS[2],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def byte_tokenizer() -> dict[str, Any]:
    """Return a tokenizer.json without merges: 256 bytes, then special tokens up to 384."""
    specials = NAMED_SPECIALS + tuple(
        f"<|r{i}|>" for i in range(VOCAB_SIZE - 256 - len(NAMED_SPECIALS))
    )
    added = [
        {
            "id": 256 + i,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, text in enumerate(specials)
    ]
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {char: byte for byte, char in enumerate(byte_characters())},
            "merges": [],
        },
    }


def byte_characters() -> list[str]:
    """Printable character of each byte in byte-level vocabularies (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in printable}
    spare = 256
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(spare)
            spare += 1
    return [table[byte] for byte in range(256)]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
