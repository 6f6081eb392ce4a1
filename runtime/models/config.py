"""What a model is, as data: sizes, the kind of each layer, rope, token ids. No torch, no files.

    ModelInfo    what a server must know before weights are loaded (any architecture)
    DenseConfig  a decoder whose every layer is attention plus a gated MLP
    GptOssConfig a dense decoder with experts
      LayerConfig  one layer's window (0: all tokens) and rope
        RopeConfig   one rotary embedding; equal ropes share one table

Configs are frozen and hashable: parts of them are digested into the versions of cached state.

This module does not know any dialect of config.json (`hf_dialects` does) and computes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from statewise.runtime.errors import ModelLoadError

MAX_SIZE = 1 << 24  # of any size in a config: a damaged file must not ask for all memory
MAX_LAYERS = 4096
PAGE_TOKENS = 16


@dataclass(frozen=True)
class RopeConfig:
    """One rotary position embedding.

    kind: default, linear, dynamic, llama3, yarn, or divisors (each frequency has its own divisor,
    as GGUF files store llama3 scaling).
    """

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_len: int = 0  # tokens of the unscaled context
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn: scale of cos and sin; None: from `factor`
    mscale: float = 0.0  # yarn
    mscale_all_dim: float = 0.0  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True)
class LayerConfig:
    """What one layer attends over, and how it places tokens."""

    window: int  # tokens, the current one included; 0: all
    rope: RopeConfig


@dataclass(frozen=True)
class DenseConfig:
    """A dense decoder: Llama and its relatives, Gemma 3."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    max_context_len: int  # tokens
    norm_eps: float
    activation: str  # silu | gelu_tanh
    attention_scale: float
    tied_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_offset: float = 0.0  # norms multiply by (offset + weight)
    embedding_scale: float = 1.0
    attention_soft_cap: float = 0.0
    final_soft_cap: float = 0.0
    attention_sinks: bool = False  # one learned logit per head in the softmax's denominator

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)


@dataclass(frozen=True)
class GptOssConfig(DenseConfig):
    """A dense decoder's attention with routed experts instead of the MLP."""

    num_experts: int = 0
    num_chosen: int = 0  # experts for each token
    swiglu_limit: float = 0.0
    swiglu_alpha: float = 1.0


@dataclass(frozen=True)
class ModelInfo:
    """What is known of a model without its weights."""

    name: str  # a name people know it by, from its path
    architecture: str
    format: str  # hf | gguf
    path: str
    dtype: str  # type to compute in, as the files suggest
    vocab_size: int
    num_layers: int
    max_context_len: int  # tokens
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    weight_bytes: int  # on disk
    config: Any  # the architecture's own config (DenseConfig)

    @property
    def page_unit(self) -> int:
        """A page holds a multiple of this many tokens: 1, unless entries stand for several."""
        return int(getattr(self.config, "page_unit", 1))

    @property
    def page_size(self) -> int:
        """Tokens per page where nobody asked for another: about `PAGE_TOKENS`, whole entries."""
        return self.page_unit * math.ceil(PAGE_TOKENS / self.page_unit)


class Fields:
    """Typed reading of a config's entries; every complaint names the file and the entry."""

    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self.raw = raw
        self.source = source

    def fail(self, message: str) -> ModelLoadError:
        """Error about this config."""
        return ModelLoadError(f"{self.source}: {message}")

    def has(self, key: str) -> bool:
        """Whether the entry is there and not null."""
        return self.raw.get(key) is not None

    def integer(
        self, key: str, default: int | None = None, low: int = 1, high: int = MAX_SIZE
    ) -> int:
        """Entry as an integer in low .. high."""
        value = self._value(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.fail(f"{key!r} must be an integer from {low} to {high}, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Entry as a finite number."""
        value = self._value(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or value != value:
            raise self.fail(f"{key!r} must be a number, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Entry as true or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.fail(f"{key!r} must be true or false, not {value!r}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Entry as a string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.fail(f"{key!r} must be a string, not {value!r}")
        return value

    def section(self, key: str) -> Fields:
        """Entry as a nested config; empty where it is absent."""
        value = self.raw.get(key) or {}
        if not isinstance(value, Mapping):
            raise self.fail(f"{key!r} must be an object, not {value!r}")
        return Fields(value, f"{self.source}: {key}")

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Entry as token ids: a number, a list of numbers, or absent."""
        value = self.raw.get(key)
        ids = [] if value is None else value if isinstance(value, (list, tuple)) else [value]
        if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):
            raise self.fail(f"{key!r} must be a token id or a list of them, not {value!r}")
        return tuple(ids)

    def _value(self, key: str, default: Any) -> Any:
        value = self.raw.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.fail(f"{key!r} is missing")
        return value
