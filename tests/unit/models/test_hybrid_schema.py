"""What the published hybrid models keep, in bytes, against the arithmetic of their reports."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from statewise.radix.schema import CacheSchema, GroupKind
from statewise.runtime.errors import ModelLoadError
from statewise.runtime.models import deepseek_v4, deepseek_v32, qwen3_next
from statewise.runtime.models.base import LoadOptions
from statewise.runtime.models.config import Fields
from statewise.runtime.models.deepseek_config import DENSE, SPARSE, WINDOWED
from statewise.runtime.models.hybrid import make_schema
from statewise.runtime.models.registry import find_architecture
from statewise.runtime.models.schema import build_schema
from statewise.runtime.models.tiny import RECIPES, TinySize

KIB, MIB = 1 << 10, 1 << 20
OPTIONS = LoadOptions(dtype=torch.bfloat16, kv_dtype=torch.bfloat16, page_size=128)

V4_FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "compress_ratios": [0, 0] + [4, 128] * 20 + [4] + [0],
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "num_hash_layers": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 2048,
    "scoring_func": "sqrtsoftplus",
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
}
V4_PRO = V4_FLASH | {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "compress_ratios": [128, 128] + [4, 128] * 29 + [4] + [0],
    "index_topk": 1024,
    "n_routed_experts": 384,
    "moe_intermediate_size": 3072,
    "routed_scaling_factor": 2.5,
}
DRAFTS = {
    "DeepseekV4ForCausalLM": deepseek_v4.group_drafts,
    "DeepseekV32ForCausalLM": deepseek_v32.group_drafts,
    "Qwen3NextForCausalLM": qwen3_next.group_drafts,
}


def parse(raw: dict[str, Any]) -> Any:
    fields = Fields(raw, "config.json")
    return find_architecture(fields).parse(fields)


def schema_of(raw: dict[str, Any], options: LoadOptions = OPTIONS) -> CacheSchema:
    config = parse(raw)
    drafts = DRAFTS[config.architecture](config, options)  # type: ignore[operator]
    return make_schema(config, options, drafts, "weights")


def per_token(schema: CacheSchema) -> dict[str, float]:
    return schema.bytes_per_token()


def per_snapshot(schema: CacheSchema) -> dict[str, int]:
    return {g.name: g.block_bytes(128) for g in schema.groups if g.kind.is_snapshot}


def test_v4_flash_keeps_what_its_report_says() -> None:
    schema = schema_of(V4_FLASH)
    sizes = per_token(schema)
    assert sizes == {"swa": 43 * 1024, "csa": 21 * 256, "idx": 21 * 64, "hca": 20 * 8}
    assert sizes["csa"] + sizes["idx"] + sizes["hca"] == 6880
    assert sizes["swa"] * 127 / MIB == pytest.approx(5.33, abs=0.01)  # one resumable position
    halo, opened = 21 * 20 * KIB, 21 * 3 * 10 * KIB
    assert per_snapshot(schema) == {"csa_tail": halo + opened, "hca_tail": 20 * 127 * 4 * KIB}


def test_v4_pro_has_no_layer_without_history() -> None:
    config, schema = parse(V4_PRO), schema_of(V4_PRO)
    assert [config.layers.count(k) for k in (WINDOWED, SPARSE, DENSE)] == [0, 30, 31]
    sizes = per_token(schema)
    assert sizes == {"swa": 61 * 1024, "csa": 30 * 256, "idx": 30 * 64, "hca": 31 * 8}


def test_v4_groups_depend_on_what_gives_them_meaning() -> None:
    groups = {g.name: g for g in schema_of(V4_FLASH).groups}
    assert groups["idx"].depends_on == "csa"
    assert groups["csa"].layers == groups["idx"].layers == groups["csa_tail"].layers
    assert (groups["csa_tail"].ratio, groups["csa_tail"].overlap) == (4, 4)
    assert (groups["hca_tail"].ratio, groups["hca_tail"].overlap) == (128, 0)
    assert [g.kind for g in groups.values()] == [
        GroupKind.WINDOW,
        GroupKind.COMPRESSED,
        GroupKind.INDEX,
        GroupKind.TAIL,
        GroupKind.COMPRESSED,
        GroupKind.TAIL,
    ]


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        ({"sliding_window": 64}, {"swa"}),
        ({"compress_rope_theta": 1e6}, {"swa", "csa", "idx", "csa_tail", "hca", "hca_tail"}),
        ({"index_topk": 64}, set()),
    ],
)
def test_one_changed_entry_changes_the_versions_that_it_concerns(
    change: dict[str, Any], changed: set[str]
) -> None:
    before, after = schema_of(V4_FLASH), schema_of(V4_FLASH | change)
    different = {
        a.name for a, b in zip(before.groups, after.groups, strict=True) if a.version != b.version
    }
    assert different == changed
    assert before.model_fingerprint != after.model_fingerprint


def test_v32_keeps_a_latent_and_an_index_key() -> None:
    raw = RECIPES["deepseek-v32"].config(TinySize(layers=61)) | {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "index_head_dim": 128,
    }
    assert per_token(schema_of(raw)) == {"latent": 61 * 576 * 2, "idx": 61 * 128 * 2}


def test_qwen3_next_80b_keeps_72_mib_of_state_for_a_resumable_position() -> None:
    raw = RECIPES["qwen3-next"].config(TinySize(layers=48)) | {
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    }
    schema = schema_of(raw)
    assert per_token(schema) == {"full": 24 * KIB}
    conv = 36 * 3 * 8192 * 4  # three inputs of 8,192 channels
    assert per_snapshot(schema) == {"recurrent": 72 * MIB + conv}


def test_gpt_oss_20b_keeps_k_and_v_of_8_heads() -> None:
    raw = RECIPES["gpt-oss"].config(TinySize(layers=24, window=128)) | {
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
    }
    schema = build_schema(parse(raw), OPTIONS, "weights")
    assert per_token(schema) == {"full": 12 * 2 * KIB, "window": 12 * 2 * KIB}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compress_ratios": [0, 4]}, "must list 43 layers"),
        ({"compress_ratios": [0, 0] + [4, 128, 64] * 20}, "more than one ratio beside 4"),
        ({"layer_types": ["full_attention"] * 43}, "layer type 'full_attention' is not supported"),
        ({"mlp_layer_types": ["dense"] * 43}, "mlp layer type 'dense' is not supported"),
        ({"num_key_value_heads": 8}, "keys and values are shared"),
        ({"o_groups": 7}, "64 heads do not divide over 7 output groups"),
        ({"qk_rope_head_dim": 63}, "63 rotary channels of 512 are not pairs"),
        ({"qk_rope_head_dim": 256}, "256 rotary channels do not fit an index key"),
        ({"num_experts_per_tok": 300}, "300 experts for each token, and there are 256"),
        ({"scoring_func": "tanh"}, "'scoring_func' 'tanh' is not supported"),
        ({"norm_topk_prob": False}, "'norm_topk_prob' must be true"),
        ({"rope_scaling": {"type": "longrope"}}, "rope type 'longrope' is not supported"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        parse(V4_FLASH | change)
