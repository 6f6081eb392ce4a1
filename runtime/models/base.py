"""The seam between a model's layers and the runtime: a model is data plus one file of layers.

A model declares its `CacheSchema` (groups, layers, bytes) and computes hidden states. It never
sees page tables: it calls `ForwardContext.attend`, which writes the layer's new K/V into the
right group's pool and attends over what each row may read.

Shapes: T tokens of the step (all rows packed), d hidden, Hq/Hkv heads, D head dim, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from statewise.kernels.interface import AttentionGeometry, Ops
from statewise.radix.schema import CacheSchema


@dataclass(frozen=True)
class LoadOptions:
    """How to build a model from files.

    `context_length` 0 is the model's own; `ops` None is the plain torch reference.
    """

    dtype: torch.dtype
    kv_dtype: torch.dtype
    page_size: int
    backend_layout_id: Any = None  # callable AttentionGeometry -> str
    weights_epoch: int = 0
    context_length: int = 0
    ops: Ops | None = None
    extra: dict[str, Any] = field(default_factory=dict)


class ForwardContext(Protocol):
    """What a layer may ask of the runtime during one step."""

    positions: Tensor  # [T] int64
    token_ids: Tensor  # [T] int64 (hash-routed experts need them)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Append k, v [T, Hkv, D] of `layer` and attend with q [T, Hq, D] -> [T, Hq, D]."""
        ...


class CausalLM(Protocol):
    """A loaded model."""

    architecture: str
    schema: CacheSchema
    vocab_size: int
    max_context_len: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    def geometries(self) -> dict[str, AttentionGeometry]:
        """Attention geometry of each FULL and WINDOW group, by group name."""
        ...

    def forward(self, token_ids: Tensor, ctx: ForwardContext, num_layers: int) -> Tensor:
        """Hidden states [T, d] after `num_layers` layers (final norm applied if all ran)."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, d] -> [N, V] float32."""
        ...
