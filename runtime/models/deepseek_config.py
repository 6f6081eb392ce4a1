"""DeepSeek's hybrid models as data: V4 (windows, compressed and routed history) and V3.2.

    V4 config.json as published              as saved by transformers
    compress_ratios (0, 4, 128 by layer)     layer_types, compress_rates
    qk_rope_head_dim                         partial_rotary_factor
    rope_scaling (of compressed layers)      rope_parameters: main, compress
    num_hash_layers                          mlp_layer_types

This module reads no files and no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from statewise.runtime.models.config import MAX_LAYERS, Fields, RopeConfig

WINDOWED, SPARSE, DENSE = "window", "csa", "hca"  # what a V4 layer attends over besides its window
LAYER_TYPES = {
    "sliding_attention": WINDOWED,
    "compressed_sparse_attention": SPARSE,
    "heavily_compressed_attention": DENSE,
}
SPARSE_RATIO = 4  # the one that `compress_ratios` gives to routed layers
SCORES = ("sqrtsoftplus", "sigmoid", "softmax")
ROPE_KINDS = ("default", "linear", "yarn")


@dataclass(frozen=True)
class MoeConfig:
    """Routed experts: `num_chosen` of `num_experts` for each token, and a shared one."""

    num_experts: int
    num_chosen: int
    inner_size: int
    shared_size: int
    score: str
    scaling: float  # of the normalised weights
    normalised: bool = True
    limit: float = 0.0  # clamp of gate and up; 0: none
    num_groups: int = 1  # experts are chosen within the best `num_chosen_groups` of them
    num_chosen_groups: int = 1


@dataclass(frozen=True)
class HyperConfig:
    """Hyper-connections: `streams` residual streams, mixed by a doubly stochastic matrix."""

    streams: int
    iterations: int
    eps: float


@dataclass(frozen=True)
class DeepseekV4Config:
    """DeepSeek-V4."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    head_dim: int
    rope_dim: int  # the last channels of a head
    query_rank: int
    output_groups: int
    output_rank: int
    window: int  # tokens
    layers: tuple[str, ...]  # WINDOWED, SPARSE or DENSE
    sparse_ratio: int  # tokens of one entry
    dense_ratio: int
    hash_routed: tuple[bool, ...]  # layers whose experts follow from the token id
    index_heads: int
    index_dim: int
    index_top_k: int
    main_rope: RopeConfig  # of layers with a window alone
    compressed_rope: RopeConfig
    moe: MoeConfig
    hyper: HyperConfig
    max_context_len: int
    norm_eps: float
    tied_embeddings: bool

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def page_unit(self) -> int:
        """A page holds whole entries of every kind of layer."""
        ratios = {SPARSE: self.sparse_ratio, DENSE: self.dense_ratio}
        return math.lcm(*(ratios.get(kind, 1) for kind in self.layers))

    def rope_of(self, layer: int) -> RopeConfig:
        """Rope of a layer's queries, keys and entries."""
        return self.main_rope if self.layers[layer] == WINDOWED else self.compressed_rope


def parse_deepseek_v4(fields: Fields) -> DeepseekV4Config:
    """Read a DeepSeek-V4 config in either dialect."""
    layers = _layer_kinds(fields)
    ratios = _ratios(fields)
    head_dim = fields.integer("head_dim", 512)
    rope_dim = _rope_dim(fields, head_dim)
    heads, groups = fields.integer("num_attention_heads"), fields.integer("o_groups", 8)
    if heads % groups:
        raise fields.fail(f"{heads} heads do not divide over {groups} output groups")
    if fields.integer("num_key_value_heads", 1) != 1:
        raise fields.fail("'num_key_value_heads' must be 1: keys and values are shared")
    main, compressed = _v4_ropes(fields)
    return DeepseekV4Config(
        architecture=fields.raw["architectures"][0],
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        num_heads=heads,
        head_dim=head_dim,
        rope_dim=rope_dim,
        query_rank=fields.integer("q_lora_rank"),
        output_groups=groups,
        output_rank=fields.integer("o_lora_rank"),
        window=fields.integer("sliding_window", 128),
        layers=layers,
        sparse_ratio=ratios[0],
        dense_ratio=ratios[1],
        hash_routed=_hash_routed(fields, len(layers)),
        index_heads=fields.integer("index_n_heads", 64),
        index_dim=fields.integer("index_head_dim", 128),
        index_top_k=fields.integer("index_topk", 512),
        main_rope=main,
        compressed_rope=compressed,
        moe=_v4_moe(fields),
        hyper=HyperConfig(
            fields.integer("hc_mult", 4),
            fields.integer("hc_sinkhorn_iters", 20),
            fields.number("hc_eps", 1e-6),
        ),
        max_context_len=fields.integer("max_position_embeddings", 1048576),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
    )


@dataclass(frozen=True)
class DeepseekV32Config:
    """DeepSeek-V3.2: latent attention over the tokens that an indexer chooses."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    nope_dim: int  # channels of a query head without rotation
    rope_dim: int
    value_dim: int
    latent_dim: int
    query_rank: int
    has_bias: bool
    index_heads: int
    index_dim: int
    index_top_k: int
    is_moe: tuple[bool, ...]  # by layer
    moe: MoeConfig
    rope: RopeConfig
    scale: float  # softmax scale
    max_context_len: int
    norm_eps: float
    tied_embeddings: bool

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.is_moe)


def parse_deepseek_v32(fields: Fields) -> DeepseekV32Config:
    """Read a DeepSeek-V3.2 config."""
    depth = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    nope, rope_dim = fields.integer("qk_nope_head_dim", 128), fields.integer("qk_rope_head_dim", 64)
    index_dim = fields.integer("index_head_dim", 128)
    if rope_dim % 2 or rope_dim > index_dim:
        raise fields.fail(f"{rope_dim} rotary channels are not pairs within an index key")
    new = fields.section("rope_parameters")
    theta = fields.number("rope_theta", 10_000.0)
    rope = scaled_rope(new if new.raw else fields.section("rope_scaling"), theta)
    return DeepseekV32Config(
        architecture=fields.raw["architectures"][0],
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=fields.integer("num_attention_heads"),
        nope_dim=nope,
        rope_dim=rope_dim,
        value_dim=fields.integer("v_head_dim", 128),
        latent_dim=fields.integer("kv_lora_rank", 512),
        query_rank=fields.integer("q_lora_rank", 1536),
        has_bias=fields.flag("attention_bias", False),
        index_heads=fields.integer("index_n_heads", 64),
        index_dim=index_dim,
        index_top_k=fields.integer("index_topk", 2048),
        is_moe=_v32_moe_layers(fields, depth),
        moe=_v32_moe(fields),
        rope=rope,
        scale=(nope + rope_dim) ** -0.5 * _softmax_gain(rope) ** 2,
        max_context_len=fields.integer("max_position_embeddings", 163840),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
    )


def _softmax_gain(rope: RopeConfig) -> float:
    if rope.kind == "default" or not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0


def _v32_moe_layers(fields: Fields, depth: int) -> tuple[bool, ...]:
    types = fields.raw.get("mlp_layer_types")
    if types is None:
        first = fields.integer("first_k_dense_replace", 3, low=0)
        return tuple(i >= first for i in range(depth))
    known = {"sparse": True, "dense": False}
    if not isinstance(types, list) or len(types) != depth or not set(types) <= set(known):
        raise fields.fail(f"'mlp_layer_types' must list {depth} of {list(known)}, not {types!r}")
    return tuple(known[name] for name in types)


def _v32_moe(fields: Fields) -> MoeConfig:
    inner = fields.integer("moe_intermediate_size")
    experts = _experts(fields)
    groups, chosen = fields.integer("n_group", 1), fields.integer("topk_group", 1)
    if experts["num_experts"] % groups or chosen > groups:
        raise fields.fail(f"experts do not divide into {groups} groups, {chosen} chosen")
    return MoeConfig(
        **experts,
        inner_size=inner,
        shared_size=inner * fields.integer("n_shared_experts", 1),
        score=_score(fields, "sigmoid"),
        scaling=fields.number("routed_scaling_factor", 2.5),
        normalised=fields.flag("norm_topk_prob", True),
        num_groups=groups,
        num_chosen_groups=chosen,
    )


def _layer_kinds(fields: Fields) -> tuple[str, ...]:
    depth = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    types = fields.raw.get("layer_types")
    if types is None:
        ratios = fields.raw.get("compress_ratios")
        if not isinstance(ratios, list) or len(ratios) < depth:
            raise fields.fail(f"'compress_ratios' or 'layer_types' must list {depth} layers")
        # Entries beyond the last layer belong to draft layers.
        known = {0: WINDOWED, SPARSE_RATIO: SPARSE}
        return tuple(known.get(ratio, DENSE) for ratio in ratios[:depth])
    if not isinstance(types, list) or len(types) < depth:
        raise fields.fail(f"'layer_types' must list {depth} layers, not {types!r}")
    for name in types[:depth]:
        if name not in LAYER_TYPES:
            raise fields.fail(f"layer type {name!r} is not supported; known: {list(LAYER_TYPES)}")
    return tuple(LAYER_TYPES[name] for name in types[:depth])


def _ratios(fields: Fields) -> tuple[int, int]:
    """Tokens of one entry in routed and in dense layers."""
    rates = fields.section("compress_rates")
    sparse = rates.integer(
        "compressed_sparse_attention", fields.integer("compress_rate_csa", SPARSE_RATIO), low=2
    )
    listed = fields.raw.get("compress_ratios") or []
    dense = {r for r in listed if r not in (0, SPARSE_RATIO)}
    if len(dense) > 1 or any(not isinstance(r, int) or r < 0 for r in listed):
        raise fields.fail(f"'compress_ratios' has more than one ratio beside 4: {sorted(dense)}")
    default = fields.integer("compress_rate_hca", next(iter(dense), 128))
    return sparse, rates.integer("heavily_compressed_attention", default, low=2)


def _rope_dim(fields: Fields, head_dim: int) -> int:
    if fields.has("qk_rope_head_dim"):
        dim = fields.integer("qk_rope_head_dim")
    else:
        dim = int(head_dim * fields.number("partial_rotary_factor", 64 / 512))
    if dim % 2 or not 0 < dim <= head_dim:
        raise fields.fail(f"{dim} rotary channels of {head_dim} are not pairs")
    if dim > fields.integer("index_head_dim", 128):
        raise fields.fail(f"{dim} rotary channels do not fit an index key")
    return dim


def _v4_ropes(fields: Fields) -> tuple[RopeConfig, RopeConfig]:
    """Ropes of windowed and of compressed layers; cos and sin are never scaled."""
    theta = fields.number("rope_theta", 10_000.0)
    compressed_theta = fields.number("compress_rope_theta", 160_000.0)
    new = fields.section("rope_parameters")
    if new.has("main") and new.has("compress"):
        main = new.section("main")
        return (
            RopeConfig(theta=main.number("rope_theta", theta)),
            _unscaled_rope(new.section("compress"), compressed_theta),
        )
    scaled = new if new.raw else fields.section("rope_scaling")
    without_theta = Fields({**scaled.raw, "rope_theta": None}, scaled.source)
    return RopeConfig(theta=theta), _unscaled_rope(without_theta, compressed_theta)


def _unscaled_rope(fields: Fields, theta: float) -> RopeConfig:
    return RopeConfig(**{**vars(scaled_rope(fields, theta)), "attention_factor": 1.0})


def scaled_rope(fields: Fields, theta: float) -> RopeConfig:
    """One rope from `rope_parameters` or `rope_scaling`; an empty section is the default rope."""
    kind = fields.text("rope_type", fields.text("type", "default"))
    theta = fields.number("rope_theta", theta)
    if kind not in ROPE_KINDS:
        raise fields.fail(f"rope type {kind!r} is not supported; known: {', '.join(ROPE_KINDS)}")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(kind, theta, fields.number("factor"))
    has_factor = fields.has("attention_factor")
    return RopeConfig(
        kind,
        theta,
        fields.number("factor"),
        fields.integer("original_max_position_embeddings"),
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        attention_factor=fields.number("attention_factor") if has_factor else None,
        mscale=fields.number("mscale", 0.0),
        mscale_all_dim=fields.number("mscale_all_dim", 0.0),
        truncate=fields.flag("truncate", True),
    )


def _hash_routed(fields: Fields, depth: int) -> tuple[bool, ...]:
    types = fields.raw.get("mlp_layer_types")
    if types is None:
        count = fields.integer("num_hash_layers", 3, low=0)
        return tuple(i < count for i in range(depth))
    if not isinstance(types, list) or len(types) < depth:
        raise fields.fail(f"'mlp_layer_types' must list {depth} layers, not {types!r}")
    known = {"hash_moe": True, "moe": False}
    for name in types[:depth]:
        if name not in known:
            raise fields.fail(f"mlp layer type {name!r} is not supported; known: {list(known)}")
    return tuple(known[name] for name in types[:depth])


def _v4_moe(fields: Fields) -> MoeConfig:
    inner = fields.integer("moe_intermediate_size")
    if not fields.flag("norm_topk_prob", True):
        raise fields.fail("'norm_topk_prob' must be true")
    return MoeConfig(
        **_experts(fields),
        inner_size=inner,
        shared_size=inner * fields.integer("n_shared_experts", 1),
        score=_score(fields, "sqrtsoftplus"),
        scaling=fields.number("routed_scaling_factor", 1.5),
        limit=fields.number("swiglu_limit", 10.0),
    )


def _experts(fields: Fields) -> Mapping[str, Any]:
    count = fields.integer("n_routed_experts", fields.integer("num_local_experts", 256))
    chosen = fields.integer("num_experts_per_tok", 6)
    if chosen > count:
        raise fields.fail(f"{chosen} experts for each token, and there are {count}")
    return {"num_experts": count, "num_chosen": chosen}


def _score(fields: Fields, default: str) -> str:
    name = fields.text("scoring_func", default)
    if name not in SCORES:
        raise fields.fail(f"'scoring_func' {name!r} is not supported; known: {', '.join(SCORES)}")
    return name
