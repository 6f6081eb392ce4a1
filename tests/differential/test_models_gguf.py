"""GGUF files against the `gguf` package: every storage type, and whole tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quant

from statewise.kernels import native
from statewise.kernels.cpu_backend import CpuAttention, CpuOps
from statewise.runtime.models.gguf_file import QUANT_TYPES, GgufFile
from statewise.runtime.models.gguf_quants import dequantise, has_codes
from statewise.runtime.models.gguf_source import GgufSource
from statewise.runtime.models.inspection import inspect_model
from statewise.runtime.models.tiny import TinySize
from support.model_driver import ModelDriver
from support.tiny import load_tiny, tensors_of, tiny_model, write_gguf

WIDE = TinySize(layers=2, hidden=256, intermediate=256, heads=4, kv_heads=2, head_dim=64)
WRITABLE = (Quant.F16, Quant.BF16, Quant.Q8_0, Quant.Q4_0, Quant.Q4_1, Quant.Q5_0, Quant.Q5_1)
K_QUANTS = (Quant.Q4_K, Quant.Q5_K, Quant.Q6_K)
K_SCALES = {Quant.Q4_K: (0, 2), Quant.Q5_K: (0, 2), Quant.Q6_K: (208,)}  # float16 byte offsets


def token_ids(length: int = 60) -> torch.Tensor:
    return torch.randint(0, 384, (length,), generator=torch.Generator().manual_seed(0))


def random_blocks(quant: Quant, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Bytes of a K-quantised matrix: any packed bits, scales of a sane size."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[quant]
    data = rng.integers(0, 256, (shape[0], shape[1] // block_size, block_bytes), dtype=np.uint8)
    for at in K_SCALES[quant]:
        scales = rng.uniform(1e-4, 4e-4, data.shape[:2]).astype(np.float16)
        data[:, :, at : at + 2] = scales[..., None].view(np.uint8)
    return data.reshape(shape[0], -1)


@pytest.mark.parametrize("quant", [Quant(t) for t in QUANT_TYPES], ids=lambda q: q.name)
def test_dequantising_any_bytes_equals_the_gguf_package(quant: Quant) -> None:
    block_bytes = QUANT_TYPES[quant].block_bytes
    data = np.random.default_rng(0).integers(0, 256, 999 * block_bytes, dtype=np.uint8)
    ours = dequantise(data, QUANT_TYPES[quant])
    with np.errstate(all="ignore"):
        theirs = gguf.quants.dequantize(data.reshape(1, -1), quant).reshape(-1)
    is_number = ~np.isnan(theirs)
    assert np.array_equal(np.isnan(ours), ~is_number)
    assert np.array_equal(ours[is_number].view(np.uint32), theirs[is_number].view(np.uint32))


@pytest.mark.slow
@pytest.mark.parametrize("quant", WRITABLE, ids=lambda q: q.name)
def test_written_file_loads_as_its_dequantised_weights(quant: Quant, tmp_path: Path) -> None:
    directory = tiny_model("qwen3", WIDE)
    file = write_gguf(directory, tmp_path / "model.gguf", quant)
    model: Any = load_tiny(file)
    name = "model.layers.1.mlp.down_proj.weight"
    stored = tensors_of(directory)[name]
    expected = gguf.quants.dequantize(gguf.quants.quantize(stored, quant), quant)
    assert torch.equal(model.layers[1].mlp.down.weight, torch.from_numpy(expected))
    assert np.abs(expected - stored).max() < 0.5 * stored.std()


@pytest.mark.parametrize("quant", K_QUANTS, ids=lambda q: q.name)
def test_k_quantised_tensor_in_a_file(quant: Quant, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    data = random_blocks(quant, (6, 512), np.random.default_rng(1))
    writer.add_tensor("matrix", data, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "one.gguf")
    tensor = file.tensors["matrix"]
    assert tensor.shape == (6, 512)
    assert tensor.type.name == quant.name
    ours = dequantise(file.data(tensor), tensor.type)
    assert np.array_equal(ours, gguf.quants.dequantize(data, quant).reshape(-1))
    assert 1e-3 < np.abs(ours).max() < 10


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma3"])
def test_whole_model_equals_its_directory(arch: str, tmp_path: Path) -> None:
    directory = tiny_model(arch)
    file = write_gguf(directory, tmp_path / "model.gguf")
    ids = token_ids()
    ours = ModelDriver(load_tiny(file)).step(ids)[0]
    theirs = ModelDriver(load_tiny(directory)).step(ids)[0]
    assert (ours - theirs).abs().max() < 1e-5  # Gemma's stored +1 rounds


@pytest.mark.parametrize(
    "quant", [Quant(t) for t, kind in QUANT_TYPES.items() if has_codes(kind)], ids=lambda q: q.name
)
def test_codes_are_what_dequantising_gives(quant: Quant, tmp_path: Path) -> None:
    kind = QUANT_TYPES[quant]
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    rng = np.random.default_rng(2)
    data = rng.integers(0, 256, (128, 512 // kind.block_size * kind.block_bytes), dtype=np.uint8)
    for name in ("blk.0.attn_k.weight", "blk.0.attn_v.weight"):  # rows of the first are permuted
        writer.add_tensor(name, data, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = GgufSource(GgufFile(tmp_path / "one.gguf"), head_dim=64)
    for name in source.names():
        expected = torch.empty(source.shape(name))
        source.read_into(name, expected)
        codes = source.codes(name)
        assert codes is not None
        with np.errstate(all="ignore"):
            found = torch.from_numpy(codes.numbers())
        assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.skipif(not native.is_available(), reason="needs the native library")
@pytest.mark.parametrize("quant", [Quant.Q4_1, Quant.Q5_0, Quant.Q8_0], ids=lambda q: q.name)
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_a_model_of_codes_equals_its_dequantised_one(
    arch: str, quant: Quant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(tiny_model(arch, WIDE), tmp_path / "model.gguf", quant)
    ids = token_ids()

    def logits() -> torch.Tensor:
        model = load_tiny(file, torch.bfloat16, ops=CpuOps())
        driver = ModelDriver(model, backend=CpuAttention())
        return torch.cat([driver.step(part)[0] for part in (ids[:50], ids[50:51], ids[51:])])

    coded = logits()
    monkeypatch.setattr(CpuOps, "pack_codes", lambda self, codes: None)
    assert torch.equal(coded, logits())


@pytest.mark.parametrize("arch", ["llama", "qwen2", "gemma3"])
def test_config_equals_its_directory(arch: str, tmp_path: Path) -> None:
    directory = tiny_model(arch)
    ours = inspect_model(write_gguf(directory, tmp_path / "model.gguf"))
    theirs = inspect_model(directory)
    assert ours.config.layers == theirs.config.layers
    assert ours.config.attention_scale == theirs.config.attention_scale
    assert (ours.vocab_size, ours.max_context_len) == (384, theirs.max_context_len)
    assert ours.bos_token_id == theirs.bos_token_id
    assert set(theirs.eos_token_ids) <= set(ours.eos_token_ids)


def test_tied_embeddings_follow_from_the_missing_output_matrix(tmp_path: Path) -> None:
    tied, untied = tiny_model("llama", tie_word_embeddings=True), tiny_model("llama")
    assert inspect_model(write_gguf(tied, tmp_path / "t.gguf")).config.tied_embeddings
    assert not inspect_model(write_gguf(untied, tmp_path / "u.gguf")).config.tied_embeddings


def test_rope_divisors_equal_llama3_scaling(tmp_path: Path) -> None:
    from statewise.runtime.models.config import RopeConfig
    from statewise.runtime.models.rope import inverse_frequencies

    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    scaled = tiny_model("llama", rope_scaling=scaling)
    rope = RopeConfig("llama3", 10_000.0, 8.0, 64, 1.0, 4.0)
    plain = inverse_frequencies(RopeConfig(), 16, 128)[0]
    divisors = (plain / inverse_frequencies(rope, 16, 128)[0]).numpy()
    file = write_gguf(scaled, tmp_path / "m.gguf", extra={"rope_freqs.weight": divisors})
    ids = token_ids(100)
    ours = ModelDriver(load_tiny(file)).step(ids)[0]
    theirs = ModelDriver(load_tiny(scaled)).step(ids)[0]
    assert (ours - theirs).abs().max() < 1e-4
