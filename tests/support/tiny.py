"""Tiny checkpoints on disk: Hugging Face directories and GGUF files, made once per test process.

GGUF files are written with the `gguf` package's own writer and name map, so that they are an
independent statement of the format: tensors renamed, q and k rows permuted for llama, Gemma norms
with the 1 added.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.numpy import load_file

from statewise.runtime.models.base import CausalLM, LoadOptions
from statewise.runtime.models.loader import load_model
from statewise.runtime.models.tiny import TinySize, make_tiny_model

ARCHS = ("llama", "mistral", "qwen2", "qwen3", "gemma3")
GGUF_ARCHS = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
}


@functools.cache
def root() -> Path:
    """Directory of this process's checkpoints; removed at exit."""
    path = Path(tempfile.mkdtemp(prefix="statewise-tiny-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def tiny_model(arch: str, size: TinySize | None = None, shards: int = 1, **config: Any) -> Path:
    """Directory of a tiny checkpoint; `config` overrides entries of config.json."""
    return _made(arch, size or TinySize(), shards, json.dumps(config, sort_keys=True))


@functools.cache
def _made(arch: str, size: TinySize, shards: int, config: str) -> Path:
    path = Path(tempfile.mkdtemp(prefix=f"{arch}-", dir=root()))
    return make_tiny_model(arch, path, size=size, seed=1, shards=shards, config=json.loads(config))


def options(dtype: torch.dtype = torch.float32, page_size: int = 8, **more: Any) -> LoadOptions:
    """Load options for tests: K/V in the compute dtype."""
    return LoadOptions(dtype=dtype, kv_dtype=dtype, page_size=page_size, **more)


def load_tiny(path: Path, dtype: torch.dtype = torch.float32, **more: Any) -> CausalLM:
    """Load a checkpoint for computing in `dtype`."""
    return load_model(path, options(dtype, **more))


def tensors_of(directory: Path) -> dict[str, np.ndarray]:
    """All tensors of a (possibly sharded) directory."""
    out: dict[str, np.ndarray] = {}
    for file in sorted(directory.glob("*.safetensors")):
        out |= load_file(file)
    return out


def write_gguf(
    directory: Path,
    file: Path,
    quant: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    extra: dict[str, np.ndarray] | None = None,
    chat_template: str | None = None,
) -> Path:
    """Write the checkpoint in `directory` as a GGUF file; matrices are stored as `quant`."""
    config = json.loads((directory / "config.json").read_text())
    kind = config["model_type"].removesuffix("_text")
    arch = GGUF_ARCHS[kind]
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[arch])
    _write_metadata(writer, config)
    _write_vocabulary(writer, directory, chat_template)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, value in tensors_of(directory).items():
        own_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own_name is not None, name
        suffix = "" if own_name.endswith((".weight", ".bias")) else "." + name.rsplit(".", 1)[1]
        _write_tensor(writer, own_name + suffix, _stored(kind, name, value, config), quant)
    for own_name, value in (extra or {}).items():
        writer.add_tensor(own_name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _stored(kind: str, name: str, value: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    if kind == "gemma3" and name.endswith("norm.weight"):
        return value + np.float32(1)
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for part, key in heads.items():
        if kind == "llama" and part in name:
            shape = value.shape
            split = value.reshape(config[key], 2, shape[0] // config[key] // 2, *shape[1:])
            return np.ascontiguousarray(split.swapaxes(1, 2).reshape(shape))
    return value


def _write_tensor(
    writer: gguf.GGUFWriter, name: str, value: np.ndarray, quant: gguf.GGMLQuantizationType
) -> None:
    if value.ndim < 2 or quant == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, value)
        return
    writer.add_tensor(name, gguf.quants.quantize(value, quant), raw_dtype=quant)


def _write_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if config["model_type"] == "gemma3_text":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_uint32("gemma3.attention.sliding_window_pattern", 3)


def _write_vocabulary(writer: gguf.GGUFWriter, directory: Path, chat_template: str | None) -> None:
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    texts = [*tokenizer["model"]["vocab"], *(t["content"] for t in tokenizer["added_tokens"])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(texts)
    writer.add_token_types([1] * 256 + [3] * (len(texts) - 256))
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_pad_token_id(258)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
