"""What can be known of a model without its weights: config, limits, token ids. No torch.

This module does not build models (`loader` does).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from statewise.runtime.errors import ModelLoadError
from statewise.runtime.models.config import Fields, ModelInfo
from statewise.runtime.models.gguf_file import GgufFile
from statewise.runtime.models.gguf_names import ROPE_DIVISORS, hf_config, token_ids
from statewise.runtime.models.gguf_quants import dequantise
from statewise.runtime.models.locate import ModelFiles, locate_model
from statewise.runtime.models.registry import find_architecture

DTYPES = ("float32", "bfloat16", "float16")


def inspect_model(path_or_name: str | Path, context_length: int = 0) -> ModelInfo:
    """Read a model's config; `context_length` overrides its longest context (0: keep it).

    Raises ModelLoadError for a model that is absent, unknown or malformed.
    """
    files = locate_model(path_or_name)
    if files.format == "gguf":
        return inspect_gguf(files, GgufFile(files.path), context_length)
    return inspect_directory(files, context_length)


def inspect_directory(files: ModelFiles, context_length: int) -> ModelInfo:
    """Read config.json and generation_config.json of a Hugging Face directory."""
    fields = Fields(read_json(files.path / "config.json"), str(files.path / "config.json"))
    generation_file = files.path / "generation_config.json"
    generation = Fields(
        read_json(generation_file) if generation_file.is_file() else {}, str(generation_file)
    )
    bos = fields.token_ids("bos_token_id") or generation.token_ids("bos_token_id")
    ends = generation.token_ids("eos_token_id") + fields.token_ids("eos_token_id")
    weight_bytes = sum(f.stat().st_size for f in files.path.glob("*.safetensors"))
    dtype = fields.text("dtype", fields.text("torch_dtype", "bfloat16"))
    return _info(fields, files, bos[0] if bos else None, ends, weight_bytes, dtype, context_length)


def inspect_gguf(files: ModelFiles, file: GgufFile, context_length: int) -> ModelInfo:
    """Read the metadata of an open GGUF file."""
    fields = Fields(hf_config(file, lambda: _divisors(file)), str(files.path))
    bos, ends = token_ids(file)
    weight_bytes = sum(t.size for t in file.tensors.values())
    is_float32 = all(t.type.name == "F32" for t in file.tensors.values())
    dtype = "float32" if is_float32 else "bfloat16"
    return _info(fields, files, bos, ends, weight_bytes, dtype, context_length)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; ModelLoadError that names the file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path}: file is missing") from error
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelLoadError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: not a JSON object")
    return value


def _divisors(file: GgufFile) -> tuple[float, ...]:
    tensor = file.tensors[ROPE_DIVISORS]
    return tuple(dequantise(file.data(tensor), tensor.type).tolist())


def _info(
    fields: Fields,
    files: ModelFiles,
    bos: int | None,
    ends: tuple[int, ...],
    weight_bytes: int,
    dtype: str,
    context_length: int,
) -> ModelInfo:
    architecture = find_architecture(fields)
    config = architecture.parse(fields)
    outside = [i for i in (*ends, *([] if bos is None else [bos])) if i >= config.vocab_size]
    if outside:
        raise fields.fail(f"token id {outside[0]} is outside the vocabulary ({config.vocab_size})")
    return ModelInfo(
        name=files.name,
        architecture=architecture.name,
        format=files.format,
        path=str(files.path),
        dtype=dtype if dtype in DTYPES else "bfloat16",
        vocab_size=config.vocab_size,
        num_layers=config.num_layers,
        max_context_len=context_length or config.max_context_len,
        bos_token_id=bos,
        eos_token_ids=tuple(dict.fromkeys(ends)),
        weight_bytes=weight_bytes,
        config=config,
    )
