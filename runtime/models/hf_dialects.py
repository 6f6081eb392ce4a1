"""Read config.json of the dense architectures, in old and new spellings, into `DenseConfig`.

    old                                     new
    rope_theta, rope_scaling, rope_local_   rope_parameters: flat, or one object for each layer
      base_freq                               type (full_attention, sliding_attention)
    sliding_window_pattern, max_window_     layer_types
      layers
    torch_dtype                             dtype

GGUF metadata is first written as such a config (`gguf_names`), so there is one meaning of each
entry. Defaults are those of the architecture's published configs.

This module reads no files, and refuses what it would otherwise get wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from statewise.runtime.models.config import (
    MAX_LAYERS,
    DenseConfig,
    Fields,
    GptOssConfig,
    LayerConfig,
    RopeConfig,
)

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
}
DEFAULT_THETA = {"Gemma3ForCausalLM": 1_000_000.0, "GptOssForCausalLM": 150_000.0}
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "divisors")


def parse_llama(fields: Fields) -> DenseConfig:
    """Llama and SmolLM2: full attention everywhere."""
    bias = fields.flag("attention_bias", False)
    return _dense(
        fields,
        windows=[0] * _depth(fields),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


def parse_mistral(fields: Fields) -> DenseConfig:
    """Mistral: every layer has the sliding window, if there is one."""
    window = fields.integer("sliding_window") if fields.has("sliding_window") else 0
    return _dense(fields, windows=_windows(fields, [True] * _depth(fields), window))


def parse_qwen2(fields: Fields) -> DenseConfig:
    """Qwen2: biases on q, k, v; a window in upper layers only where it is switched on."""
    return _dense(fields, windows=_qwen_windows(fields), qkv_bias=True)


def parse_qwen3(fields: Fields) -> DenseConfig:
    """Qwen3: norms on q and k."""
    bias = fields.flag("attention_bias", False)
    return _dense(
        fields, windows=_qwen_windows(fields), qk_norm=True, qkv_bias=bias, output_bias=bias
    )


def parse_gemma3(fields: Fields) -> DenseConfig:
    """Gemma 3 text: five windowed layers to one full, two ropes, (1 + weight) norms."""
    if fields.flag("use_bidirectional_attention", False):
        raise fields.fail("'use_bidirectional_attention' makes an encoder, not a language model")
    pattern = fields.integer("sliding_window_pattern", 6)
    is_windowed = [bool((i + 1) % pattern) for i in range(_depth(fields))]
    bias = fields.flag("attention_bias", False)
    return _dense(
        fields,
        windows=_windows(fields, is_windowed, fields.integer("sliding_window", 4096)),
        activation="gelu_pytorch_tanh",
        head_dim=256,
        tied=True,
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
        norm_offset=1.0,
        embedding_scale=float(fields.integer("hidden_size")) ** 0.5,
        attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        attention_soft_cap=fields.number("attn_logit_softcapping", 0.0),
        final_soft_cap=fields.number("final_logit_softcapping", 0.0),
    )


def parse_gpt_oss(fields: Fields) -> DenseConfig:
    """gpt-oss: windowed and full layers in turn, sinks, biases, experts."""
    is_windowed = [i % 2 == 0 for i in range(_depth(fields))]
    num_experts = fields.integer("num_local_experts", 128)
    num_chosen = fields.integer("num_experts_per_tok", fields.integer("experts_per_token", 4))
    if num_chosen > num_experts:
        raise fields.fail(f"{num_chosen} experts for each token, and there are {num_experts}")
    bias = fields.flag("attention_bias", True)
    if not fields.has("rope_parameters") and not fields.has("rope_scaling"):
        fields = Fields({**fields.raw, "rope_scaling": GPT_OSS_ROPE}, fields.source)
    return _dense(
        fields,
        config_type=GptOssConfig,
        windows=_windows(fields, is_windowed, fields.integer("sliding_window", 128)),
        head_dim=64,
        qkv_bias=bias,
        output_bias=bias,
        attention_sinks=True,
        num_experts=num_experts,
        num_chosen=num_chosen,
        swiglu_limit=fields.number("swiglu_limit", 7.0),
        swiglu_alpha=fields.number("swiglu_alpha", 1.702),
    )


PARSERS: dict[str, Callable[[Fields], DenseConfig]] = {
    "LlamaForCausalLM": parse_llama,
    "MistralForCausalLM": parse_mistral,
    "Qwen2ForCausalLM": parse_qwen2,
    "Qwen3ForCausalLM": parse_qwen3,
    "Gemma3ForCausalLM": parse_gemma3,
    "GptOssForCausalLM": parse_gpt_oss,
}


def _dense(
    fields: Fields,
    *,
    windows: list[int],
    config_type: type[DenseConfig] = DenseConfig,
    activation: str = "silu",
    head_dim: int = 0,
    tied: bool = False,
    **features: Any,
) -> DenseConfig:
    """Read the entries that all dense architectures share; `features` are already read ones."""
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    dim = fields.integer("head_dim", head_dim or max(1, hidden // heads))
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.fail(f"{heads} query heads are not a multiple of {kv_heads} key/value heads")
    if dim % 2:
        raise fields.fail(f"'head_dim' {dim} is odd: rotary embedding needs pairs")
    context = fields.integer("max_position_embeddings", 2048)
    features.setdefault("attention_scale", dim**-0.5)
    return config_type(
        architecture=fields.raw["architectures"][0],
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        layers=_layers(fields, windows, context),
        max_context_len=context,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=_activation(fields, activation),
        tied_embeddings=fields.flag("tie_word_embeddings", tied),
        **features,
    )


def _depth(fields: Fields) -> int:
    return fields.integer("num_hidden_layers", high=MAX_LAYERS)


def _activation(fields: Fields, default: str) -> str:
    key = "hidden_activation" if fields.has("hidden_activation") else "hidden_act"
    name = fields.text(key, default)
    if default == "gelu_pytorch_tanh" and name == "gelu":
        name = default  # first Gemma configs say gelu and mean its tanh form
    if name not in ACTIVATIONS:
        raise fields.fail(f"{key!r} {name!r} is not supported; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _qwen_windows(fields: Fields) -> list[int]:
    depth = _depth(fields)
    if not fields.flag("use_sliding_window", False):
        return [0] * depth
    first = fields.integer("max_window_layers", 28, low=0)
    window = fields.integer("sliding_window", 4096)
    return _windows(fields, [i >= first for i in range(depth)], window)


def _windows(fields: Fields, is_windowed: list[bool], window: int) -> list[int]:
    """Window of each layer: from `layer_types` where the config has it, else as the caller says."""
    types = fields.raw.get("layer_types")
    if types is None:
        return [window if w else 0 for w in is_windowed]
    if not isinstance(types, list) or len(types) != len(is_windowed):
        raise fields.fail(f"'layer_types' must list {len(is_windowed)} layers, not {types!r}")
    known = {"sliding_attention": window, "full_attention": 0}
    for name in types:
        if name not in known:
            raise fields.fail(f"layer type {name!r} is not supported; known: {', '.join(known)}")
        if name == "sliding_attention" and window == 0:
            raise fields.fail("'layer_types' has sliding layers, but 'sliding_window' is missing")
    return [known[name] for name in types]


def _layers(fields: Fields, windows: list[int], context: int) -> tuple[LayerConfig, ...]:
    full, local = _ropes(fields, context)
    return tuple(LayerConfig(w, local if w else full) for w in windows)


def _ropes(fields: Fields, context: int) -> tuple[RopeConfig, RopeConfig]:
    """Ropes of full and of windowed layers."""
    new = fields.section("rope_parameters")
    if new.has("full_attention") or new.has("sliding_attention"):
        return (
            _rope(new.section("full_attention"), _theta(fields, 1_000_000.0), context),
            _rope(new.section("sliding_attention"), _local_theta(fields), context),
        )
    architecture = fields.raw["architectures"][0]
    is_gemma = architecture.startswith("Gemma3")
    theta = _theta(fields, DEFAULT_THETA.get(architecture, 10_000.0))
    scaled = new if new.raw else fields.section("rope_scaling")
    full = _rope(scaled, theta, context)
    if not is_gemma:
        return full, full
    return full, RopeConfig(theta=_local_theta(fields))


def _theta(fields: Fields, default: float) -> float:
    return fields.number("rope_theta", default)


def _local_theta(fields: Fields) -> float:
    return fields.number("rope_local_base_freq", 10_000.0)


def _rope(fields: Fields, theta: float, context: int) -> RopeConfig:
    """One rope from `rope_parameters` or `rope_scaling`; an empty section is the default rope."""
    kind = fields.text("rope_type", fields.text("type", "default"))
    theta = fields.number("rope_theta", theta)
    if kind not in ROPE_KINDS:
        raise fields.fail(f"rope type {kind!r} is not supported; known: {', '.join(ROPE_KINDS)}")
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise fields.fail("'partial_rotary_factor' is not supported for this architecture")
    if kind == "default":
        return RopeConfig(theta=theta)
    original = fields.integer("original_max_position_embeddings", context)
    if kind == "divisors":
        return RopeConfig(kind, theta, divisors=tuple(fields.raw["divisors"]))
    factor = fields.number("factor", context / original if kind == "yarn" else None)
    if kind in ("linear", "dynamic"):
        return RopeConfig(kind, theta, factor, original_len=context if kind == "dynamic" else 0)
    if kind == "llama3":
        return RopeConfig(
            kind,
            theta,
            factor,
            original,
            low_freq_factor=fields.number("low_freq_factor"),
            high_freq_factor=fields.number("high_freq_factor"),
        )
    has_factor = fields.has("attention_factor")
    return RopeConfig(
        kind,
        theta,
        factor,
        original,
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        attention_factor=fields.number("attention_factor") if has_factor else None,
        mscale=fields.number("mscale", 0.0),
        mscale_all_dim=fields.number("mscale_all_dim", 0.0),
        truncate=fields.flag("truncate", True),
    )
