"""Llama, and the models that differ from it only in their config: Mistral, Qwen2, Qwen3, SmolLM2.

    h = h + attention(norm(h));  h = h + mlp(norm(h))

Biases, q/k norms, tied embeddings, windows and rope scaling are entries of `DenseConfig`.
"""

from __future__ import annotations

from torch import Tensor

from statewise.kernels.interface import LayerWeights
from statewise.runtime.models.base import CausalLM, ForwardContext, LoadOptions
from statewise.runtime.models.config import ModelInfo
from statewise.runtime.models.dense import build_dense
from statewise.runtime.models.layers import Attention, Build, GatedMlp, Norm, layer_weights
from statewise.runtime.models.weights import WeightReader


class LlamaLayer:
    """Attention and MLP, each behind a norm."""

    def __init__(self, build: Build, layer: int) -> None:
        prefix, hidden = f"model.layers.{layer}", build.config.hidden_size
        self.input_norm = Norm(build, f"{prefix}.input_layernorm", hidden)
        self.attention = Attention(build, layer)
        self.mlp_norm = Norm(build, f"{prefix}.post_attention_layernorm", hidden)
        self.mlp = GatedMlp(build, f"{prefix}.mlp")

    def weights(self) -> LayerWeights:
        """Its parts; see `DecoderLayer`."""
        return layer_weights(
            self.attention, self.mlp, input_norm=self.input_norm, mlp_norm=self.mlp_norm
        )

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


def build_model(info: ModelInfo, reader: WeightReader, options: LoadOptions) -> CausalLM:
    """Build a Llama-like model; ModelLoadError where the weights do not fit."""
    return build_dense(info, reader, options, LlamaLayer)
