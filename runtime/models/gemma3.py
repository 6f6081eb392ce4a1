"""Gemma 3 (text): norms before and after each part, windowed and full layers in turn.

    h = h + norm(attention(norm(h)));  h = h + norm(mlp(norm(h)))

The two ropes, the (1 + weight) norms, q/k norms, scales and caps are entries of `DenseConfig`.
"""

from __future__ import annotations

from torch import Tensor

from statewise.kernels.interface import LayerWeights
from statewise.runtime.models.base import CausalLM, ForwardContext, LoadOptions
from statewise.runtime.models.config import ModelInfo
from statewise.runtime.models.dense import build_dense
from statewise.runtime.models.layers import Attention, Build, GatedMlp, Norm, layer_weights
from statewise.runtime.models.weights import WeightReader


class Gemma3Layer:
    """Attention and MLP, each between two norms."""

    def __init__(self, build: Build, layer: int) -> None:
        prefix, hidden = f"model.layers.{layer}", build.config.hidden_size
        self.input_norm = Norm(build, f"{prefix}.input_layernorm", hidden)
        self.attention = Attention(build, layer)
        self.attention_norm = Norm(build, f"{prefix}.post_attention_layernorm", hidden)
        self.mlp_norm = Norm(build, f"{prefix}.pre_feedforward_layernorm", hidden)
        self.mlp = GatedMlp(build, f"{prefix}.mlp")
        self.output_norm = Norm(build, f"{prefix}.post_feedforward_layernorm", hidden)

    def weights(self) -> LayerWeights:
        """Its parts; see `DecoderLayer`."""
        return layer_weights(
            self.attention,
            self.mlp,
            input_norm=self.input_norm,
            attention_norm=self.attention_norm,
            mlp_norm=self.mlp_norm,
            output_norm=self.output_norm,
        )

    def __call__(
        self, x: Tensor, residual: Tensor | None, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """Run the layer; see `DecoderLayer`."""
        if residual is None:
            residual, x = x, self.input_norm(x)
        else:
            x, residual = self.input_norm.add(x, residual)
        x = self.attention_norm(self.attention(x, ctx))
        x, residual = self.mlp_norm.add(x, residual)
        return self.output_norm(self.mlp(x)), residual


def build_model(info: ModelInfo, reader: WeightReader, options: LoadOptions) -> CausalLM:
    """Build a Gemma 3 model; ModelLoadError where the weights do not fit."""
    return build_dense(info, reader, options, Gemma3Layer)
