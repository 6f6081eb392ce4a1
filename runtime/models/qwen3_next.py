"""Qwen3-Next: three recurrent layers (gated delta net) to one of gated full attention; experts.

    h = h + mixer(norm(h));  h = h + mlp(norm(h))

    recurrent   q, k, v through a short convolution, then the gated delta rule; the result is
                normalised, gated by silu(z) and projected
    attention   grouped-query attention with norms on q and k and rotation of the first channels;
                the result is gated by sigmoid(g)

    group       kind         one row holds
    full        FULL         K and V of a token
    recurrent   RECURRENT    the last inputs of the convolution, and S of every head, in float32

A position can be resumed where a snapshot of `recurrent` was kept; stopping at multiples of 64
tokens changes no bit of it. Norms multiply by (1 + weight), that of the recurrent result by weight.

Shapes: T tokens, R rows, d hidden, H heads, D head dim, dk, dv of the recurrent heads.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from statewise.kernels.interface import AttentionGeometry, Ops, StateGeometry
from statewise.kernels.reference import TorchOps
from statewise.radix.schema import GroupKind
from statewise.runtime.models.base import CausalLM, ForwardContext, LoadOptions
from statewise.runtime.models.checkpoint_weights import CheckpointWeights
from statewise.runtime.models.config import ModelInfo
from statewise.runtime.models.deepseek_moe import GatedMlp, Router, swiglu
from statewise.runtime.models.hybrid import GroupDraft, HybridModel, make_schema
from statewise.runtime.models.parts import Linear, RmsNorm, Rope, TokenTable
from statewise.runtime.models.qwen3_next_config import Qwen3NextConfig
from statewise.runtime.models.weights import WeightReader


class Builder:
    """What the parts of one model are built from."""

    def __init__(
        self, config: Qwen3NextConfig, weights: CheckpointWeights, ops: Ops, rope: Rope
    ) -> None:
        self.config, self.weights, self.ops, self.rope = config, weights, ops, rope

    def norm(self, name: str, width: int) -> RmsNorm:
        """Norm that multiplies by (1 + weight)."""
        weight = self.weights.tensor(f"{name}.weight", [width])
        return RmsNorm(self.ops, weight, self.config.norm_eps, offset=1.0)

    def linear(self, names: list[str], rows: list[int], width: int, has_bias: bool) -> Linear:
        """Projections of one input, fused."""
        weights = [
            self.weights.tensor(f"{n}.weight", [r, width]) for n, r in zip(names, rows, strict=True)
        ]
        bias = None
        if has_bias:
            biases = [
                self.weights.tensor(f"{n}.bias", [r]) for n, r in zip(names, rows, strict=True)
            ]
            bias = torch.cat(biases)
        return Linear(self.ops, torch.cat(weights), bias)


class GatedAttention:
    """Full attention whose result is gated."""

    def __init__(self, build: Builder, layer: int) -> None:
        config, prefix = build.config, f"model.layers.{layer}.self_attn"
        dim, hidden = config.head_dim, config.hidden_size
        self.layer, self.config, self.rope = layer, config, build.rope
        self.widths = [2 * config.num_q_heads * dim] + [config.num_kv_heads * dim] * 2
        names = [f"{prefix}.{part}_proj" for part in "qkv"]
        self.input = build.linear(names, self.widths, hidden, config.has_bias)
        width = config.num_q_heads * dim
        self.output = build.linear([f"{prefix}.o_proj"], [hidden], width, config.has_bias)
        self.q_norm = build.norm(f"{prefix}.q_norm", dim)
        self.k_norm = build.norm(f"{prefix}.k_norm", dim)

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """[T, d] -> [T, d]; appends the tokens' K/V."""
        count, dim = len(x), self.config.head_dim
        both, k, v = torch.split(self.input(x), self.widths, dim=-1)
        q, gate = both.view(count, -1, 2 * dim).chunk(2, dim=-1)
        q = self.q_norm(q.contiguous())
        k = self.k_norm(k.reshape(count, -1, dim))
        self.rope.rotate(ctx.positions, q, k)
        out = ctx.attend(self.layer, q, k, v.reshape(count, -1, dim))
        return self.output((out * torch.sigmoid(gate)).reshape(count, -1))


class GatedDeltaNet:
    """Recurrent mixer of one layer."""

    def __init__(self, build: Builder, layer: int) -> None:
        config, weights, ops = build.config.recurrent, build.weights, build.ops
        prefix, hidden = f"model.layers.{layer}.linear_attn", build.config.hidden_size
        self.layer, self.config, self.ops = layer, config, ops
        self.eps = build.config.norm_eps
        key, value = config.key_heads * config.key_dim, config.value_heads * config.value_dim
        heads = config.value_heads
        names = [f"{prefix}.in_proj_qkvz", f"{prefix}.in_proj_ba"]
        self.widths = [2 * key + 2 * value, 2 * heads]
        self.input = build.linear(names, self.widths, hidden, has_bias=False)
        self.output = build.linear([f"{prefix}.out_proj"], [hidden], value, has_bias=False)
        shape = [config.conv_channels, 1, config.conv_size]
        self.conv = weights.wide(f"{prefix}.conv1d.weight", shape).squeeze(1)
        self.step_bias = weights.wide(f"{prefix}.dt_bias", [heads])
        self.rate = weights.wide(f"{prefix}.A_log", [heads]).exp()
        self.norm_weight = weights.wide(f"{prefix}.norm.weight", [config.value_dim])

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """[T, d] -> [T, d]; moves the rows' states on."""
        config = self.config
        states = ctx.states("recurrent", self.layer)
        before = states.read()
        window, recurrent = self._split_state(before)
        mixed, z, decay, beta = self._project(x, before.dtype)
        mixed, window = self.ops.causal_conv(mixed, window, self.conv, states.starts)
        q, k, v = self._heads(mixed)
        rows = (states.starts, states.positions)
        out, recurrent = self.ops.delta_rule(q, k, v, decay, beta, recurrent, rows)
        states.write(torch.cat([window.flatten(1), recurrent.flatten(1)], dim=1))
        out = self.ops.rms_norm(out, self.norm_weight.to(out.dtype), self.eps)
        gated = out.to(decay.dtype) * functional.silu(z.to(decay.dtype))
        return self.output(gated.to(x.dtype).view(len(x), config.value_heads * config.value_dim))

    def _split_state(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """(convolution window [R, K-1, C], S [R, H, dk, dv])."""
        config = self.config
        size = (config.conv_size - 1) * config.conv_channels
        window = state[:, :size].view(len(state), -1, config.conv_channels)
        shape = (len(state), config.value_heads, config.key_dim, config.value_dim)
        return window, state[:, size:].reshape(shape)

    def _project(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(q, k, v as [T, C], z [T, Hv, dv], decay and beta [T, Hv] in the state's dtype)."""
        config, count = self.config, len(x)
        group = config.value_heads // config.key_heads  # value heads of one key head
        qkvz, ba = torch.split(self.input(x), self.widths, dim=-1)
        sizes = [config.key_dim, config.key_dim] + [group * config.value_dim] * 2
        q, k, v, z = torch.split(qkvz.reshape(count, config.key_heads, -1), sizes, dim=-1)
        b, a = torch.split(ba.reshape(count, config.key_heads, -1), [group, group], dim=-1)
        mixed = torch.cat([part.reshape(count, -1) for part in (q, k, v)], dim=-1)
        step = functional.softplus(a.reshape(count, -1).to(dtype) + self.step_bias)
        beta = b.reshape(count, -1).sigmoid().to(dtype)
        return mixed, z.reshape(count, -1, config.value_dim), -self.rate * step, beta

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k [T, Hv, dk] and v [T, Hv, dv]; a key head serves several value heads."""
        config, count = self.config, len(mixed)
        key = config.key_heads * config.key_dim
        q, k, v = torch.split(mixed, [key, key, mixed.shape[1] - 2 * key], dim=-1)
        group = config.value_heads // config.key_heads
        q, k = (
            x.reshape(count, config.key_heads, -1).repeat_interleave(group, dim=1) for x in (q, k)
        )
        return q, k, v.reshape(count, config.value_heads, -1)


class SharedMoe:
    """Routed experts, and a shared one behind a gate of its own."""

    def __init__(self, build: Builder, prefix: str) -> None:
        config, weights, hidden = build.config.moe, build.weights, build.config.hidden_size
        gate = weights.wide(f"{prefix}.gate.weight", [config.num_experts, hidden])
        activation = swiglu(build.ops, 0.0)
        sizes = (config.num_experts, config.inner_size, hidden)
        self.router = Router(config, gate, None, None)
        self.experts = weights.experts(build.ops, f"{prefix}.experts", sizes, activation)
        shared = weights.gated(f"{prefix}.shared_expert", config.shared_size, hidden)
        self.shared = GatedMlp(build.ops, *shared, activation)
        self.shared_gate = weights.tensor(f"{prefix}.shared_expert_gate.weight", [1, hidden])

    def __call__(self, x: Tensor, token_ids: Tensor) -> Tensor:
        """[T, d] -> [T, d]."""
        chosen, weights = self.router(x, token_ids)
        gate = functional.linear(x, self.shared_gate).sigmoid()
        return self.experts(x, chosen, weights) + gate * self.shared(x)


class Qwen3NextLayer:
    """Mixer and MLP, each behind a norm."""

    def __init__(self, build: Builder, layer: int) -> None:
        config, prefix = build.config, f"model.layers.{layer}"
        hidden = config.hidden_size
        self.mixer_norm = build.norm(f"{prefix}.input_layernorm", hidden)
        self.mixer: GatedDeltaNet | GatedAttention = (
            GatedDeltaNet(build, layer)
            if config.is_recurrent[layer]
            else GatedAttention(build, layer)
        )
        self.mlp_norm = build.norm(f"{prefix}.post_attention_layernorm", hidden)
        self.moe = SharedMoe(build, f"{prefix}.mlp") if config.is_moe[layer] else None
        self.mlp: GatedMlp | None = None
        if self.moe is None:
            gated = build.weights.gated(f"{prefix}.mlp", config.intermediate_size, hidden)
            self.mlp = GatedMlp(build.ops, *gated, swiglu(build.ops, 0.0))

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """[T, d] -> [T, d]."""
        x = x + self.mixer(self.mixer_norm(x), ctx)
        inner = self.mlp_norm(x)
        if self.moe is not None:
            return x + self.moe(inner, ctx.token_ids)
        assert self.mlp is not None
        return x + self.mlp(inner)


class Qwen3Next(HybridModel):
    """A Qwen3-Next model."""

    def __init__(self, build: Builder, info: ModelInfo, options: LoadOptions) -> None:
        config, weights = build.config, build.weights
        shape = [config.vocab_size, config.hidden_size]
        embedding = weights.tensor("model.embed_tokens.weight", shape)
        head = None if config.tied_embeddings else weights.tensor("lm_head.weight", shape)
        self.rope = build.rope
        self.layers = [Qwen3NextLayer(build, i) for i in range(config.num_layers)]
        self.norm = build.norm("model.norm", config.hidden_size)
        drafts = group_drafts(config, options)
        digest = weights.finish(lambda name: name.startswith("mtp."))
        schema = make_schema(config, options, drafts, digest)
        super().__init__(info, TokenTable(build.ops, embedding, head), drafts, schema)

    def forward(self, token_ids: Tensor, ctx: ForwardContext, num_layers: int) -> Tensor:
        """Hidden states [T, d] after `num_layers` layers, the final norm applied if all ran."""
        self.rope.fill(ctx.positions)
        x = self.tokens.embed(token_ids)
        for layer in self.layers[:num_layers]:
            x = layer(x, ctx)
        return self.norm(x) if num_layers == len(self.layers) else x


def group_drafts(config: Qwen3NextConfig, options: LoadOptions) -> list[GroupDraft]:
    """K/V of the attention layers and state of the recurrent ones, where there are any."""
    recurrent = tuple(i for i, is_recurrent in enumerate(config.is_recurrent) if is_recurrent)
    full = tuple(i for i in range(config.num_layers) if i not in recurrent)
    attention = AttentionGeometry(
        num_q_heads=config.num_q_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=options.page_size,
        dtype=options.kv_dtype,
        scale=config.head_dim**-0.5,
    )
    wide = torch.float64 if options.dtype == torch.float64 else torch.float32
    state = StateGeometry(config.recurrent.num_values, wide)
    rope = {"rope": vars(config.rope), "rope_dim": config.rope_dim, "norm_eps": config.norm_eps}
    drafts = [
        GroupDraft("full", GroupKind.FULL, full, attention, rope),
        GroupDraft("recurrent", GroupKind.RECURRENT, recurrent, state, vars(config.recurrent)),
    ]
    return [draft for draft in drafts if draft.layers]


def build_model(info: ModelInfo, reader: WeightReader, options: LoadOptions) -> CausalLM:
    """Build a Qwen3-Next model; ModelLoadError where the weights do not fit."""
    config: Qwen3NextConfig = info.config
    ops = options.ops or TorchOps()
    rope = Rope(ops, config.rope, config.rope_dim, info.max_context_len)
    return Qwen3Next(Builder(config, CheckpointWeights(reader), ops, rope), info, options)
