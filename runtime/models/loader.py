"""Load a model: find its files, read its config, hand its weights to its architecture.

    load_model(path or name, options, progress) -> CausalLM

This module knows neither formats nor architectures beyond choosing them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from statewise.runtime.models.base import CausalLM, LoadOptions
from statewise.runtime.models.config import Fields, ModelInfo
from statewise.runtime.models.gguf_file import GgufFile
from statewise.runtime.models.gguf_source import GgufSource
from statewise.runtime.models.inspection import inspect_directory, inspect_gguf, inspect_model
from statewise.runtime.models.locate import ModelFiles, locate_model
from statewise.runtime.models.registry import ARCHITECTURES, Architecture, find_architecture
from statewise.runtime.models.safetensors_source import SafetensorsSource
from statewise.runtime.models.weights import Progress, WeightReader, WeightSource

__all__ = ["ARCHITECTURES", "inspect_model", "load_model"]


def load_model(
    path_or_name: str | Path, options: LoadOptions, progress: Progress | None = None
) -> CausalLM:
    """Load a model from a directory, a .gguf file or a known name.

    `progress` is called after each tensor with (bytes read, bytes in all, tensor name). Raises
    ModelLoadError, naming file and tensor, for whatever is missing, unknown or misshapen.
    """
    files = locate_model(path_or_name)
    info, source = _open(files, options.context_length)
    options = replace(options, context_length=info.max_context_len)
    reader = WeightReader(source, options.dtype, progress)
    try:
        return _architecture(info).build(info, reader, options)
    finally:
        reader.close()


def _open(files: ModelFiles, context_length: int) -> tuple[ModelInfo, WeightSource]:
    if files.format == "hf":
        return inspect_directory(files, context_length), SafetensorsSource(files.path)
    file = GgufFile(files.path)
    info = inspect_gguf(files, file, context_length)
    return info, GgufSource(file, info.config.head_dim)


def _architecture(info: ModelInfo) -> Architecture:
    return find_architecture(Fields({"architectures": [info.architecture]}, info.path))
