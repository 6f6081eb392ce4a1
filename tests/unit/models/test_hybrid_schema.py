"""What the published hybrid models keep, in bytes, against the arithmetic of their reports."""

from __future__ import annotations

from typing import Any

import pytest

from statewise.radix.schema import CacheSchema, GroupKind
from statewise.runtime.errors import ModelLoadError
from statewise.runtime.models.deepseek_config import DENSE, SPARSE, WINDOWED
from support.published import (
    GEMMA3_27B,
    GPT_OSS_20B,
    QWEN3_NEXT_80B,
    V4_FLASH,
    V4_PRO,
    V32,
    parse,
    schema_of,
)

KIB, MIB = 1 << 10, 1 << 20


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
    assert per_token(schema_of(V32)) == {"latent": 61 * 576 * 2, "idx": 61 * 128 * 2}


def test_qwen3_next_80b_keeps_72_mib_of_state_for_a_resumable_position() -> None:
    schema = schema_of(QWEN3_NEXT_80B)
    assert per_token(schema) == {"full": 24 * KIB}
    conv = 36 * 3 * 8192 * 4  # three inputs of 8,192 channels
    assert per_snapshot(schema) == {"recurrent": 72 * MIB + conv}


def test_gpt_oss_20b_keeps_k_and_v_of_8_heads() -> None:
    schema = schema_of(GPT_OSS_20B)
    assert per_token(schema) == {"full": 12 * 2 * KIB, "window": 12 * 2 * KIB}


def test_gemma_3_27b_keeps_a_sixth_of_its_layers_for_good() -> None:
    schema = schema_of(GEMMA3_27B)
    assert per_token(schema) == {"full": 10 * 8 * KIB, "window": 52 * 8 * KIB}
    assert next(g.window for g in schema.groups if g.kind is GroupKind.WINDOW) == 1024


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
