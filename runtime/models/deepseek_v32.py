"""DeepSeek-V3.2: latent attention (MLA) over the tokens that an indexer scores highest.

    h = h + attention(norm(h));  h = h + mlp(norm(h))

The MLP is dense in the first layers, then routed experts. A token's key for all heads is its latent
and a rotary part; its value is the latent. Each head's own up-projections are absorbed: into the
query before, into the result after attention.

    group     kind         one row holds
    latent    FULL         latent and rotary key of a token
    idx       INDEX(1)     index key of a token

The indexer scores every earlier token; where more than top-k are visible, only those are attended.
Source: the DeepSeek-V3.2 report.

Shapes: T tokens, d hidden, H heads, c latent dim, r rotary channels, HI index heads, cI index dim.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor
from torch.nn import functional

from statewise.kernels.interface import EntryGeometry, Ops
from statewise.kernels.reference import TorchOps
from statewise.radix.schema import GroupKind
from statewise.runtime.models.base import CausalLM, EntryAttention, ForwardContext, LoadOptions
from statewise.runtime.models.checkpoint_weights import CheckpointWeights
from statewise.runtime.models.config import ModelInfo
from statewise.runtime.models.deepseek_config import DeepseekV32Config
from statewise.runtime.models.deepseek_moe import GatedMlp, MoeBlock, Router, swiglu
from statewise.runtime.models.hybrid import GroupDraft, HybridModel, make_schema
from statewise.runtime.models.parts import Linear, RmsNorm, Rope, TokenTable, rope_first
from statewise.runtime.models.weights import WeightReader

LATENT_EPS = 1e-6  # of the norms within attention, whatever the config says


class Builder:
    """What the parts of one model are built from."""

    def __init__(
        self, config: DeepseekV32Config, weights: CheckpointWeights, ops: Ops, rope: Rope
    ) -> None:
        self.config, self.weights, self.ops, self.rope = config, weights, ops, rope

    def norm(self, name: str, width: int, eps: float) -> RmsNorm:
        """Norm with a weight in the model's dtype."""
        return RmsNorm(self.ops, self.weights.tensor(f"{name}.weight", [width]), eps)

    def bias(self, name: str, width: int) -> Tensor:
        """Bias of a projection; zeros where the model has none."""
        if self.config.has_bias:
            return self.weights.tensor(f"{name}.bias", [width])
        return torch.zeros(width, dtype=self.weights.reader.dtype)


class Indexer:
    """Index keys, and the choice of tokens by index queries."""

    def __init__(self, build: Builder, prefix: str, layer: int) -> None:
        config, weights = build.config, build.weights
        self.layer, self.config, self.rope = layer, config, build.rope
        heads, dim, hidden = config.index_heads, config.index_dim, config.hidden_size
        self.key = Linear(build.ops, weights.tensor(f"{prefix}.wk.weight", [dim, hidden]))
        self.norm_weight = weights.tensor(f"{prefix}.k_norm.weight", [dim])
        self.norm_bias = weights.tensor(f"{prefix}.k_norm.bias", [dim])
        rows = weights.tensor(f"{prefix}.wq_b.weight", [heads * dim, config.query_rank])
        self.query = Linear(build.ops, rows)
        self.head_weights = weights.tensor(f"{prefix}.weights_proj.weight", [heads, hidden])
        self.scale = (dim * heads) ** -0.5

    def __call__(self, x: Tensor, query_in: Tensor, ctx: ForwardContext) -> Tensor | None:
        """Append the tokens' index keys; return the tokens [T, top_k] that each attends to."""
        config = self.config
        key = functional.layer_norm(
            self.key(x), [config.index_dim], self.norm_weight, self.norm_bias, LATENT_EPS
        )
        q = self.query(query_in).view(-1, config.index_heads, config.index_dim)
        self.rope.rotate(ctx.positions, q, key.unsqueeze(1))
        ctx.append_entries("idx", self.layer, key)
        weights = functional.linear(x, self.head_weights) * self.scale
        return ctx.select_entries("idx", self.layer, q, weights, config.index_top_k)


class LatentAttention:
    """Attention of one layer, up-projections absorbed."""

    def __init__(self, build: Builder, layer: int) -> None:
        config, weights, ops = build.config, build.weights, build.ops
        prefix = f"model.layers.{layer}.self_attn"
        self.layer, self.config, self.rope = layer, config, build.rope
        hidden, heads = config.hidden_size, config.num_heads
        latent, rope_dim = config.latent_dim, config.rope_dim
        self.widths = [config.query_rank, latent, rope_dim]
        self.input = self._input(build, prefix)
        self.q_norm = build.norm(f"{prefix}.q_a_layernorm", config.query_rank, LATENT_EPS)
        self.latent_norm = build.norm(f"{prefix}.kv_a_layernorm", latent, LATENT_EPS)
        head_dim = config.nope_dim + rope_dim
        rows = weights.tensor(f"{prefix}.q_b_proj.weight", [heads * head_dim, config.query_rank])
        self.query = Linear(ops, rope_first(rows, head_dim, rope_dim))
        up = config.nope_dim + config.value_dim
        rows = weights.tensor(f"{prefix}.kv_b_proj.weight", [heads * up, latent])
        per_head = rows.view(heads, up, latent)
        self.key_up = per_head[:, : config.nope_dim].contiguous()  # [H, nope, c]
        self.value_up = per_head[:, config.nope_dim :].transpose(1, 2).contiguous()  # [H, c, v]
        width = heads * config.value_dim
        rows = weights.tensor(f"{prefix}.o_proj.weight", [hidden, width])
        self.output = Linear(ops, rows, build.bias(f"{prefix}.o_proj", hidden))
        self.indexer = Indexer(build, f"{prefix}.indexer", layer)
        self.over = EntryAttention(None, "latent", config.scale, latent)

    def _input(self, build: Builder, prefix: str) -> Linear:
        """Everything projected from a token's hidden state: query rank, latent, rotary key."""
        config, hidden = build.config, build.config.hidden_size
        name, key_name = f"{prefix}.q_a_proj", f"{prefix}.kv_a_proj_with_mqa"
        key_width = config.latent_dim + config.rope_dim
        query = build.weights.tensor(f"{name}.weight", [config.query_rank, hidden])
        keys = build.weights.tensor(f"{key_name}.weight", [key_width, hidden])
        bias = build.bias(key_name, key_width)
        order = [config.latent_dim, config.rope_dim]
        latent, rotary = torch.split(keys, order)
        latent_bias, rotary_bias = torch.split(bias, order)
        rotary = rope_first(rotary, config.rope_dim, config.rope_dim)
        rotary_bias = rope_first(rotary_bias, config.rope_dim, config.rope_dim)
        biases = [build.bias(name, config.query_rank), latent_bias, rotary_bias]
        return Linear(build.ops, torch.cat([query, latent, rotary]), torch.cat(biases))

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """[T, d] -> [T, d]; appends the tokens' latents and index keys."""
        config, rope_dim = self.config, self.config.rope_dim
        query_in, latent, rotary = torch.split(self.input(x), self.widths, dim=-1)
        query_in = self.q_norm(query_in)
        queries = self.query(query_in).view(len(x), config.num_heads, -1)
        rotary_q = queries[..., :rope_dim].contiguous()
        rotary = rotary.contiguous()
        self.rope.rotate(ctx.positions, rotary_q, rotary.unsqueeze(1))
        key = torch.cat([self.latent_norm(latent), rotary], dim=-1)
        ctx.append_entries("latent", self.layer, key)
        selected = self.indexer(x, query_in, ctx)
        absorbed = torch.bmm(queries[..., rope_dim:].transpose(0, 1), self.key_up).transpose(0, 1)
        q = torch.cat([absorbed, rotary_q], dim=-1)
        out = ctx.attend_entries(self.layer, q, self.over, selected)
        values = torch.bmm(out.transpose(0, 1), self.value_up).transpose(0, 1)
        return self.output(values.reshape(len(x), -1))


class V32Layer:
    """Attention and MLP, each behind a norm."""

    def __init__(self, build: Builder, layer: int) -> None:
        config, prefix = build.config, f"model.layers.{layer}"
        hidden = config.hidden_size
        self.attention_norm = build.norm(f"{prefix}.input_layernorm", hidden, config.norm_eps)
        self.attention = LatentAttention(build, layer)
        self.mlp_norm = build.norm(f"{prefix}.post_attention_layernorm", hidden, config.norm_eps)
        self.moe = _moe(build, f"{prefix}.mlp") if config.is_moe[layer] else None
        self.mlp: GatedMlp | None = None
        if self.moe is None:
            gated = build.weights.gated(f"{prefix}.mlp", config.intermediate_size, hidden)
            self.mlp = GatedMlp(build.ops, *gated, swiglu(build.ops, 0.0))

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """[T, d] -> [T, d]."""
        x = x + self.attention(self.attention_norm(x), ctx)
        inner = self.mlp_norm(x)
        if self.moe is not None:
            return x + self.moe(inner, ctx.token_ids)
        assert self.mlp is not None
        return x + self.mlp(inner)


def _moe(build: Builder, prefix: str) -> MoeBlock:
    config, weights, hidden = build.config.moe, build.weights, build.config.hidden_size
    gate = weights.wide(f"{prefix}.gate.weight", [config.num_experts, hidden])
    bias = weights.wide(f"{prefix}.gate.e_score_correction_bias", [config.num_experts])
    activation = swiglu(build.ops, config.limit)
    sizes = (config.num_experts, config.inner_size, hidden)
    shared = weights.gated(f"{prefix}.shared_experts", config.shared_size, hidden)
    return MoeBlock(
        Router(config, gate, bias, None),
        weights.experts(build.ops, f"{prefix}.experts", sizes, activation),
        GatedMlp(build.ops, *shared, activation),
    )


class DeepseekV32(HybridModel):
    """A DeepSeek-V3.2 model."""

    def __init__(self, build: Builder, info: ModelInfo, options: LoadOptions) -> None:
        config, weights = build.config, build.weights
        shape = [config.vocab_size, config.hidden_size]
        embedding = weights.tensor("model.embed_tokens.weight", shape)
        head = None if config.tied_embeddings else weights.tensor("lm_head.weight", shape)
        self.rope = build.rope
        self.layers = [V32Layer(build, i) for i in range(config.num_layers)]
        self.norm = build.norm("model.norm", config.hidden_size, config.norm_eps)
        drafts = group_drafts(config, options)
        digest = weights.finish(lambda name: _is_draft(name, config.num_layers))
        schema = make_schema(config, options, drafts, digest)
        super().__init__(info, TokenTable(build.ops, embedding, head), drafts, schema)

    def forward(self, token_ids: Tensor, ctx: ForwardContext, num_layers: int) -> Tensor:
        """Hidden states [T, d] after `num_layers` layers, the final norm applied if all ran."""
        self.rope.fill(ctx.positions)
        x = self.tokens.embed(token_ids)
        for layer in self.layers[:num_layers]:
            x = layer(x, ctx)
        return self.norm(x) if num_layers == len(self.layers) else x


def _is_draft(name: str, num_layers: int) -> bool:
    """Whether a tensor belongs to a layer behind the last: those draft tokens, and are not run."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return found is not None and int(found[1]) >= num_layers


def group_drafts(config: DeepseekV32Config, options: LoadOptions) -> list[GroupDraft]:
    """The latents of every token, and the index keys that lead to them."""
    every = tuple(range(config.num_layers))
    meaning = {"rope": vars(config.rope), "rope_dim": config.rope_dim}
    latent = EntryGeometry(config.latent_dim + config.rope_dim, options.page_size, options.kv_dtype)
    index = EntryGeometry(config.index_dim, options.page_size, options.kv_dtype)
    return [
        GroupDraft("latent", GroupKind.FULL, every, latent, meaning),
        GroupDraft(
            "idx",
            GroupKind.INDEX,
            every,
            index,
            meaning,
            depends_on="latent",
            top_k=config.index_top_k,
        ),
    ]


def build_model(info: ModelInfo, reader: WeightReader, options: LoadOptions) -> CausalLM:
    """Build a DeepSeek-V3.2 model; ModelLoadError where the weights do not fit."""
    config: DeepseekV32Config = info.config
    ops = options.ops or TorchOps()
    rope = Rope(ops, config.rope, config.rope_dim, info.max_context_len)
    return DeepseekV32(Builder(config, CheckpointWeights(reader), ops, rope), info, options)
