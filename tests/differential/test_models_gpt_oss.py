"""gpt-oss equals transformers on tiny checkpoints: sinks, windows, experts, YaRN, MXFP4."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from statewise.kernels.select import BackendUnavailableError, select_backend
from statewise.runtime.errors import ModelLoadError
from statewise.runtime.models.mxfp4 import dequantise_mxfp4
from statewise.runtime.models.tiny import TinySize
from support.model_driver import ModelDriver
from support.oracle import assert_close, oracle_logits, pieces, token_ids
from support.tiny import load_tiny, tiny_model

LENGTH = 130  # eight windows of 16
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
VARIANTS: dict[str, dict[str, Any]] = {
    "published": {},
    "truncated-yarn": {"rope_scaling": YARN | {"truncate": True}},
    "new-dialect": {
        "rope_theta": None,
        "rope_scaling": None,
        "rope_parameters": YARN | {"truncate": False, "rope_theta": 20000.0},
    },
    "all-windowed": {"layer_types": ["sliding_attention"] * 4},
    "no-attention-bias": {"attention_bias": False},
    "one-expert": {"num_experts_per_tok": 1},
    "low-limit": {"swiglu_limit": 0.5},
}


def chunked(driver: ModelDriver, ids: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    return torch.cat([driver.step(piece)[0] for piece in pieces(ids, sizes)])


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_equals_transformers(variant: str) -> None:
    path, ids = tiny_model("gpt-oss", **VARIANTS[variant]), token_ids(LENGTH)
    assert_close(ModelDriver(load_tiny(path)).step(ids)[0], oracle_logits(path, ids))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1,), (3,), (7,), (16,), (5, 1, 1, 17, 2, 33, 1)])
def test_any_chunking_equals_transformers(sizes: tuple[int, ...]) -> None:
    path, ids = tiny_model("gpt-oss"), token_ids(LENGTH, seed=1)
    assert_close(chunked(ModelDriver(load_tiny(path)), ids, sizes), oracle_logits(path, ids))


def test_float64_equals_transformers() -> None:
    path, ids = tiny_model("gpt-oss"), token_ids(LENGTH, seed=2)
    ours = ModelDriver(load_tiny(path, torch.float64)).step(ids)[0]
    assert_close(ours, oracle_logits(path, ids, torch.float64), 1e-5)


@pytest.mark.slow
def test_native_kernels_equal_transformers() -> None:
    try:
        backend, ops = select_backend("cpu", torch.float32)
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    path, ids = tiny_model("gpt-oss"), token_ids(LENGTH, seed=3)
    driver = ModelDriver(load_tiny(path, ops=ops), backend=backend)
    assert_close(chunked(driver, ids, (40, 1, 1, 30, 1)), oracle_logits(path, ids))


def test_rows_of_one_step_do_not_see_each_other() -> None:
    path = tiny_model("gpt-oss")
    rows = [token_ids(50, seed=4), token_ids(33, seed=5), token_ids(41, seed=6)]
    driver = ModelDriver(load_tiny(path), num_rows=3)
    parts = [driver.step(*(r[a:b] for r in rows)) for a, b in ((0, 20), (20, 21), (21, 33))]
    for i, row in enumerate(rows):
        ours = torch.cat([part[i] for part in parts])
        assert_close(ours, oracle_logits(path, row[:33]))


def test_ignoring_the_sinks_changes_the_logits() -> None:
    path, ids = tiny_model("gpt-oss"), token_ids(40)
    model = load_tiny(path)
    for layer in model.layers:  # type: ignore[attr-defined]
        layer.attention.sinks = torch.full_like(layer.attention.sinks, -1e9)
    ours = ModelDriver(model).step(ids)[0]
    assert float((ours - oracle_logits(path, ids)).abs().max()) > 0.01


def test_mxfp4_values_equal_transformers() -> None:
    # The import takes seconds, which only who runs this should pay.
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (3, 6, 4, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(110, 135, (3, 6, 4), dtype=torch.uint8, generator=generator)
    theirs = convert_moe_packed_tensors(packed, scales, dtype=torch.float32)
    ours = dequantise_mxfp4(packed.flatten(-2), scales, torch.float32)
    assert torch.equal(ours.transpose(1, 2), theirs)


def packed_checkpoint(source: Path, target: Path) -> None:
    """The checkpoint in `source` with experts rounded to MXFP4: packed in `target`."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    rng = np.random.default_rng(0)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        shape = (experts, rows, columns // 32)
        tensors[f"{name}_blocks"] = rng.integers(0, 256, (*shape, 16), dtype=np.uint8)
        tensors[f"{name}_scales"] = rng.integers(121, 125, shape, dtype=np.uint8)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def unpacked_checkpoint(source: Path, target: Path) -> None:
    """The same weights as plain matrices, by transformers' own conversion."""
    shutil.copytree(source, target)
    # The import takes seconds, which only who runs this should pay.
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = {n: torch.from_numpy(v) for n, v in load_file(target / "model.safetensors").items()}
    for name in [n.removesuffix("_blocks") for n in tensors if n.endswith("_blocks")]:
        blocks, scales = tensors.pop(f"{name}_blocks"), tensors.pop(f"{name}_scales")
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    arrays = {n: np.ascontiguousarray(t.numpy()) for n, t in tensors.items()}
    save_file(arrays, target / "model.safetensors", metadata={"format": "pt"})


def test_an_mxfp4_checkpoint_equals_transformers_on_its_values(tmp_path: Path) -> None:
    packed_checkpoint(tiny_model("gpt-oss", TinySize(layers=2)), tmp_path / "packed")
    unpacked_checkpoint(tmp_path / "packed", tmp_path / "plain")
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "packed" / "config.json").write_text(json.dumps(config))
    ids = token_ids(60)
    ours = ModelDriver(load_tiny(tmp_path / "packed")).step(ids)[0]
    assert_close(ours, oracle_logits(tmp_path / "plain", ids))


def test_more_chosen_experts_than_there_are_is_a_load_error() -> None:
    path = tiny_model("gpt-oss", num_experts_per_tok=5)
    with pytest.raises(ModelLoadError, match="5 experts for each token, and there are 4"):
        load_tiny(path)
