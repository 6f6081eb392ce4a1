"""config.json in old and new spellings, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from statewise.runtime.errors import ModelLoadError
from statewise.runtime.models.config import DenseConfig, Fields, RopeConfig
from statewise.runtime.models.hf_dialects import PARSERS
from statewise.runtime.models.registry import ARCHITECTURES, HYBRID, find_architecture
from statewise.runtime.models.tiny import RECIPES, TinySize


def raw_config(arch: str, **more: Any) -> dict[str, Any]:
    return RECIPES[arch].config(TinySize(layers=6)) | more


def parse(raw: dict[str, Any]) -> DenseConfig:
    fields = Fields(raw, "config.json")
    config: DenseConfig = find_architecture(fields).parse(fields)
    return config


def windows(raw: dict[str, Any]) -> list[int]:
    return [layer.window for layer in parse(raw).layers]


def without(raw: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {k: v for k, v in raw.items() if k not in keys}


def test_gemma_pattern_and_layer_types_mean_the_same() -> None:
    old = without(raw_config("gemma3"), "layer_types") | {"sliding_window_pattern": 3}
    assert windows(old) == windows(raw_config("gemma3")) == [16, 16, 0, 16, 16, 0]


def test_gemma_defaults_are_the_published_ones() -> None:
    bare = without(
        raw_config("gemma3"),
        "layer_types",
        "rope_theta",
        "rope_local_base_freq",
        "query_pre_attn_scalar",
        "tie_word_embeddings",
    )
    config = parse(bare)
    assert [layer.window for layer in config.layers] == [16, 16, 16, 16, 16, 0]
    assert config.layers[5].rope.theta == 1_000_000.0
    assert config.layers[0].rope.theta == 10_000.0
    assert config.attention_scale == 256**-0.5
    assert config.tied_embeddings
    assert config.norm_offset == 1.0


def test_gemma_rope_dialects_mean_the_same() -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = parse(raw_config("gemma3", rope_scaling=scaling, rope_local_base_freq=5000.0))
    nested = {
        "full_attention": scaling | {"rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
    }
    new = without(raw_config("gemma3"), "rope_theta", "rope_local_base_freq")
    assert parse(new | {"rope_parameters": nested}).layers == old.layers
    assert old.layers[2].rope == RopeConfig("linear", 1_000_000.0, 8.0)
    assert old.layers[0].rope == RopeConfig(theta=5000.0)


def test_llama_rope_dialects_mean_the_same() -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    oldest = raw_config("llama", rope_scaling=scaling | {"type": "llama3"})
    old = raw_config("llama", rope_scaling=scaling | {"rope_type": "llama3"})
    new = without(raw_config("llama"), "rope_theta") | {
        "rope_parameters": scaling | {"rope_type": "llama3", "rope_theta": 10000.0}
    }
    assert parse(oldest).layers == parse(old).layers == parse(new).layers
    assert parse(old).layers[0].rope.kind == "llama3"


def test_each_layers_own_window_decides() -> None:
    assert windows(raw_config("mistral")) == [16] * 6
    assert windows(raw_config("mistral", sliding_window=None)) == [0] * 6
    assert windows(raw_config("qwen2", sliding_window=4096)) == [0] * 6
    upper = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 4}
    assert windows(raw_config("qwen2", **upper)) == [0, 0, 0, 0, 9, 9]
    types = ["full_attention", "sliding_attention"] * 3
    assert windows(raw_config("qwen3", **upper, layer_types=types)) == [0, 9] * 3


def test_missing_sizes_follow_from_others() -> None:
    config = parse(without(raw_config("llama"), "head_dim", "num_key_value_heads"))
    assert config.head_dim == 64 // 4
    assert config.num_kv_heads == 4
    assert config.attention_scale == 16**-0.5


@pytest.mark.parametrize(
    ("arch", "change", "message"),
    [
        ("llama", {"hidden_size": None}, "'hidden_size' is missing"),
        ("llama", {"hidden_size": "64"}, "'hidden_size' must be an integer"),
        ("llama", {"num_hidden_layers": 0}, "from 1 to 4096"),
        ("llama", {"vocab_size": 1 << 40}, "from 1 to"),
        ("llama", {"num_hidden_layers": True}, "must be an integer"),
        ("llama", {"num_key_value_heads": 3}, "not a multiple of 3"),
        ("llama", {"head_dim": 15}, "is odd"),
        ("llama", {"hidden_act": "relu"}, "'relu' is not supported"),
        ("llama", {"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope'"),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, "'factor' is missing"),
        ("llama", {"rope_scaling": "linear"}, "must be an object"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("llama", {"rms_norm_eps": float("nan")}, "must be a number"),
        ("llama", {"tie_word_embeddings": "yes"}, "must be true or false"),
        ("gemma3", {"layer_types": ["full_attention"]}, "must list 6 layers"),
        ("gemma3", {"layer_types": ["chunked_attention"] * 6}, "'chunked_attention'"),
        ("gemma3", {"use_bidirectional_attention": True}, "encoder"),
        ("mistral", {"sliding_window": 0}, "from 1 to"),
        (
            "mistral",
            {"sliding_window": None, "layer_types": ["sliding_attention"] * 6},
            "'sliding_window' is missing",
        ),
    ],
)
def test_refusals_name_the_file_and_the_entry(
    arch: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=r"^config\.json") as caught:
        parse(raw_config(arch) | change)
    assert message in str(caught.value)


def test_unknown_architecture_lists_the_known() -> None:
    with pytest.raises(ModelLoadError) as caught:
        find_architecture(Fields({"architectures": ["BertModel"]}, "config.json"))
    assert "'BertModel' is not supported" in str(caught.value)
    assert all(name in str(caught.value) for name in ARCHITECTURES)
    with pytest.raises(ModelLoadError, match="'architectures' is missing"):
        find_architecture(Fields({}, "config.json"))


def test_every_architecture_has_a_parser_and_a_tiny_recipe() -> None:
    recipes = {r.config(TinySize())["architectures"][0] for r in RECIPES.values()}
    assert set(ARCHITECTURES) == {*PARSERS, *HYBRID} == recipes
