"""Qwen3-Next as data: recurrent layers and gated full attention, experts or an MLP.

This module reads no files and no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from statewise.runtime.models.config import MAX_LAYERS, Fields, RopeConfig
from statewise.runtime.models.deepseek_config import MoeConfig, scaled_rope


@dataclass(frozen=True)
class RecurrentConfig:
    """Sizes of a gated delta net."""

    key_heads: int
    value_heads: int
    key_dim: int  # of one head
    value_dim: int
    conv_size: int  # tokens

    @property
    def conv_channels(self) -> int:
        """Channels of queries, keys and values together."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def num_values(self) -> int:
        """Numbers of one layer's state: convolution window, then S [heads, dk, dv]."""
        recurrent = self.value_heads * self.key_dim * self.value_dim
        return (self.conv_size - 1) * self.conv_channels + recurrent


@dataclass(frozen=True)
class Qwen3NextConfig:
    """Qwen3-Next."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rope_dim: int  # the first channels of a head
    has_bias: bool
    is_recurrent: tuple[bool, ...]  # by layer
    is_moe: tuple[bool, ...]
    recurrent: RecurrentConfig
    moe: MoeConfig
    rope: RopeConfig
    max_context_len: int
    norm_eps: float
    tied_embeddings: bool

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.is_recurrent)


def parse_qwen3_next(fields: Fields) -> Qwen3NextConfig:
    """Read a Qwen3-Next config."""
    depth = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    heads, kv_heads = fields.integer("num_attention_heads"), fields.integer("num_key_value_heads")
    if heads % kv_heads:
        raise fields.fail(f"{heads} query heads are not a multiple of {kv_heads} key/value heads")
    head_dim = fields.integer("head_dim", 256)
    new = fields.section("rope_parameters")
    partial = new.number("partial_rotary_factor", fields.number("partial_rotary_factor", 0.25))
    rope_dim = int(head_dim * partial)
    if rope_dim % 2 or not 0 < rope_dim <= head_dim:
        raise fields.fail(f"{rope_dim} rotary channels of {head_dim} are not pairs")
    theta = fields.number("rope_theta", 10_000.0)
    return Qwen3NextConfig(
        architecture=fields.raw["architectures"][0],
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size", 5632),
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope_dim=rope_dim,
        has_bias=fields.flag("attention_bias", False),
        is_recurrent=_recurrent_layers(fields, depth),
        is_moe=_moe_layers(fields, depth),
        recurrent=_recurrent(fields),
        moe=_moe(fields),
        rope=scaled_rope(new if new.raw else fields.section("rope_scaling"), theta),
        max_context_len=fields.integer("max_position_embeddings", 32768),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
    )


def _recurrent_layers(fields: Fields, depth: int) -> tuple[bool, ...]:
    types = fields.raw.get("layer_types")
    if types is None:
        interval = fields.integer("full_attention_interval", 4)
        return tuple(bool((i + 1) % interval) for i in range(depth))
    known = {"linear_attention": True, "full_attention": False}
    if not isinstance(types, list) or len(types) != depth or not set(types) <= set(known):
        raise fields.fail(f"'layer_types' must list {depth} of {list(known)}, not {types!r}")
    return tuple(known[name] for name in types)


def _moe_layers(fields: Fields, depth: int) -> tuple[bool, ...]:
    plain = set(fields.raw.get("mlp_only_layers") or [])
    step = fields.integer("decoder_sparse_step", 1)
    has_experts = fields.integer("num_experts", 512, low=0) > 0
    return tuple(has_experts and i not in plain and (i + 1) % step == 0 for i in range(depth))


def _recurrent(fields: Fields) -> RecurrentConfig:
    config = RecurrentConfig(
        key_heads=fields.integer("linear_num_key_heads", 16),
        value_heads=fields.integer("linear_num_value_heads", 32),
        key_dim=fields.integer("linear_key_head_dim", 128),
        value_dim=fields.integer("linear_value_head_dim", 128),
        conv_size=fields.integer("linear_conv_kernel_dim", 4, low=2),
    )
    if config.value_heads % config.key_heads:
        raise fields.fail(
            f"{config.value_heads} value heads are not a multiple of {config.key_heads} key heads"
        )
    return config


def _moe(fields: Fields) -> MoeConfig:
    count = fields.integer("num_experts", 512, low=0)
    chosen = fields.integer("num_experts_per_tok", 10)
    if 0 < count < chosen:
        raise fields.fail(f"{chosen} experts for each token, and there are {count}")
    return MoeConfig(
        num_experts=count,
        num_chosen=chosen,
        inner_size=fields.integer("moe_intermediate_size", 512),
        shared_size=fields.integer("shared_expert_intermediate_size", 512),
        score="softmax",
        scaling=1.0,
        normalised=fields.flag("norm_topk_prob", True),
    )
