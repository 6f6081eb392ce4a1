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
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

VOCAB_SIZE = 384
BOS_ID, EOS_ID, PAD_ID = 256, 257, 258
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

Float32 = NDArray[np.float32]


@dataclass(frozen=True)
class TinySize:
    """Sizes of a tiny model; `window` is the sliding window where the architecture has one."""

    layers: int = 4
    hidden: int = 64
    intermediate: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    window: int = 16  # tokens
    context: int = 4096  # tokens


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a checkpoint: values are `mean + std * normal`."""

    name: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0


@dataclass(frozen=True)
class Recipe:
    """How one architecture's config and tensors follow from a size."""

    config: Callable[[TinySize], dict[str, Any]]
    tensors: Callable[[dict[str, Any]], Iterator[TensorSpec]]


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
    _write_json(target / "generation_config.json", _token_ids() | {"do_sample": False})
    write_weights(target, [(s, fill(s, seed)) for s in recipe.tensors(settings)], shards)
    write_tokenizer(target)
    return target


def fill(spec: TensorSpec, seed: int) -> Float32:
    """Values of one tensor: a function of seed and name only."""
    rng = np.random.default_rng([seed, zlib.crc32(spec.name.encode())])
    normal = rng.standard_normal(spec.shape, dtype=np.float32)
    return np.asarray(spec.mean + spec.std * normal, dtype=np.float32)


def write_weights(target: Path, tensors: list[tuple[TensorSpec, Float32]], shards: int) -> None:
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


def _token_ids() -> dict[str, Any]:
    return {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}


def _dense_config(size: TinySize) -> dict[str, Any]:
    """Entries that all dense decoders share."""
    return _token_ids() | {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "max_position_embeddings": size.context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }


def _llama_config(size: TinySize) -> dict[str, Any]:
    return _dense_config(size) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }


def _mistral_config(size: TinySize) -> dict[str, Any]:
    return _dense_config(size) | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_act": "silu",
        "sliding_window": size.window,
    }


def _qwen2_config(size: TinySize) -> dict[str, Any]:
    return _dense_config(size) | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "use_sliding_window": False,
    }


def _qwen3_config(size: TinySize) -> dict[str, Any]:
    return _dense_config(size) | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
    }


def _gemma3_config(size: TinySize) -> dict[str, Any]:
    layer_types = [
        "full_attention" if i % 3 == 2 else "sliding_attention" for i in range(size.layers)
    ]
    return _dense_config(size) | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": size.head_dim,
        "sliding_window": size.window,
        "layer_types": layer_types,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "attention_bias": False,
        "tie_word_embeddings": True,
    }


def _projection(name: str, out_features: int, in_features: int, bias: bool) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}.weight", (out_features, in_features), 1 / math.sqrt(in_features))
    if bias:
        yield TensorSpec(f"{name}.bias", (out_features,), 0.1)


def _attention_tensors(config: dict[str, Any], prefix: str) -> Iterator[TensorSpec]:
    kind, hidden, dim = config["model_type"], config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    all_bias = bool(config.get("attention_bias", False))
    for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        bias = all_bias or kind == "qwen2"
        yield from _projection(f"{prefix}.{part}_proj", count * dim, hidden, bias)
    yield from _projection(f"{prefix}.o_proj", hidden, heads * dim, all_bias)
    if kind in ("qwen3", "gemma3_text"):
        for part in ("q_norm", "k_norm"):
            yield _norm(config, f"{prefix}.{part}", dim)


def _norm(config: dict[str, Any], name: str, width: int) -> TensorSpec:
    offset = 0.0 if config["model_type"] == "gemma3_text" else 1.0
    return TensorSpec(f"{name}.weight", (width,), 0.1, offset)


def _dense_tensors(config: dict[str, Any]) -> Iterator[TensorSpec]:
    hidden, inner, vocab = (
        config["hidden_size"],
        config["intermediate_size"],
        config["vocab_size"],
    )
    sandwich = config["model_type"] == "gemma3_text"
    norms = ["input_layernorm", "post_attention_layernorm"]
    if sandwich:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    # A tied model must not merely echo its input: the embedding stays small in the residual.
    embed_std = 0.1 / math.sqrt(hidden) if config["tie_word_embeddings"] else 1.0
    yield TensorSpec("model.embed_tokens.weight", (vocab, hidden), embed_std)
    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}"
        yield from (_norm(config, f"{prefix}.{norm}", hidden) for norm in norms)
        yield from _attention_tensors(config, f"{prefix}.self_attn")
        bias = bool(config.get("mlp_bias", False))
        yield from _projection(f"{prefix}.mlp.gate_proj", inner, hidden, bias)
        yield from _projection(f"{prefix}.mlp.up_proj", inner, hidden, bias)
        yield from _projection(f"{prefix}.mlp.down_proj", hidden, inner, bias)
    yield _norm(config, "model.norm", hidden)
    if not config["tie_word_embeddings"]:
        yield from _projection("lm_head", vocab, hidden, bias=False)


RECIPES: dict[str, Recipe] = {
    "llama": Recipe(_llama_config, _dense_tensors),
    "mistral": Recipe(_mistral_config, _dense_tensors),
    "qwen2": Recipe(_qwen2_config, _dense_tensors),
    "qwen3": Recipe(_qwen3_config, _dense_tensors),
    "gemma3": Recipe(_gemma3_config, _dense_tensors),
}
