"""The seam between a model's layers and the runtime: a model is data plus one file of layers.

A model declares its `CacheSchema` (groups, layers, bytes) and computes hidden states. It never
sees page tables: it calls `ForwardContext`, which knows where each row's state lies.

    state of a layer                     calls
    K/V per head (FULL, WINDOW)          attend: writes the new K/V, then attends
    entries, one vector per `ratio`      append_entries, select_entries, attend_entries
      tokens (latents, compressed
      entries, index keys)
    open compression window (TAIL)       tail_windows: completed windows out, new tail kept
    recurrent state (RECURRENT)          states: one row of numbers per request, read and written

A row's tail and recurrent state lie in a working block of its own, which holds the state at
exactly the row's first position; at position 0 the state is empty, whatever the bytes are. What a
snapshot holds is a function of the token prefix alone. A row that does not write a group reads its
cached state as it is.

Shapes: T tokens of the step (all rows packed), d hidden, Hq/Hkv heads, D head dim, V vocabulary,
R rows, N entries that the step's tokens complete (in order of row and position; N = T for ratio 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from statewise.kernels.interface import GroupGeometry, LayerPools, Ops
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


@dataclass(frozen=True)
class EntryAttention:
    """What one layer attends over, in one softmax: a window, entries, or both (group names)."""

    window: str | None
    entries: str | None
    scale: float
    value_dim: int  # a key's first numbers are its value


@dataclass(frozen=True)
class TailWindows:
    """Compression windows that the step completes, with the raw rows that they are made of.

    `previous` are the first `halo_width` numbers of each row of the window before (TAIL groups
    with an overlap; zeros where `has_previous` is false), `current` the whole rows.
    """

    starts: Tensor  # [N] int64 position of each window's first token
    previous: Tensor  # [N, overlap, halo_width]
    has_previous: Tensor  # [N] bool
    current: Tensor  # [N, ratio, width]


class RowStates(Protocol):
    """Snapshots of one layer, one for each row of the step."""

    starts: tuple[int, ...]  # packed index of each row's first token, and T at the end
    positions: tuple[int, ...]  # position of each row's first token

    def read(self) -> Tensor:
        """[R, num_values] state at each row's first position; zeros at position 0."""
        ...

    def write(self, values: Tensor) -> None:
        """Keep [R, num_values] states after each row's last token, where the row writes them."""
        ...


class ForwardContext(Protocol):
    """What a layer may ask of the runtime during one step."""

    positions: Tensor  # [T] int64
    token_ids: Tensor  # [T] int64 (hash-routed experts need them)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Append k, v [T, Hkv, D] of `layer` and attend with q [T, Hq, D] -> [T, Hq, D]."""
        ...

    def layer_pools(self, num_layers: int) -> tuple[LayerPools, Sequence[Any]]:
        """K/V pools of all layers, and plans for the groups of the first `num_layers`.

        For models whose every layer only attends, in place of `attend`.
        """
        ...

    def append_entries(self, group: str, layer: int, entries: Tensor) -> None:
        """Write entries [N, D] of `layer` into `group`, in rows that write the group."""
        ...

    def select_entries(
        self, group: str, layer: int, q: Tensor, weights: Tensor, top_k: int
    ) -> Tensor | None:
        """Choose visible entries by score; see `SparseKernels.select`."""
        ...

    def attend_entries(
        self,
        layer: int,
        q: Tensor,
        over: EntryAttention,
        selected: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend q [T, H, D] -> [T, H, value_dim]; see `SparseKernels.attend`."""
        ...

    def tail_windows(self, group: str, layer: int, raw: Tensor, halo_width: int) -> TailWindows:
        """Take raw rows [T, width] of the step's tokens into `group`; completed windows come out.

        What the next step needs is kept in the working blocks of rows that write the group.
        """
        ...

    def states(self, group: str, layer: int) -> RowStates:
        """Recurrent state of `layer`, one row of numbers per request."""
        ...


class CausalLM(Protocol):
    """A loaded model."""

    architecture: str
    schema: CacheSchema
    vocab_size: int
    max_context_len: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    def geometries(self) -> Mapping[str, GroupGeometry]:
        """Geometry of each group's pool, by group name."""
        ...

    def forward(self, token_ids: Tensor, ctx: ForwardContext, num_layers: int) -> Tensor:
        """Hidden states [T, d] after `num_layers` layers (final norm applied if all ran)."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, d] -> [N, V] float32."""
        ...
