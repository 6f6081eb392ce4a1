"""DeepSeek-V4 tensors under one set of names, plain or quantised.

    published                    saved by transformers          module names
    embed.weight                 model.embed_tokens.weight      model.embed_tokens.weight
    head.weight                  head.weight                    lm_head.weight
    layers.0.attn.wq_a.weight    model.layers.0.attn.wq_a...    model.layers.0.self_attn.q_a_proj...
    layers.0.attn.kv_norm        model.layers.0.attn.norm       model.layers.0.self_attn.kv_norm
    layers.0.ffn.experts.0.w1    model.layers.0.ffn.experts...  model.layers.0.mlp.experts.gate_up_proj

Models ask for the published names. A matrix with a `.scale` beside it is dequantised: e4m3 under
scales of 128 x 128 blocks, or four-bit pairs (mxfp4) under scales of 32 input channels.

This module does not know which tensors a model needs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from statewise.runtime.models.mxfp4 import BLOCK, dequantise_mxfp4
from statewise.runtime.models.weights import WeightReader

FP8_BLOCK = 128
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


class DeepseekWeights:
    """A reader that takes published names, whatever the checkpoint calls its tensors."""

    def __init__(self, reader: WeightReader) -> None:
        self.reader = reader
        self._names = {published_name(name): name for name in reader.names()}

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds the tensor."""
        return name in self._names

    def tensor(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor in the model's dtype or in `dtype`; ModelLoadError if it does not fit."""
        scale = name.removesuffix(".weight") + ".scale"
        if name.endswith(".weight") and scale in self._names:
            return self._dequantised(name, scale, shape, dtype or self.reader.dtype)
        return self.reader.tensor(self._names.get(name, name), shape, dtype)

    def wide(self, name: str, shape: Sequence[int]) -> Tensor:
        """Return a tensor that must not be rounded: float32 at least."""
        return self.tensor(name, shape, self.reader.wide_dtype)

    def experts(self, prefix: str, count: int, inner: int, hidden: int) -> tuple[list[Tensor], ...]:
        """(gate_up [2I, d], down [d, I]) of every expert."""
        stacked = f"{prefix}.gate_up_proj"
        if stacked in self._names:
            return (
                list(self.tensor(stacked, [count, 2 * inner, hidden])),
                list(self.tensor(f"{prefix}.down_proj", [count, hidden, inner])),
            )
        gate_up, down = [], []
        for expert in range(count):
            name = f"{prefix}.{expert}"
            gate = self.tensor(f"{name}.w1.weight", [inner, hidden])
            up = self.tensor(f"{name}.w3.weight", [inner, hidden])
            gate_up.append(torch.cat([gate, up]))
            down.append(self.tensor(f"{name}.w2.weight", [hidden, inner]))
        return gate_up, down

    def finish(self) -> str:
        """Check that only draft layers are left over; fingerprint of the weights, as hex."""
        return self.reader.finish(
            lambda name: (
                published_name(name).startswith("mtp.") or name.endswith("rotary_emb.inv_freq")
            )
        )

    def _dequantised(
        self, name: str, scale: str, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        rows, columns = shape
        own, own_scale = self._names[name], self._names[scale]
        if self.reader.shape(own) == (rows, columns // 2):
            packed = self.reader.tensor(own, [rows, columns // 2], torch.int8).view(torch.uint8)
            scales = self.reader.tensor(own_scale, [rows, columns // BLOCK], torch.float8_e8m0fnu)
            return dequantise_mxfp4(packed, scales.view(torch.uint8), dtype)
        blocks = [-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)]
        values = self.reader.tensor(own, shape, torch.float32)
        scales = self.reader.tensor(own_scale, blocks, torch.float32)
        wide = scales.repeat_interleave(FP8_BLOCK, 0)[:rows]
        return (values * wide.repeat_interleave(FP8_BLOCK, 1)[:, :columns]).to(dtype)
