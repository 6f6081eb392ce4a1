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
        "o_groups": math.gcd(2, size.heads),
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


def _deepseek_v32_config(size: TinySize) -> dict[str, Any]:
    return dense_config(size) | {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "hidden_act": "silu",
        "num_key_value_heads": size.heads,
        "head_dim": size.head_dim // 2,
        "qk_rope_head_dim": size.head_dim // 2,
        "qk_nope_head_dim": size.head_dim,
        "v_head_dim": size.head_dim,
        "kv_lora_rank": size.hidden // 2,
        "q_lora_rank": size.hidden // 2,
        "attention_bias": False,
        "index_n_heads": 4 * size.heads,
        "index_head_dim": size.head_dim,
        "index_topk": 12,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": size.intermediate // 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": max(1, size.context // 32),
        },
    }


def _deepseek_v32_tensors(config: dict[str, Any]) -> Iterator[TensorSpec]:
    hidden = config["hidden_size"]
    yield from _embeddings(config)
    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}"
        yield norm_weight(config, f"{prefix}.input_layernorm", hidden)
        yield norm_weight(config, f"{prefix}.post_attention_layernorm", hidden)
        yield from _latent_attention(config, f"{prefix}.self_attn")
        if i < config["first_k_dense_replace"]:
            yield from _gated_mlp(f"{prefix}.mlp", config["intermediate_size"], hidden)
            continue
        experts, inner = config["n_routed_experts"], config["moe_intermediate_size"]
        yield from projection(f"{prefix}.mlp.gate", experts, hidden, bias=False)
        yield TensorSpec(f"{prefix}.mlp.gate.e_score_correction_bias", (experts,), 0.1)
        for name in [f"experts.{e}" for e in range(experts)] + ["shared_experts"]:
            yield from _gated_mlp(f"{prefix}.mlp.{name}", inner, hidden)


def _latent_attention(config: dict[str, Any], prefix: str) -> Iterator[TensorSpec]:
    hidden, heads, rank = (
        config["hidden_size"],
        config["num_attention_heads"],
        config["q_lora_rank"],
    )
    latent, rope, nope, value = (
        config[key]
        for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    bias = config["attention_bias"]
    yield from projection(f"{prefix}.q_a_proj", rank, hidden, bias)
    yield norm_weight(config, f"{prefix}.q_a_layernorm", rank)
    yield from projection(f"{prefix}.q_b_proj", heads * (nope + rope), rank, bias=False)
    yield from projection(f"{prefix}.kv_a_proj_with_mqa", latent + rope, hidden, bias)
    yield norm_weight(config, f"{prefix}.kv_a_layernorm", latent)
    yield from projection(f"{prefix}.kv_b_proj", heads * (nope + value), latent, bias=False)
    yield from projection(f"{prefix}.o_proj", hidden, heads * value, bias)
    index_heads, dim, name = config["index_n_heads"], config["index_head_dim"], f"{prefix}.indexer"
    yield from projection(f"{name}.wq_b", index_heads * dim, rank, bias=False)
    yield from projection(f"{name}.wk", dim, hidden, bias=False)
    yield norm_weight(config, f"{name}.k_norm", dim)
    yield TensorSpec(f"{name}.k_norm.bias", (dim,), 0.1)
    yield from projection(f"{name}.weights_proj", index_heads, hidden, bias=False)


def _gated_mlp(prefix: str, inner: int, hidden: int) -> Iterator[TensorSpec]:
    yield from projection(f"{prefix}.gate_proj", inner, hidden, bias=False)
    yield from projection(f"{prefix}.up_proj", inner, hidden, bias=False)
    yield from projection(f"{prefix}.down_proj", hidden, inner, bias=False)


def _qwen3_next_config(size: TinySize) -> dict[str, Any]:
    return dense_config(size) | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "hidden_act": "silu",
        "attention_bias": False,
        "partial_rotary_factor": 0.25,
        "layer_types": [
            "linear_attention" if (i + 1) % 4 else "full_attention" for i in range(size.layers)
        ],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": size.head_dim,
        "linear_value_head_dim": size.head_dim,
        "linear_num_key_heads": size.kv_heads,
        "linear_num_value_heads": 2 * size.kv_heads,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": size.intermediate // 4,
        "shared_expert_intermediate_size": size.intermediate // 4,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen3_next_tensors(config: dict[str, Any]) -> Iterator[TensorSpec]:
    hidden, experts = config["hidden_size"], config["num_experts"]
    yield from _embeddings(config)
    for i, kind in enumerate(config["layer_types"]):
        prefix = f"model.layers.{i}"
        yield norm_weight(config, f"{prefix}.input_layernorm", hidden)
        yield norm_weight(config, f"{prefix}.post_attention_layernorm", hidden)
        if kind == "linear_attention":
            yield from _delta_net(config, f"{prefix}.linear_attn")
        else:
            yield from _gated_attention(config, f"{prefix}.self_attn")
        if i in config["mlp_only_layers"]:
            yield from _gated_mlp(f"{prefix}.mlp", config["intermediate_size"], hidden)
            continue
        yield from projection(f"{prefix}.mlp.gate", experts, hidden, bias=False)
        for e in range(experts):
            inner = config["moe_intermediate_size"]
            yield from _gated_mlp(f"{prefix}.mlp.experts.{e}", inner, hidden)
        inner = config["shared_expert_intermediate_size"]
        yield from _gated_mlp(f"{prefix}.mlp.shared_expert", inner, hidden)
        yield from projection(f"{prefix}.mlp.shared_expert_gate", 1, hidden, bias=False)


def _gated_attention(config: dict[str, Any], prefix: str) -> Iterator[TensorSpec]:
    """Attention whose query projection also makes a gate of the same width."""
    doubled = config | {"num_attention_heads": 2 * config["num_attention_heads"]}
    width = config["num_attention_heads"] * config["head_dim"]
    for spec in attention_tensors(doubled, prefix):
        if not spec.name.endswith("o_proj.weight"):
            yield spec
    yield from projection(f"{prefix}.o_proj", config["hidden_size"], width, bias=False)


def _delta_net(config: dict[str, Any], prefix: str) -> Iterator[TensorSpec]:
    hidden, size = config["hidden_size"], config["linear_conv_kernel_dim"]
    heads, value_dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
    key = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    value = heads * value_dim
    yield from projection(f"{prefix}.in_proj_qkvz", 2 * key + 2 * value, hidden, bias=False)
    yield from projection(f"{prefix}.in_proj_ba", 2 * heads, hidden, bias=False)
    yield from projection(f"{prefix}.out_proj", hidden, value, bias=False)
    yield TensorSpec(f"{prefix}.conv1d.weight", (2 * key + value, 1, size), 1 / math.sqrt(size))
    yield TensorSpec(f"{prefix}.dt_bias", (heads,), 0.5, -1.0)
    yield TensorSpec(f"{prefix}.A_log", (heads,), draw=_log_uniform(0.5, 4.0))
    yield TensorSpec(f"{prefix}.norm.weight", (value_dim,), 0.1, 1.0)


def _log_uniform(low: float, high: float) -> Draw:
    """Logarithms of numbers between `low` and `high`."""

    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[Any]:
        return np.log(rng.uniform(low, high, shape)).astype(np.float32)

    return draw


HYBRID_RECIPES: dict[str, Recipe] = {
    "deepseek-v4": Recipe(_deepseek_v4_config, _deepseek_v4_tensors),
    "deepseek-v32": Recipe(_deepseek_v32_config, _deepseek_v32_tensors),
    "gpt-oss": Recipe(_gpt_oss_config, _gpt_oss_tensors),
    "qwen3-next": Recipe(_qwen3_next_config, _qwen3_next_tensors),
}
