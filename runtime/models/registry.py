"""Architectures by the name that config.json gives them.

An entry names how its config is read and which module builds it; the module is imported only when
a model of that architecture is loaded, so that a process without torch can read configs.

This module does not open files.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from statewise.runtime.models.config import Fields
from statewise.runtime.models.deepseek_config import parse_deepseek_v4, parse_deepseek_v32
from statewise.runtime.models.hf_dialects import PARSERS
from statewise.runtime.models.qwen3_next_config import parse_qwen3_next

if TYPE_CHECKING:
    from statewise.runtime.models.base import CausalLM, LoadOptions
    from statewise.runtime.models.config import ModelInfo
    from statewise.runtime.models.weights import WeightReader

LLAMA_MODULE = "statewise.runtime.models.llama"
GEMMA3_MODULE = "statewise.runtime.models.gemma3"
GPT_OSS_MODULE = "statewise.runtime.models.gpt_oss"


@dataclass(frozen=True)
class Architecture:
    """One architecture: `parse` reads its config, `module` has `build_model`."""

    name: str
    parse: Callable[[Fields], Any]
    module: str

    def build(self, info: ModelInfo, reader: WeightReader, options: LoadOptions) -> CausalLM:
        """Build the model; ModelLoadError where weights and config do not fit."""
        model: CausalLM = importlib.import_module(self.module).build_model(info, reader, options)
        return model


MODULES = {
    "LlamaForCausalLM": LLAMA_MODULE,
    "MistralForCausalLM": LLAMA_MODULE,
    "Qwen2ForCausalLM": LLAMA_MODULE,
    "Qwen3ForCausalLM": LLAMA_MODULE,
    "Gemma3ForCausalLM": GEMMA3_MODULE,
    "GptOssForCausalLM": GPT_OSS_MODULE,
}
HYBRID: dict[str, tuple[Callable[[Fields], Any], str]] = {
    "DeepseekV32ForCausalLM": (parse_deepseek_v32, "statewise.runtime.models.deepseek_v32"),
    "DeepseekV4ForCausalLM": (parse_deepseek_v4, "statewise.runtime.models.deepseek_v4"),
    "Qwen3NextForCausalLM": (parse_qwen3_next, "statewise.runtime.models.qwen3_next"),
}
ARCHITECTURES = {name: Architecture(name, PARSERS[name], MODULES[name]) for name in MODULES} | {
    name: Architecture(name, parse, module) for name, (parse, module) in HYBRID.items()
}


def find_architecture(fields: Fields) -> Architecture:
    """Architecture of a config; ModelLoadError that lists the known ones."""
    names = fields.raw.get("architectures")
    if not isinstance(names, list) or not names:
        raise fields.fail("'architectures' is missing: not a language model's config")
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    known = ", ".join(sorted(ARCHITECTURES))
    raise fields.fail(f"architecture {names[0]!r} is not supported; known: {known}")
