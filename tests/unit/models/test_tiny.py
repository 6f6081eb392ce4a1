"""Tiny checkpoints are the same everywhere, and shards hold what one file holds."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from statewise.runtime.models.tiny import TensorSpec, TinySize, fill, make_tiny_model
from support.tiny import tensors_of


def digest(directory: Path) -> str:
    files = sorted(directory.iterdir())
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()


def test_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    first, second = (make_tiny_model("gemma3", tmp_path / n, seed=7) for n in ("a", "b"))
    assert digest(first) == digest(second)
    assert digest(make_tiny_model("gemma3", tmp_path / "c", seed=8)) != digest(first)


def test_values_depend_on_seed_and_name_only() -> None:
    value = fill(TensorSpec("a", (3, 4), 2.0, 1.0), 5)
    assert value.dtype == np.float32
    assert np.array_equal(value, fill(TensorSpec("a", (3, 4), 2.0, 1.0), 5))
    assert not np.array_equal(value, fill(TensorSpec("b", (3, 4), 2.0, 1.0), 5))
    assert not np.array_equal(value, fill(TensorSpec("a", (3, 4), 2.0, 1.0), 6))


def test_shards_hold_what_one_file_holds(tmp_path: Path) -> None:
    whole = tensors_of(make_tiny_model("llama", tmp_path / "whole"))
    parts = tensors_of(make_tiny_model("llama", tmp_path / "parts", shards=3))
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) == 3
    assert whole.keys() == parts.keys()
    assert all(np.array_equal(whole[n], parts[n]) for n in whole)


def test_sizes_and_overrides_reach_the_config(tmp_path: Path) -> None:
    path = make_tiny_model(
        "qwen2", tmp_path, size=TinySize(layers=2, hidden=32), config={"rope_theta": 5.0}
    )
    tensors = tensors_of(path)
    assert tensors["model.layers.1.self_attn.q_proj.weight"].shape == (64, 32)
    assert "model.layers.2.self_attn.q_proj.weight" not in tensors
    assert '"rope_theta": 5.0' in (path / "config.json").read_text()


def test_unknown_architecture_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown tiny architecture 'gpt'.*gemma3.*llama"):
        make_tiny_model("gpt", tmp_path)
