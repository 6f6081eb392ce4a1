"""What the hybrid models share: groups declared as drafts, and the plain part of `CausalLM`.

A model lists its groups as `GroupDraft`s: kind, layers, the geometry of a pool, and everything in
the config that gives the group's bytes their meaning. Layouts, sizes and versions follow.

This module computes no layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any, Protocol

from torch import Tensor

from statewise.kernels.interface import (
    AttentionGeometry,
    EntryGeometry,
    GroupGeometry,
    StateGeometry,
)
from statewise.kernels.layout import block_layout_id, entry_layout_id, state_layout_id
from statewise.radix.schema import CacheSchema, GroupKind, StateGroupSpec
from statewise.runtime.errors import ModelLoadError
from statewise.runtime.models.base import LoadOptions
from statewise.runtime.models.config import ModelInfo
from statewise.runtime.models.parts import TokenTable
from statewise.runtime.models.schema import digest, model_fingerprint


@dataclass(frozen=True)
class GroupDraft:
    """One state group, before its layout and sizes are known.

    `meaning` is what the version digests: what shapes the bytes, and what may be read of them.
    """

    name: str
    kind: GroupKind
    layers: tuple[int, ...]
    geometry: GroupGeometry
    meaning: Mapping[str, Any]
    ratio: int = 1
    overlap: int = 0
    depends_on: str | None = None
    top_k: int = 0


class HybridConfig(Protocol):
    """What every config says."""

    @property
    def architecture(self) -> str:
        """Name in config.json."""
        ...

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        ...


class HybridModel:
    """The part of a `CausalLM` that is not layers."""

    def __init__(
        self,
        info: ModelInfo,
        tokens: TokenTable,
        drafts: Sequence[GroupDraft],
        schema: CacheSchema,
    ) -> None:
        self.architecture = info.architecture
        self.vocab_size = info.vocab_size
        self.max_context_len = info.max_context_len
        self.eos_token_ids = info.eos_token_ids
        self.bos_token_id = info.bos_token_id
        self.tokens = tokens
        self.schema = schema
        self._geometries = {draft.name: draft.geometry for draft in drafts}

    def geometries(self) -> Mapping[str, GroupGeometry]:
        """Geometry of each group's pool, by group name."""
        return self._geometries

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, d] -> [N, V] float32."""
        return self.tokens.logits(hidden)


def make_schema(
    config: HybridConfig, options: LoadOptions, drafts: Sequence[GroupDraft], weights_digest: str
) -> CacheSchema:
    """Cache schema of a model's groups; ModelLoadError where a page does not hold whole entries."""
    unit = lcm(*(draft.ratio for draft in drafts))
    if options.page_size % unit:
        raise ModelLoadError(
            f"{config.architecture} compresses windows of tokens: the page size must be a multiple "
            f"of {unit}, not {options.page_size}; use --page-size {unit}"
        )
    return CacheSchema(
        page_size=options.page_size,
        num_layers=config.num_layers,
        groups=tuple(_spec(draft, options) for draft in drafts),
        model_fingerprint=model_fingerprint(config, options, weights_digest),
    )


def _spec(draft: GroupDraft, options: LoadOptions) -> StateGroupSpec:
    layout, entry_bytes, snapshot_bytes, window = _layout(draft.geometry, options)
    return StateGroupSpec(
        name=draft.name,
        kind=draft.kind,
        layers=draft.layers,
        layout_id=layout,
        version=digest({"kind": draft.kind.value, **draft.meaning}),
        entry_bytes=entry_bytes,
        snapshot_bytes=snapshot_bytes,
        window=window,
        ratio=draft.ratio,
        overlap=draft.overlap,
        depends_on=draft.depends_on,
        top_k=draft.top_k,
    )


def _layout(geometry: GroupGeometry, options: LoadOptions) -> tuple[str, int, int, int]:
    """(layout id, bytes of an entry, bytes of a snapshot, window)."""
    match geometry:
        case AttentionGeometry():
            layout_id = options.backend_layout_id or block_layout_id
            size = 2 * geometry.num_kv_heads * geometry.head_dim * geometry.dtype.itemsize
            return layout_id(geometry), size, 0, geometry.window
        case EntryGeometry():
            size = geometry.dim * geometry.dtype.itemsize
            return entry_layout_id(geometry), size, 0, geometry.window
        case StateGeometry():
            size = geometry.num_values * geometry.dtype.itemsize
            return state_layout_id(geometry), 0, size, 0
