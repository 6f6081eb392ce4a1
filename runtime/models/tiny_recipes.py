"""What the tiny checkpoints consist of: sizes, and the config and tensors of dense decoders.

A recipe is a config for a size, and the tensors that follow from the config. Values of a tensor are
normal with a scale that keeps activations near one, or drawn by a function of its own.

This module writes no files; `tiny_hybrid` has the recipes of models with other layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

VOCAB_SIZE = 384
BOS_ID, EOS_ID, PAD_ID = 256, 257, 258
ZERO_CENTRED = ("gemma3_text", "qwen3_next")  # norms multiply by (1 + weight)

Draw = Callable[[np.random.Generator, tuple[int, ...]], NDArray[Any]]


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
    """One tensor of a checkpoint: values are `mean + std * normal`, or what `draw` makes."""

    name: str
    shape: tuple[int, ...]
    std: float = 0.0
    mean: float = 0.0
    draw: Draw | None = None


@dataclass(frozen=True)
class Recipe:
    """How one architecture's config and tensors follow from a size."""

    config: Callable[[TinySize], dict[str, Any]]
    tensors: Callable[[dict[str, Any]], Iterator[TensorSpec]]


def token_ids() -> dict[str, Any]:
    """Entries that name the special tokens."""
    return {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}


def dense_config(size: TinySize) -> dict[str, Any]:
    """Entries that all dense decoders share."""
    return token_ids() | {
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
    return dense_config(size) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }


def _mistral_config(size: TinySize) -> dict[str, Any]:
    return dense_config(size) | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_act": "silu",
        "sliding_window": size.window,
    }


def _qwen2_config(size: TinySize) -> dict[str, Any]:
    return dense_config(size) | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "use_sliding_window": False,
    }


def _qwen3_config(size: TinySize) -> dict[str, Any]:
    return dense_config(size) | {
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
    return dense_config(size) | {
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


def projection(name: str, out_features: int, in_features: int, bias: bool) -> Iterator[TensorSpec]:
    """Weight (and bias) of a linear layer that keeps the scale of its input."""
    yield TensorSpec(f"{name}.weight", (out_features, in_features), 1 / math.sqrt(in_features))
    if bias:
        yield TensorSpec(f"{name}.bias", (out_features,), 0.1)


def attention_tensors(config: dict[str, Any], prefix: str) -> Iterator[TensorSpec]:
    """Projections of grouped-query attention, with the norms and biases of the architecture."""
    kind, hidden, dim = config["model_type"], config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    all_bias = bool(config.get("attention_bias", False))
    for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        bias = all_bias or kind == "qwen2"
        yield from projection(f"{prefix}.{part}_proj", count * dim, hidden, bias)
    yield from projection(f"{prefix}.o_proj", hidden, heads * dim, all_bias)
    if kind in ("qwen3", "gemma3_text", "qwen3_next"):
        for part in ("q_norm", "k_norm"):
            yield norm_weight(config, f"{prefix}.{part}", dim)


def norm_weight(config: dict[str, Any], name: str, width: int) -> TensorSpec:
    """Weight of an RMS norm, around what leaves its input as it is."""
    offset = 0.0 if config["model_type"] in ZERO_CENTRED else 1.0
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
        yield from (norm_weight(config, f"{prefix}.{norm}", hidden) for norm in norms)
        yield from attention_tensors(config, f"{prefix}.self_attn")
        bias = bool(config.get("mlp_bias", False))
        yield from projection(f"{prefix}.mlp.gate_proj", inner, hidden, bias)
        yield from projection(f"{prefix}.mlp.up_proj", inner, hidden, bias)
        yield from projection(f"{prefix}.mlp.down_proj", hidden, inner, bias)
    yield norm_weight(config, "model.norm", hidden)
    if not config["tie_word_embeddings"]:
        yield from projection("lm_head", vocab, hidden, bias=False)


DENSE_RECIPES: dict[str, Recipe] = {
    "llama": Recipe(_llama_config, _dense_tensors),
    "mistral": Recipe(_mistral_config, _dense_tensors),
    "qwen2": Recipe(_qwen2_config, _dense_tensors),
    "qwen3": Recipe(_qwen3_config, _dense_tensors),
    "gemma3": Recipe(_gemma3_config, _dense_tensors),
}
