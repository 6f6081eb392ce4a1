"""DeepSeek-V4: a window in every layer, and compressed history, routed or dense, in most.

    X = embedding, n times;  for attention and experts:  x = collapse(X);  X = expand(f(norm(x)), X)

    layer type   keys of a query, in one softmax with a sink per head
    window       the last W tokens
    csa          the window, and the top-k entries that the indexer scores highest
    hca          the window, and every entry

One key, which is its own value, serves all heads. Values are rotated with their keys, so the
attended result is rotated back at the query's position. Heads are projected in groups, each through
a narrow matrix of its own.

    group      kind              one row holds
    swa        WINDOW(W)         key of a token
    csa        COMPRESSED(m)     key of m tokens                 idx   INDEX(m)   its index key
    csa_tail   TAIL(m, m)        raw rows of the open window, and the halo of the one before
    hca        COMPRESSED(m')    key of m' tokens                hca_tail   TAIL(m')

Within a head, rotary channels come first here (`parts.rope_first`); the cache holds them so.
Source: the DeepSeek-V4 report, and the published configs.

Shapes: T tokens, d hidden, H heads, c head dim, n streams, N completed windows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from statewise.kernels.interface import EntryGeometry, Ops, StateGeometry
from statewise.kernels.reference import TorchOps
from statewise.radix.schema import GroupKind
from statewise.runtime.models.base import (
    CausalLM,
    EntryAttention,
    ForwardContext,
    LoadOptions,
    TailWindows,
)
from statewise.runtime.models.checkpoint_weights import CheckpointWeights
from statewise.runtime.models.compressor import Compressor, CompressorWeights, combine
from statewise.runtime.models.config import ModelInfo, RopeConfig
from statewise.runtime.models.deepseek_config import DENSE, SPARSE, WINDOWED, DeepseekV4Config
from statewise.runtime.models.deepseek_moe import GatedMlp, MoeBlock, Router, swiglu
from statewise.runtime.models.deepseek_weights import EXPERT_PARTS, is_draft, published_name
from statewise.runtime.models.hybrid import GroupDraft, HybridModel, make_schema
from statewise.runtime.models.hyper_connections import HyperConnection, HyperHead
from statewise.runtime.models.parts import Linear, RmsNorm, Rope, TokenTable, rope_first, unit_rms
from statewise.runtime.models.weights import WeightReader

COMPRESSION = 1  # version of the compression function: entries of another one are not the same
TAILS = {SPARSE: "csa_tail", DENSE: "hca_tail"}


class Builder:
    """What the parts of one model are built from."""

    def __init__(self, config: DeepseekV4Config, weights: CheckpointWeights, ops: Ops) -> None:
        self.config, self.weights, self.ops = config, weights, ops

    def norm(self, name: str, width: int) -> RmsNorm:
        """Norm with a weight that is not rounded."""
        return RmsNorm(self.ops, self.weights.wide(name, [width]), self.config.norm_eps)

    def key_norm(self, name: str, dim: int) -> RmsNorm:
        """Norm of keys, whose rotary channels come first."""
        weight = rope_first(self.weights.wide(name, [dim]), dim, self.config.rope_dim)
        return RmsNorm(self.ops, weight, self.config.norm_eps)

    def key_rows(self, name: str, heads: int, dim: int, width: int) -> Tensor:
        """Projection to keys or queries, rotary channels of every head first."""
        weight = self.weights.tensor(name, [heads * dim, width])
        return rope_first(weight, dim, self.config.rope_dim)

    def compressor(self, prefix: str, dim: int, ratio: int, halves: int) -> CompressorWeights:
        """Weights of one compressor."""
        hidden, rows = self.config.hidden_size, halves * dim
        return CompressorWeights(
            kv=self.weights.tensor(f"{prefix}.wkv.weight", [rows, hidden]),
            gate=self.weights.tensor(f"{prefix}.wgate.weight", [rows, hidden]),
            bias=self.weights.wide(f"{prefix}.ape", [ratio, rows]),
            norm=self.key_norm(f"{prefix}.norm.weight", dim),
            dim=dim,
            rope_dim=self.config.rope_dim,
        )

    def hyper(self, prefix: str) -> HyperConnection:
        """Hyper-connection around one block."""
        config = self.config
        n = config.hyper.streams
        rows = (2 + n) * n
        weights = (
            self.weights.wide(f"{prefix}_fn", [rows, n * config.hidden_size]),
            self.weights.wide(f"{prefix}_base", [rows]),
            self.weights.wide(f"{prefix}_scale", [3]),
        )
        return HyperConnection(self.ops, config.hyper, weights, config.norm_eps)


class History:
    """Compressed history of one layer: compressors, and the indexer of routed layers."""

    def __init__(self, build: Builder, prefix: str, layer: int) -> None:
        config = build.config
        self.layer, self.kind = layer, config.layers[layer]
        self.top_k = config.index_top_k
        self.tail = TAILS[self.kind]
        name = f"{prefix}.compressor"
        if self.kind == DENSE:
            compressors = [build.compressor(name, config.head_dim, config.dense_ratio, 1)]
        else:
            ratio = config.sparse_ratio
            compressors = [
                build.compressor(name, config.head_dim, ratio, 2),
                build.compressor(f"{prefix}.indexer.compressor", config.index_dim, ratio, 2),
            ]
        self.raw_rows, self.halo_width, parts = combine(compressors)
        self.main: Compressor = parts[0]
        self.index: Compressor | None = parts[1] if len(parts) == 2 else None
        self.index_scale = (config.index_dim * config.index_heads) ** -0.5

    def append(self, raw: Tensor, rope: Rope, ctx: ForwardContext) -> None:
        """Compress the windows that the tokens' raw rows [T, w] complete."""
        windows: TailWindows = ctx.tail_windows(self.tail, self.layer, raw, self.halo_width)
        ctx.append_entries(self.kind, self.layer, self.main.entries(windows, rope))
        if self.index is not None:
            ctx.append_entries("idx", self.layer, self.index.entries(windows, rope))

    def select(self, q: Tensor, weights: Tensor, ctx: ForwardContext) -> Tensor | None:
        """Entries that each token attends to, by index queries [T, HI, cI] and head weights."""
        scaled = weights * self.index_scale
        return ctx.select_entries("idx", self.layer, q, scaled, self.top_k)


class V4Attention:
    """Attention of one layer."""

    def __init__(self, build: Builder, layer: int, rope: Rope) -> None:
        config, weights, ops = build.config, build.weights, build.ops
        prefix = f"layers.{layer}.attn"
        self.layer, self.config, self.rope = layer, config, rope
        kind = config.layers[layer]
        hidden, dim = config.hidden_size, config.head_dim
        self.history = None if kind == WINDOWED else History(build, prefix, layer)
        is_routed = kind == SPARSE
        rows = [
            weights.tensor(f"{prefix}.wq_a.weight", [config.query_rank, hidden]),
            build.key_rows(f"{prefix}.wkv.weight", 1, dim, hidden),
        ]
        queries = [
            build.key_rows(f"{prefix}.wq_b.weight", config.num_heads, dim, config.query_rank)
        ]
        if self.history is not None:
            rows.append(self.history.raw_rows)
        if is_routed:
            name, heads = f"{prefix}.indexer", config.index_heads
            rows.append(weights.tensor(f"{name}.weights_proj.weight", [heads, hidden]))
            queries.append(
                build.key_rows(f"{name}.wq_b.weight", heads, config.index_dim, config.query_rank)
            )
        self.widths = [part.shape[0] for part in rows]
        self.input = Linear(ops, torch.cat(rows))
        self.query = Linear(ops, torch.cat(queries))
        self.q_norm = build.norm(f"{prefix}.q_norm.weight", config.query_rank)
        self.kv_norm = build.key_norm(f"{prefix}.kv_norm.weight", dim)
        self.sinks = weights.wide(f"{prefix}.attn_sink", [config.num_heads])
        self.grouped, self.output = _output(build, prefix)
        self.over = EntryAttention("swa", None if kind == WINDOWED else kind, dim**-0.5, dim)

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """[T, d] -> [T, d]; appends the tokens' keys, and entries that they complete."""
        config, dim = self.config, self.config.head_dim
        query_in, kv, *rest = torch.split(self.input(x), self.widths, dim=-1)
        queries = self.query(self.q_norm(query_in))
        head_width = config.num_heads * dim
        q = unit_rms(queries[:, :head_width].view(-1, config.num_heads, dim), config.norm_eps)
        kv = self.kv_norm(kv)
        self.rope.rotate(ctx.positions, q, kv.unsqueeze(1))
        ctx.append_entries("swa", self.layer, kv)
        selected = None
        if self.history is not None:
            self.history.append(rest[0], self.rope, ctx)
        if self.history is not None and len(rest) == 2:
            index_q = queries[:, head_width:].view(-1, config.index_heads, config.index_dim)
            self.rope.rotate(ctx.positions, index_q)
            selected = self.history.select(index_q, rest[1], ctx)
        out = ctx.attend_entries(self.layer, q, self.over, selected, self.sinks)
        self.rope.rotate_back(ctx.positions, out)
        groups = out.reshape(len(x), config.output_groups, -1)
        parts = [linear(groups[:, g]) for g, linear in enumerate(self.grouped)]
        return self.output(torch.cat(parts, dim=-1))


def _output(build: Builder, prefix: str) -> tuple[list[Linear], Linear]:
    """Narrow projections of each group of heads, and the one from all of them."""
    config, ops = build.config, build.ops
    groups, rank = config.output_groups, config.output_rank
    width = config.num_heads * config.head_dim // groups
    narrow = build.weights.tensor(f"{prefix}.wo_a.weight", [groups * rank, width])
    narrow = rope_first(narrow, config.head_dim, config.rope_dim, dim=1)
    wide = build.weights.tensor(f"{prefix}.wo_b.weight", [config.hidden_size, groups * rank])
    return [Linear(ops, part) for part in torch.split(narrow, rank)], Linear(ops, wide)


class V4Layer:
    """Attention and experts, each within its hyper-connection."""

    def __init__(self, build: Builder, layer: int, rope: Rope) -> None:
        prefix, hidden = f"layers.{layer}", build.config.hidden_size
        self.attention_hyper = build.hyper(f"{prefix}.hc_attn")
        self.attention_norm = build.norm(f"{prefix}.attn_norm.weight", hidden)
        self.attention = V4Attention(build, layer, rope)
        self.moe_hyper = build.hyper(f"{prefix}.hc_ffn")
        self.moe_norm = build.norm(f"{prefix}.ffn_norm.weight", hidden)
        self.moe = _moe(build, f"{prefix}.ffn", build.config.hash_routed[layer])

    def __call__(self, streams: Tensor, ctx: ForwardContext) -> Tensor:
        """[T, n, d] -> [T, n, d]."""
        x, post, mix = self.attention_hyper.collapse(streams)
        y = self.attention(self.attention_norm(x), ctx)
        streams = HyperConnection.expand(y, post, mix, streams)
        x, post, mix = self.moe_hyper.collapse(streams)
        y = self.moe(self.moe_norm(x), ctx.token_ids)
        return HyperConnection.expand(y, post, mix, streams)


def _moe(build: Builder, prefix: str, is_hash_routed: bool) -> MoeBlock:
    config, weights, hidden = build.config.moe, build.weights, build.config.hidden_size
    gate = weights.wide(f"{prefix}.gate.weight", [config.num_experts, hidden])
    bias = table = None
    if is_hash_routed:
        shape = [build.config.vocab_size, config.num_chosen]
        table = weights.tensor(f"{prefix}.gate.tid2eid", shape, torch.int64)
    else:
        bias = weights.wide(f"{prefix}.gate.bias", [config.num_experts])
    sizes = (config.num_experts, config.inner_size, hidden)
    activation = swiglu(build.ops, config.limit)
    shared = weights.gated(f"{prefix}.shared_experts", config.shared_size, hidden, EXPERT_PARTS)
    return MoeBlock(
        Router(config, gate, bias, table),
        weights.experts(build.ops, f"{prefix}.experts", sizes, activation, EXPERT_PARTS),
        GatedMlp(build.ops, *shared, activation),
    )


class DeepseekV4(HybridModel):
    """A DeepSeek-V4 model."""

    def __init__(
        self, build: Builder, info: ModelInfo, options: LoadOptions, ropes: dict[RopeConfig, Rope]
    ) -> None:
        config, weights = build.config, build.weights
        shape = [config.vocab_size, config.hidden_size]
        embedding = weights.tensor("embed.weight", shape)
        head = None if config.tied_embeddings else weights.tensor("head.weight", shape)
        self.config, self.ropes = config, ropes
        self.layers = [
            V4Layer(build, i, ropes[config.rope_of(i)]) for i in range(config.num_layers)
        ]
        n = config.hyper.streams
        self.head = HyperHead(
            config.hyper,
            weights.wide("hc_head_fn", [n, n * config.hidden_size]),
            weights.wide("hc_head_base", [n]),
            weights.wide("hc_head_scale", [1]),
            config.norm_eps,
        )
        self.norm = build.norm("norm.weight", config.hidden_size)
        drafts = group_drafts(config, options)
        schema = make_schema(config, options, drafts, weights.finish(is_draft))
        super().__init__(info, TokenTable(build.ops, embedding, head), drafts, schema)

    def forward(self, token_ids: Tensor, ctx: ForwardContext, num_layers: int) -> Tensor:
        """Hidden states [T, d] after `num_layers` layers, the final norm applied if all ran."""
        for rope in self.ropes.values():
            rope.fill(ctx.positions)
        embedded = self.tokens.embed(token_ids).unsqueeze(1)
        streams = embedded.repeat(1, self.config.hyper.streams, 1)
        for layer in self.layers[:num_layers]:
            streams = layer(streams, ctx)
        hidden = self.head(streams)
        return self.norm(hidden) if num_layers == len(self.layers) else hidden


def group_drafts(config: DeepseekV4Config, options: LoadOptions) -> list[GroupDraft]:
    """State groups of a config: the window, and those of the history kinds that it has."""
    page = options.page_size
    base: dict[str, Any] = {
        "rope": [vars(config.main_rope), vars(config.compressed_rope)],
        "rope_dim": config.rope_dim,
        "norm_eps": config.norm_eps,
        "layers": config.layers,
    }
    window = EntryGeometry(config.head_dim, page, options.kv_dtype, window=config.window)
    every = tuple(range(config.num_layers))
    drafts = [GroupDraft("swa", GroupKind.WINDOW, every, window, base | {"window": config.window})]
    for kind, ratio in ((SPARSE, config.sparse_ratio), (DENSE, config.dense_ratio)):
        layers = tuple(i for i in every if config.layers[i] == kind)
        if layers:
            meaning = base | {"compression": COMPRESSION, "ratio": ratio}
            drafts += _history_drafts(config, options, kind, layers, meaning)
    return drafts


def _history_drafts(
    config: DeepseekV4Config,
    options: LoadOptions,
    kind: str,
    layers: tuple[int, ...],
    meaning: dict[str, Any],
) -> list[GroupDraft]:
    page, kv_dtype = options.page_size, options.kv_dtype
    ratio = config.sparse_ratio if kind == SPARSE else config.dense_ratio
    wide = torch.float64 if options.dtype == torch.float64 else torch.float32
    dims = [config.head_dim, config.index_dim] if kind == SPARSE else [config.head_dim]
    main = EntryGeometry(config.head_dim, page, kv_dtype, ratio)
    drafts = [GroupDraft(kind, GroupKind.COMPRESSED, layers, main, meaning, ratio)]
    half = 2 * sum(dims)  # value and gate of a token, one half
    if kind == SPARSE:
        index = EntryGeometry(config.index_dim, page, kv_dtype, ratio)
        drafts.append(
            GroupDraft(
                "idx", GroupKind.INDEX, layers, index, meaning, ratio,
                depends_on=kind, top_k=config.index_top_k,
            )
        )  # fmt: skip
        tail, overlap = StateGeometry(ratio * half + (ratio - 1) * 2 * half, wide), ratio
    else:
        tail, overlap = StateGeometry((ratio - 1) * half, wide), 0
    drafts.append(GroupDraft(TAILS[kind], GroupKind.TAIL, layers, tail, meaning, ratio, overlap))
    return drafts


def build_model(info: ModelInfo, reader: WeightReader, options: LoadOptions) -> CausalLM:
    """Build a DeepSeek-V4 model; ModelLoadError where the weights do not fit."""
    config: DeepseekV4Config = info.config
    ops = options.ops or TorchOps()
    distinct = dict.fromkeys(config.rope_of(i) for i in range(config.num_layers))
    ropes = {r: Rope(ops, r, config.rope_dim, info.max_context_len) for r in distinct}
    return DeepseekV4(
        Builder(config, CheckpointWeights(reader, published_name), ops), info, options, ropes
    )
