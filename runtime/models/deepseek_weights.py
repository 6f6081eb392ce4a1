"""What DeepSeek-V4's checkpoints call their tensors.

    published                    saved by transformers          module names
    embed.weight                 model.embed_tokens.weight      model.embed_tokens.weight
    head.weight                  head.weight                    lm_head.weight
    layers.0.attn.wq_a.weight    model.layers.0.attn.wq_a...    model.layers.0.self_attn.q_a_proj...
    layers.0.attn.kv_norm        model.layers.0.attn.norm       model.layers.0.self_attn.kv_norm
    layers.0.ffn.experts.0.w1    model.layers.0.ffn.experts...  model.layers.0.mlp.experts.gate_up

The model asks for the published names. This module reads no tensor.
"""

from __future__ import annotations

import re

EXPERT_PARTS = ("w1", "w3", "w2")  # gate, up, down
# Applied in order to what another dialect calls a tensor.
RENAMES = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"^model\.", ""),
        (r"^embed_tokens\.", "embed."),
        (r"^lm_head\.", "head."),
        (r"^hc_head\.hc_", "hc_head_"),
        (r"\.self_attn\.", ".attn."),
        (r"\.mlp\.", ".ffn."),
        (r"\.compressor\.indexer\.scorer\.weights_proj\.", ".indexer.weights_proj."),
        (r"\.compressor\.indexer\.q_b_proj\.", ".indexer.wq_b."),
        (r"\.compressor\.indexer\.", ".indexer.compressor."),
        (r"\.compressor\.kv_norm\.", ".compressor.norm."),
        (r"\.attn\.norm\.", ".attn.kv_norm."),
        (r"\.q_a_norm\.", ".q_norm."),
        (r"\.q_a_proj\.", ".wq_a."),
        (r"\.q_b_proj\.", ".wq_b."),
        (r"\.kv_proj\.", ".wkv."),
        (r"\.o_a_proj\.", ".wo_a."),
        (r"\.o_b_proj\.", ".wo_b."),
        (r"\.compressor\.gate_proj\.", ".compressor.wgate."),
        (r"\.shared_experts\.gate_proj\.", ".shared_experts.w1."),
        (r"\.shared_experts\.down_proj\.", ".shared_experts.w2."),
        (r"\.shared_experts\.up_proj\.", ".shared_experts.w3."),
        (r"\.position_bias$", ".ape"),
        (r"\.sinks$", ".attn_sink"),
        (r"\.input_layernorm\.", ".attn_norm."),
        (r"\.post_attention_layernorm\.", ".ffn_norm."),
        (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
        (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
    )
)


def published_name(name: str) -> str:
    """Return what the published checkpoints call a tensor."""
    for pattern, new in RENAMES:
        name = pattern.sub(new, name)
    return name


def is_draft(name: str) -> bool:
    """Whether a published name belongs to the layers that draft tokens, which are not run."""
    return name.startswith("mtp.")
