"""Configs of published hybrid models, and the cache groups that follow from them. No weights.

Entries that say nothing about the cache are left out where the parser does not ask for them.
"""

from __future__ import annotations

from typing import Any

import torch

from statewise.radix.schema import CacheSchema
from statewise.runtime.models import deepseek_v4, deepseek_v32, qwen3_next
from statewise.runtime.models.base import LoadOptions
from statewise.runtime.models.config import Fields
from statewise.runtime.models.hybrid import make_schema
from statewise.runtime.models.registry import find_architecture
from statewise.runtime.models.schema import build_schema
from statewise.runtime.models.tiny import RECIPES, TinySize

OPTIONS = LoadOptions(dtype=torch.bfloat16, kv_dtype=torch.bfloat16, page_size=128)

V4_FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "compress_ratios": [0, 0] + [4, 128] * 20 + [4] + [0],
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "num_hash_layers": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 2048,
    "scoring_func": "sqrtsoftplus",
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
}
V4_PRO = V4_FLASH | {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "compress_ratios": [128, 128] + [4, 128] * 29 + [4] + [0],
    "index_topk": 1024,
    "n_routed_experts": 384,
    "moe_intermediate_size": 3072,
    "routed_scaling_factor": 2.5,
}
V32: dict[str, Any] = RECIPES["deepseek-v32"].config(TinySize(layers=61)) | {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
}
QWEN3_NEXT_80B: dict[str, Any] = RECIPES["qwen3-next"].config(TinySize(layers=48)) | {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
GPT_OSS_20B: dict[str, Any] = RECIPES["gpt-oss"].config(TinySize(layers=24, window=128)) | {
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
GEMMA3_27B: dict[str, Any] = RECIPES["gemma3"].config(TinySize(layers=62, window=1024)) | {
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "layer_types": ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(62)],
}
PUBLISHED = {
    "DeepSeek-V4 Flash": V4_FLASH,
    "DeepSeek-V4 Pro": V4_PRO,
    "DeepSeek-V3.2": V32,
    "Qwen3-Next 80B": QWEN3_NEXT_80B,
    "gpt-oss 20B": GPT_OSS_20B,
    "Gemma 3 27B": GEMMA3_27B,
}
DRAFTS: dict[str, Any] = {
    "DeepseekV4ForCausalLM": deepseek_v4.group_drafts,
    "DeepseekV32ForCausalLM": deepseek_v32.group_drafts,
    "Qwen3NextForCausalLM": qwen3_next.group_drafts,
}


def parse(raw: dict[str, Any]) -> Any:
    """The architecture's own config."""
    fields = Fields(raw, "config.json")
    return find_architecture(fields).parse(fields)


def schema_of(raw: dict[str, Any], options: LoadOptions = OPTIONS) -> CacheSchema:
    """Cache groups of a config."""
    config = parse(raw)
    if config.architecture not in DRAFTS:
        return build_schema(config, options, "weights")
    drafts = DRAFTS[config.architecture](config, options)
    return make_schema(config, options, drafts, "weights")
