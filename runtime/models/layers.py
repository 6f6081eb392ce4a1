"""The parts that dense decoders are made of: projections, attention, gated MLP, embeddings.

A part reads its weights in its constructor (so a missing tensor is found there) and computes in
`__call__`. Projections that read the same input are fused into one weight. Parts see neither pages
nor rows: attention hands q, k, v to `ForwardContext.attend`.

This module does not know in which order a model puts its parts together.

Shapes: T tokens of the step, d hidden, Hq/Hkv heads, D head dim, I intermediate, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from statewise.kernels.interface import LayerMatrix, LayerWeights, Ops
from statewise.runtime.models.base import ForwardContext
from statewise.runtime.models.config import DenseConfig, RopeConfig
from statewise.runtime.models.rope import RopeTable
from statewise.runtime.models.weights import WeightReader


@dataclass(frozen=True)
class Build:
    """What every part needs to be built."""

    config: DenseConfig
    reader: WeightReader
    ops: Ops
    ropes: dict[RopeConfig, RopeTable]  # one table for all layers with the same rope

    def packed(self, names: list[str], rows: list[int], in_features: int) -> Any:
        """Several matrices over the same inputs as one, packed for `Ops.linear`."""
        if self.ops.keeps_codes:
            codes = self.reader.codes(names, rows, in_features)
            kept = None if codes is None else self.ops.pack_codes(codes)
            if kept is not None:
                self.reader.taken(names)
                return kept
        return self.ops.pack(self.reader.stacked(names, rows, in_features))


class Norm:
    """RMS norm of the last dimension; multiplies by (offset + weight)."""

    def __init__(self, build: Build, name: str, width: int) -> None:
        self.ops = build.ops
        self.eps = build.config.norm_eps
        self.offset = build.config.norm_offset
        self.weight = build.reader.tensor(f"{name}.weight", [width])

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise x [..., width]."""
        return self.ops.rms_norm(x, self.weight, self.eps, self.offset)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (norm(x + residual), x + residual)."""
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps, self.offset)


class Projection:
    """One matrix, or several over the same input fused into one."""

    def __init__(
        self, build: Build, names: list[str], rows: list[int], in_features: int, has_bias: bool
    ) -> None:
        reader = build.reader
        self.ops = build.ops
        self.weight: Any = build.packed([f"{n}.weight" for n in names], rows, in_features)
        self.bias = reader.stacked([f"{n}.bias" for n in names], rows) if has_bias else None

    @property
    def matrix(self) -> LayerMatrix:
        """The weight and the bias."""
        return LayerMatrix(self.weight, self.bias)

    def __call__(self, x: Tensor) -> Tensor:
        """Return x [T, in] @ weight.T + bias -> [T, sum(rows)]."""
        return self.ops.linear(x, self.weight, self.bias)


class Attention:
    """Self-attention of one layer, with optional norms on q and k."""

    def __init__(self, build: Build, layer: int) -> None:
        config, prefix = build.config, f"model.layers.{layer}.self_attn"
        dim = config.head_dim
        self.layer = layer
        self.ops = build.ops
        self.head_dim = dim
        self.widths = [config.num_q_heads * dim, config.num_kv_heads * dim]
        self.qkv = Projection(
            build,
            [f"{prefix}.{part}_proj" for part in "qkv"],
            [self.widths[0], self.widths[1], self.widths[1]],
            config.hidden_size,
            config.qkv_bias,
        )
        self.output = Projection(
            build,
            [f"{prefix}.o_proj"],
            [config.hidden_size],
            self.widths[0],
            config.output_bias,
        )
        self.q_norm = Norm(build, f"{prefix}.q_norm", dim) if config.qk_norm else None
        self.k_norm = Norm(build, f"{prefix}.k_norm", dim) if config.qk_norm else None
        self.rope = build.ropes[config.layers[layer].rope]
        self.sinks: Tensor | None = None
        if config.attention_sinks:
            reader = build.reader
            self.sinks = reader.tensor(f"{prefix}.sinks", [config.num_q_heads], reader.wide_dtype)

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """Attend with x [T, d] -> [T, d]; appends the tokens' K/V to the layer's group."""
        num_tokens, dim = x.shape[0], self.head_dim
        q_width, kv_width = self.widths
        qkv = self.qkv(x)
        q = qkv[:, :q_width].view(num_tokens, -1, dim)
        k = qkv[:, q_width : q_width + kv_width].view(num_tokens, -1, dim)
        v = qkv[:, q_width + kv_width :].view(num_tokens, -1, dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        self.ops.rope(q, k, self.rope.cos, self.rope.sin, ctx.positions)
        attended = ctx.attend(self.layer, q, k, v, self.sinks)
        return self.output(attended.reshape(num_tokens, q_width))


class GatedMlp:
    """down(act(gate(x)) * up(x))."""

    def __init__(self, build: Build, prefix: str) -> None:
        config = build.config
        inner, hidden = config.intermediate_size, config.hidden_size
        self.ops = build.ops
        self.activation = config.activation
        self.gate_up = Projection(
            build,
            [f"{prefix}.gate_proj", f"{prefix}.up_proj"],
            [inner, inner],
            hidden,
            config.mlp_bias,
        )
        self.down = Projection(build, [f"{prefix}.down_proj"], [hidden], inner, config.mlp_bias)

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, d] for x [T, d]."""
        return self.down(self.ops.gated_act(self.gate_up(x), self.activation))


def layer_weights(
    attention: Attention,
    mlp: GatedMlp,
    *,
    input_norm: Norm,
    mlp_norm: Norm,
    attention_norm: Norm | None = None,
    output_norm: Norm | None = None,
) -> LayerWeights:
    """The parts of one layer for `Ops.stack`; the last two norms are of what a part adds."""

    def weight(norm: Norm | None) -> Tensor | None:
        return None if norm is None else norm.weight

    return LayerWeights(
        input_norm=input_norm.weight,
        qkv=attention.qkv.matrix,
        q_norm=weight(attention.q_norm),
        k_norm=weight(attention.k_norm),
        cos=attention.rope.cos,
        sin=attention.rope.sin,
        sinks=attention.sinks,
        output=attention.output.matrix,
        attention_norm=weight(attention_norm),
        mlp_norm=mlp_norm.weight,
        gate_up=mlp.gate_up.matrix,
        down=mlp.down.matrix,
        output_norm=weight(output_norm),
    )


class Embedding:
    """Token embeddings, and logits over the same vocabulary (tied or not)."""

    def __init__(self, build: Build) -> None:
        config, reader = build.config, build.reader
        shape = [config.vocab_size, config.hidden_size]
        self.ops = build.ops
        self.scale: Tensor | None = None
        if config.embedding_scale != 1.0:
            # Rounded to the weights' type before it multiplies, as the model was trained.
            self.scale = torch.tensor(config.embedding_scale).to(reader.dtype)
        table = "model.embed_tokens.weight"
        if config.tied_embeddings:  # one copy serves both
            self.weight: Any = build.packed([table], shape[:1], shape[1])
            self.head: Any = self.weight
        else:
            self.weight = reader.tensor(table, shape)
            self.head = build.packed(["lm_head.weight"], shape[:1], shape[1])
        self.final_soft_cap = config.final_soft_cap

    def embed(self, token_ids: Tensor) -> Tensor:
        """Hidden states [T, d] of token_ids [T] int64."""
        rows = self.ops.rows(self.weight, token_ids)
        return rows if self.scale is None else rows * self.scale

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] float32 of normalised hidden states [N, d]."""
        cap = self.final_soft_cap
        if cap <= 0:
            return self.ops.logits(hidden, self.head)
        logits = torch.tanh(self.ops.linear(hidden, self.head) / cap) * cap
        return logits if logits.dtype == torch.float64 else logits.float()
