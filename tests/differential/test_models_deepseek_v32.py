"""DeepSeek-V3.2 equals transformers on tiny checkpoints: latents, routed tokens and experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from statewise.kernels.select import select_backend
from statewise.runtime.errors import ModelLoadError
from statewise.runtime.models.tiny import TinySize
from support.hybrid_driver import HybridDriver, Span
from support.native_kernels import needs_native
from support.oracle import assert_close, oracle_logits, pieces, token_ids
from support.tiny import load_tiny, tiny_model

LENGTH = 130  # against a top-k of 12
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "biases": {"attention_bias": True},
    "all-experts": {"first_k_dense_replace": 0, "num_experts_per_tok": 3},
    "ungrouped": {"n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    "top-1": {"index_topk": 1},
    "top-k-of-all": {"index_topk": 512},
    "plain-rope": {"rope_scaling": None, "rope_theta": 5000.0},
    "new-dialect": {
        "rope_scaling": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 20000.0,
            "factor": 32.0,
            "mscale": 1.2,
            "mscale_all_dim": 0.8,
            "original_max_position_embeddings": 128,
        },
    },
}


def path_of(variant: str = "default") -> Path:
    return tiny_model("deepseek-v32", TinySize(layers=3), **VARIANTS[variant])


def driver_of(variant: str = "default", dtype: torch.dtype = torch.float32) -> HybridDriver:
    return HybridDriver(load_tiny(path_of(variant), dtype), max_len=160)


def chunked(driver: HybridDriver, ids: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    sequence = driver.new()
    return torch.cat([driver.run(sequence, piece) for piece in pieces(ids, sizes)])


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_and_chunks_equal_transformers(variant: str) -> None:
    ids = token_ids(LENGTH)
    expected = oracle_logits(path_of(variant), ids)
    assert_close(chunked(driver_of(variant), ids, (LENGTH,)), expected)
    assert_close(chunked(driver_of(variant), ids, (50, 1, 1, 13, 2, 29, 1, 33)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1,), (3,), (7,), (16,), (64,)])
def test_any_chunking_equals_transformers(sizes: tuple[int, ...]) -> None:
    ids = token_ids(80, seed=1)
    assert_close(chunked(driver_of(), ids, sizes), oracle_logits(path_of(), ids))


def test_float64_equals_transformers() -> None:
    ids = token_ids(LENGTH, seed=2)
    ours = chunked(driver_of(dtype=torch.float64), ids, (100, 1, 29))
    assert_close(ours, oracle_logits(path_of(), ids, torch.float64), 1e-5)


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("sizes", [(LENGTH,), (40, 1, 1, 30, 2)])
def test_native_kernels_equal_transformers(sizes: tuple[int, ...]) -> None:
    backend, ops = select_backend("cpu", torch.float32)
    ids = token_ids(LENGTH, seed=11)
    driver = HybridDriver(load_tiny(path_of(), ops=ops), backend=backend)
    assert_close(chunked(driver, ids, sizes), oracle_logits(path_of(), ids))


def test_rows_of_one_step_do_not_see_each_other() -> None:
    driver = driver_of()
    rows = [token_ids(70, seed=3), token_ids(41, seed=4)]
    sequences = [driver.new() for _ in rows]
    parts: list[list[torch.Tensor]] = [[], []]
    for cuts in ([(0, 30), (0, 1)], [(30, 31), (1, 40)], [(31, 70), (40, 41)]):
        spans = [Span(s, row[a:b]) for s, row, (a, b) in zip(sequences, rows, cuts, strict=True)]
        for i, logits in enumerate(driver.step(*spans)):
            parts[i].append(logits)
    for row, part in zip(rows, parts, strict=True):
        assert_close(torch.cat(part), oracle_logits(path_of(), row))


@pytest.mark.parametrize("group", ["latent", "idx"])
def test_reusing_without_one_group_is_visible(group: str) -> None:
    driver, ids = driver_of(), token_ids(100, seed=5)
    source = driver.new()
    driver.run(source, ids[:60])
    expected = oracle_logits(path_of(), ids)[60:]
    broken = driver.fork(source)
    driver.store.fill_blocks(
        driver.schema.index_of(group),
        broken.tables[driver.schema.index_of(group)].tolist(),
        0.0,
    )
    assert float((driver.run(broken, ids[60:]) - expected).abs().max()) > 0.01
    assert_close(driver.run(driver.fork(source), ids[60:]), expected)


def test_published_quantisation_and_draft_layers_load(tmp_path: Path) -> None:
    """e4m3 with `weight_scale_inv`, and tensors of a layer behind the last one."""
    path = tiny_model("deepseek-v32", TinySize(layers=2, hidden=256, intermediate=512))
    config = json.loads((path / "config.json").read_text())
    tensors = load_file(path / "model.safetensors")
    plain, packed = dict(tensors), dict(tensors)
    generator = torch.Generator().manual_seed(0)
    for name in [n for n in tensors if n.endswith(("q_b_proj.weight", "experts.0.up_proj.weight"))]:
        rows, columns = tensors[name].shape
        blocks = (-(-rows // 128), -(-columns // 128))
        values = (tensors[name] * 8).to(torch.float8_e4m3fn)
        scales = torch.rand(blocks, generator=generator) * 0.1 + 0.05
        packed[name], packed[f"{name}_scale_inv"] = values, scales
        wide = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        plain[name] = values.float() * wide
    packed["model.layers.2.eh_proj.weight"] = torch.zeros(4, 4)
    paths = []
    for name, values in (("plain", plain), ("packed", packed)):
        target = tmp_path / name
        target.mkdir()
        (target / "config.json").write_text(json.dumps(config))
        save_file({n: t.contiguous() for n, t in values.items()}, target / "model.safetensors")
        paths.append(target)
    ids = token_ids(40)
    ours = chunked(HybridDriver(load_tiny(paths[1])), ids, (40,))
    assert_close(ours, oracle_logits(paths[0], ids))


def test_an_unexpected_tensor_is_a_load_error(tmp_path: Path) -> None:
    tensors = load_file(path_of() / "model.safetensors")
    tensors["model.layers.2.self_attn.extra.weight"] = torch.zeros(2)
    (tmp_path / "config.json").write_bytes((path_of() / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match="extra"):
        load_tiny(tmp_path)
