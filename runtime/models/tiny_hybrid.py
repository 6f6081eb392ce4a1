"""Tiny checkpoints of the hybrid architectures: config and tensors of each.

The tensors carry the names that the checkpoints on the hub use. Sinks, biases, decay rates and
routing tables are drawn so that each of them matters: a model that ignores one gives other logits.

This module writes no files (`tiny` does).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from statewise.runtime.models.tiny_recipes import (
    Draw,
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


def _deepseek_v4_config(size: TinySize) -> dict[str, Any]:
    leading = min(2, max(0, size.layers - 2))
    kinds = ("compressed_sparse_attention", "heavily_compressed_attention")
    config = dense_config(size) | {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "hidden_act": "silu",
        "head_dim": 2 * size.head_dim,
        "num_key_value_heads": 1,
        "partial_rotary_factor": 0.25,
        "q_lora_rank": size.hidden // 2,
        "o_groups": 2,
        "o_lora_rank": size.hidden // 4,
        "sliding_window": size.window,
        "layer_types": ["sliding_attention"] * leading
        + [kinds[i % 2] for i in range(size.layers - leading)],
        "compress_rates": {kinds[0]: 4, kinds[1]: 16},
        "mlp_layer_types": ["hash_moe" if i < 3 else "moe" for i in range(size.layers)],
        "index_n_heads": 4 * size.heads,  # few heads: scores of exactly 0, and ties
        "index_head_dim": size.head_dim,
        "index_topk": 6,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": size.intermediate // 4,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True,
        "swiglu_limit": 10.0,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "compress_rope_theta": 160000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": max(1, size.context // 16),
            "beta_fast": 32,
            "beta_slow": 1,
        },
    }
    del config["intermediate_size"]
    return config


def _deepseek_v4_tensors(config: dict[str, Any]) -> Iterator[TensorSpec]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    streams = config["hc_mult"]
    yield TensorSpec("embed.weight", (vocab, hidden), 1.0)
    yield TensorSpec("norm.weight", (hidden,), 0.1, 1.0)
    yield from projection("head", vocab, hidden, bias=False)
    yield from _hyper_connection("hc_head", streams, streams * hidden, 1)
    for i, (kind, mlp) in enumerate(
        zip(config["layer_types"], config["mlp_layer_types"], strict=True)
    ):
        prefix = f"layers.{i}"
        for part in ("attn", "ffn"):
            yield TensorSpec(f"{prefix}.{part}_norm.weight", (hidden,), 0.1, 1.0)
            rows = (2 + streams) * streams
            yield from _hyper_connection(f"{prefix}.hc_{part}", rows, streams * hidden, 3)
        yield from _v4_attention(config, f"{prefix}.attn")
        if kind != "sliding_attention":
            ratio = config["compress_rates"][kind]
            halves = 2 if kind == "compressed_sparse_attention" else 1
            dim = config["head_dim"]
            yield from _compressor(config, f"{prefix}.attn.compressor", dim, ratio, halves)
        if kind == "compressed_sparse_attention":
            yield from _v4_indexer(config, f"{prefix}.attn.indexer")
        yield from _v4_experts(config, f"{prefix}.ffn", mlp == "hash_moe")


def _hyper_connection(name: str, rows: int, width: int, scales: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}_fn", (rows, width), 1 / math.sqrt(width))
    yield TensorSpec(f"{name}_base", (rows,), 0.5)
    yield TensorSpec(f"{name}_scale", (scales,), 0.1, 0.5)


def _v4_attention(config: dict[str, Any], prefix: str) -> Iterator[TensorSpec]:
    hidden, dim, rank = config["hidden_size"], config["head_dim"], config["q_lora_rank"]
    heads, groups, narrow = (
        config["num_attention_heads"],
        config["o_groups"],
        config["o_lora_rank"],
    )
    yield from projection(f"{prefix}.wq_a", rank, hidden, bias=False)
    yield TensorSpec(f"{prefix}.q_norm.weight", (rank,), 0.1, 1.0)
    yield from projection(f"{prefix}.wq_b", heads * dim, rank, bias=False)
    yield TensorSpec(f"{prefix}.wkv.weight", (dim, hidden), 1.5 / math.sqrt(hidden))
    yield TensorSpec(f"{prefix}.kv_norm.weight", (dim,), 0.1, 1.0)
    yield TensorSpec(f"{prefix}.attn_sink", (heads,), 1.0)
    yield from projection(f"{prefix}.wo_a", groups * narrow, heads * dim // groups, bias=False)
    yield from projection(f"{prefix}.wo_b", hidden, groups * narrow, bias=False)


def _compressor(
    config: dict[str, Any], prefix: str, dim: int, ratio: int, halves: int
) -> Iterator[TensorSpec]:
    hidden, rows = config["hidden_size"], halves * dim
    for part in ("wkv", "wgate"):
        yield TensorSpec(f"{prefix}.{part}.weight", (rows, hidden), 1.5 / math.sqrt(hidden))
    yield TensorSpec(f"{prefix}.ape", (ratio, rows), 1.0)
    yield TensorSpec(f"{prefix}.norm.weight", (dim,), 0.1, 1.0)


def _v4_indexer(config: dict[str, Any], prefix: str) -> Iterator[TensorSpec]:
    heads, dim = config["index_n_heads"], config["index_head_dim"]
    ratio = config["compress_rates"]["compressed_sparse_attention"]
    yield from projection(f"{prefix}.wq_b", heads * dim, config["q_lora_rank"], bias=False)
    yield from projection(f"{prefix}.weights_proj", heads, config["hidden_size"], bias=False)
    yield from _compressor(config, f"{prefix}.compressor", dim, ratio, 2)


def _v4_experts(config: dict[str, Any], prefix: str, is_hash_routed: bool) -> Iterator[TensorSpec]:
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    experts, chosen = config["n_routed_experts"], config["num_experts_per_tok"]
    yield from projection(f"{prefix}.gate", experts, hidden, bias=False)
    if is_hash_routed:
        shape = (config["vocab_size"], chosen)
        yield TensorSpec(f"{prefix}.gate.tid2eid", shape, draw=_distinct_below(experts))
    else:
        yield TensorSpec(f"{prefix}.gate.bias", (experts,), 0.1)
    names = [f"{prefix}.experts.{e}" for e in range(experts)] + [f"{prefix}.shared_experts"]
    for name in names:
        for part, shape in (("w1", (inner, hidden)), ("w2", (hidden, inner))):
            yield from projection(f"{name}.{part}", *shape, bias=False)
        yield from projection(f"{name}.w3", inner, hidden, bias=False)


def _distinct_below(count: int) -> Draw:
    """Rows of distinct integers below `count`."""

    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[Any]:
        order = rng.random((shape[0], count)).argsort(axis=1)
        return order[:, : shape[1]].astype(np.int64)

    return draw


HYBRID_RECIPES: dict[str, Recipe] = {
    "deepseek-v4": Recipe(_deepseek_v4_config, _deepseek_v4_tensors),
    "gpt-oss": Recipe(_gpt_oss_config, _gpt_oss_tensors),
}
