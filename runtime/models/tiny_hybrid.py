"""Tiny checkpoints of the hybrid architectures: config and tensors of each.

The tensors carry the names that the checkpoints on the hub use. Sinks, biases, decay rates and
routing tables are drawn so that each of them matters: a model that ignores one gives other logits.

This module writes no files (`tiny` does).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from statewise.runtime.models.tiny_recipes import (
    Recipe,
    TensorSpec,
    TinySize,
    attention_tensors,
    dense_config,
    norm_weight,
    projection,
)


def _embeddings(config: dict[str, Any]) -> Iterator[TensorSpec]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield TensorSpec("model.embed_tokens.weight", (vocab, hidden), 1.0)
    yield norm_weight(config, "model.norm", hidden)
    yield from projection("lm_head", vocab, hidden, bias=False)


def _gpt_oss_config(size: TinySize) -> dict[str, Any]:
    return dense_config(size) | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_act": "silu",
        "attention_bias": True,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "swiglu_limit": 7.0,
        "sliding_window": size.window,
        "layer_types": [
            "full_attention" if i % 2 else "sliding_attention" for i in range(size.layers)
        ],
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": max(1, size.context // 32),
        },
        "rope_theta": 150000.0,
    }


def _gpt_oss_tensors(config: dict[str, Any]) -> Iterator[TensorSpec]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    experts = config["num_local_experts"]
    yield from _embeddings(config)
    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}"
        yield norm_weight(config, f"{prefix}.input_layernorm", hidden)
        yield norm_weight(config, f"{prefix}.post_attention_layernorm", hidden)
        yield from attention_tensors(config, f"{prefix}.self_attn")
        yield TensorSpec(f"{prefix}.self_attn.sinks", (config["num_attention_heads"],), 1.0)
        yield from projection(f"{prefix}.mlp.router", experts, hidden, bias=True)
        # Experts are stored [expert, in, out], gate and up columns in turn.
        name, wide = f"{prefix}.mlp.experts", 2 * inner
        yield TensorSpec(f"{name}.gate_up_proj", (experts, hidden, wide), 1 / math.sqrt(hidden))
        yield TensorSpec(f"{name}.gate_up_proj_bias", (experts, wide), 0.5)
        yield TensorSpec(f"{name}.down_proj", (experts, inner, hidden), 1 / math.sqrt(inner))
        yield TensorSpec(f"{name}.down_proj_bias", (experts, hidden), 0.1)


HYBRID_RECIPES: dict[str, Recipe] = {
    "gpt-oss": Recipe(_gpt_oss_config, _gpt_oss_tensors),
}
