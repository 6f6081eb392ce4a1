"""gpt-oss: windowed and full attention in turn, attention sinks, experts instead of an MLP.

    h = h + attention(norm(h));  h = h + experts(norm(h))

    expert   g, u = W_in x + b_in;  g = min(g, limit);  u = clamp(u, -limit, limit)
             y = W_out((u + 1) * g * sigmoid(alpha * g)) + b_out
    router   softmax over the logits of the chosen experts only

Sinks, biases and YaRN are entries of the config; attention is that of the dense decoders. Experts
come as plain matrices or as MXFP4 blocks with scales, which are dequantised while loading.
"""

from __future__ import annotations

import torch
from torch import Tensor

from statewise.runtime.models.base import CausalLM, ForwardContext, LoadOptions
from statewise.runtime.models.config import GptOssConfig, ModelInfo
from statewise.runtime.models.dense import build_dense
from statewise.runtime.models.layers import Attention, Build, Norm, Projection
from statewise.runtime.models.moe import Experts
from statewise.runtime.models.mxfp4 import BLOCK, dequantise_mxfp4
from statewise.runtime.models.weights import WeightReader


class GptOssLayer:
    """Attention and experts, each behind a norm."""

    def __init__(self, build: Build, layer: int) -> None:
        prefix, hidden = f"model.layers.{layer}", build.config.hidden_size
        self.input_norm = Norm(build, f"{prefix}.input_layernorm", hidden)
        self.attention = Attention(build, layer)
        self.mlp_norm = Norm(build, f"{prefix}.post_attention_layernorm", hidden)
        self.mlp = GptOssMlp(build, f"{prefix}.mlp")

    def weights(self) -> None:
        """None: experts are no part of a stack."""

    def __call__(
        self, x: Tensor, residual: Tensor | None, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """Run the layer; see `DecoderLayer`."""
        if residual is None:
            residual, x = x, self.input_norm(x)
        else:
            x, residual = self.input_norm.add(x, residual)
        x, residual = self.mlp_norm.add(self.attention(x, ctx), residual)
        return self.mlp(x), residual


class GptOssMlp:
    """Router and experts."""

    def __init__(self, build: Build, prefix: str) -> None:
        config = build.config
        assert isinstance(config, GptOssConfig)
        hidden, count = config.hidden_size, config.num_experts
        self.limit, self.alpha = config.swiglu_limit, config.swiglu_alpha
        self.num_chosen = config.num_chosen
        self.router = Projection(build, [f"{prefix}.router"], [count], hidden, has_bias=True)
        wide = 2 * config.intermediate_size
        name, reader = f"{prefix}.experts", build.reader
        gate_up = _matrices(reader, f"{name}.gate_up_proj", count, wide, hidden)
        down = _matrices(reader, f"{name}.down_proj", count, hidden, config.intermediate_size)
        up_bias = reader.tensor(f"{name}.gate_up_proj_bias", [count, wide])
        down_bias = reader.tensor(f"{name}.down_proj_bias", [count, hidden])
        self.experts = Experts(
            build.ops,
            [_halves(matrix) for matrix in gate_up],
            list(down),
            self._activation,
            (_halves(up_bias.T).T.contiguous(), down_bias),
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, d] for x [T, d]."""
        top, chosen = self.router(x).topk(self.num_chosen, dim=-1)
        return self.experts(x, chosen, top.softmax(-1))

    def _activation(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


def _matrices(reader: WeightReader, name: str, count: int, rows: int, columns: int) -> Tensor:
    """[E, out, in] of a projection stored as [E, in, out], or as MXFP4 blocks of [E, out, in]."""
    if reader.has(name):
        return reader.tensor(name, [count, columns, rows]).transpose(1, 2).contiguous()
    shape = [count, rows, columns // BLOCK]
    packed = reader.tensor(f"{name}_blocks", [*shape, BLOCK // 2], torch.uint8)
    scales = reader.tensor(f"{name}_scales", shape, torch.uint8)
    return dequantise_mxfp4(packed.flatten(-2), scales, reader.dtype)


def _halves(interleaved: Tensor) -> Tensor:
    """Rows g0 u0 g1 u1 ... as g0 g1 ... u0 u1 ..."""
    return torch.cat([interleaved[0::2], interleaved[1::2]]).contiguous()


def build_model(info: ModelInfo, reader: WeightReader, options: LoadOptions) -> CausalLM:
    """Build a gpt-oss model; ModelLoadError where the weights do not fit."""
    return build_dense(info, reader, options, GptOssLayer)
