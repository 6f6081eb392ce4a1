"""What a layer may ask of the runtime during one forward pass: `ForwardContext` over pools.

One plan is made per group that the pass reaches, on first use; each layer then works on its own
pool tensors with it. A layer that shares another's K/V attends over the owner's tensor and appends
nothing.

This module does not choose rows, and writes only into blocks of the rows that write their group.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from statewise.kernels.interface import (
    AttentionBackend,
    AttentionGeometry,
    EntryGeometry,
    LayerPools,
    SparseKernels,
    StateGeometry,
)
from statewise.kernels.select import select_sparse
from statewise.runtime.memory.block_store import DeviceStore
from statewise.runtime.models.base import EntryAttention, RowStates, TailWindows
from statewise.runtime.worker.packing import PackedRows, group_layout
from statewise.runtime.worker.tails import TailPlan, plan_tails


class LayerRouter:
    """Which pool tensor each layer uses; fixed once pools exist."""

    def __init__(self, store: DeviceStore) -> None:
        self.names = {pool.spec.name: g for g, pool in enumerate(store.groups)}
        self.tensors: dict[tuple[int, int], Tensor] = {}  # (group, layer)
        self.attention: dict[int, int] = {}  # layer -> its group of K/V
        self.owners: set[int] = set()  # layers that write their K/V
        for g, pool in enumerate(store.groups):
            is_attention = isinstance(pool.geometry, AttentionGeometry)
            for layer in (*pool.spec.layers, *(user for user, _ in pool.spec.shared_layers)):
                self.tensors[g, layer] = store.tensor(g, layer)
                if is_attention:
                    self.attention[layer] = g
            if is_attention:
                self.owners.update(pool.spec.layers)

    @functools.cached_property
    def layer_pools(self) -> LayerPools:
        """Of all layers that attend, in order."""
        layers = sorted(self.attention)
        groups = tuple(self.attention[layer] for layer in layers)
        return LayerPools(
            tensors=tuple(self.tensors[place] for place in zip(groups, layers, strict=True)),
            groups=groups,
            writes=tuple(layer in self.owners for layer in layers),
        )


class PagedForwardContext:
    """`ForwardContext` of one pass over packed rows."""

    def __init__(
        self,
        packed: PackedRows,
        store: DeviceStore,
        router: LayerRouter,
        backend: AttentionBackend,
    ) -> None:
        self.positions = packed.positions
        self.token_ids = packed.token_ids
        self._packed = packed
        self._store = store
        self._router = router
        self._backend = backend
        self._plans: dict[int, Any] = {}

    @functools.cached_property
    def _sparse(self) -> SparseKernels:
        return select_sparse(self._backend.name)

    def _plan(self, group: int) -> Any:
        plan = self._plans.get(group)
        if plan is None:
            plan = self._plans[group] = self._make_plan(group)
        return plan

    def _make_plan(self, group: int) -> Any:
        geometry = self._store.groups[group].geometry
        match geometry:
            case AttentionGeometry():
                layout = group_layout(self._packed, group, geometry.page_size)
                return self._backend.plan(geometry, layout)
            case EntryGeometry():
                layout = group_layout(self._packed, group, geometry.page_size)
                return self._sparse.plan(geometry, layout)
            case StateGeometry():
                return self._plan_tail(group)

    def _plan_tail(self, group: int) -> TailPlan:
        spec, rows = self._store.groups[group].spec, self._packed.rows
        return plan_tails(
            [(row.start, row.end) for row in rows],
            self._working_blocks(group),
            self._is_written(group),
            spec.ratio,
            spec.overlap,
        )

    def _working_blocks(self, group: int) -> list[int]:
        blocks = [int(row.page_tables[group][0]) for row in self._packed.rows]
        limit = self._store.groups[group].num_blocks
        assert all(0 <= b < limit for b in blocks), f"group {group}: working blocks {blocks}"
        return blocks

    def _is_written(self, group: int) -> list[bool]:
        return [bool(row.write_groups >> group & 1) for row in self._packed.rows]

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Append k, v [T, Hkv, D] of `layer` and attend with q [T, Hq, D] -> [T, Hq, D]."""
        group = self._router.attention[layer]
        plan = self._plan(group)
        kv = self._router.tensors[group, layer]
        if layer in self._router.owners:
            self._backend.append(plan, kv, k, v)
        return self._backend.run(plan, q, kv, sinks)

    def layer_pools(self, num_layers: int) -> tuple[LayerPools, Sequence[Any]]:
        """Pools of all layers, and plans by group of those that the first layers use."""
        pools = self._router.layer_pools
        used = set(pools.groups[:num_layers])
        plans = [self._plan(g) if g in used else None for g in range(max(pools.groups) + 1)]
        return pools, plans

    def append_entries(self, group: str, layer: int, entries: Tensor) -> None:
        """Write entries [N, D] that the step's tokens complete."""
        plan, pool = self._entry_pool(group, layer)
        self._sparse.append(plan, pool, entries)

    def select_entries(
        self, group: str, layer: int, q: Tensor, weights: Tensor, top_k: int
    ) -> Tensor | None:
        """Choose visible entries by score: [T, top_k] int32, or None for all."""
        plan, pool = self._entry_pool(group, layer)
        return self._sparse.select(plan, pool, q, weights, top_k)

    def attend_entries(
        self,
        layer: int,
        q: Tensor,
        over: EntryAttention,
        selected: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend q [T, H, D] over window and entries -> [T, H, value_dim]."""
        window = None if over.window is None else self._entry_pool(over.window, layer)
        entries = None if over.entries is None else self._entry_pool(over.entries, layer)
        return self._sparse.attend(
            q, window, entries, selected, sinks, scale=over.scale, value_dim=over.value_dim
        )

    def tail_windows(self, group: str, layer: int, raw: Tensor, halo_width: int) -> TailWindows:
        """Take raw rows [T, width] in; completed windows come out, the rest waits."""
        g = self._router.names[group]
        plan: TailPlan = self._plan(g)
        return plan.exchange(self._router.tensors[g, layer], raw, halo_width)

    def states(self, group: str, layer: int) -> RowStates:
        """Recurrent state of `layer`, one row of numbers per request."""
        g = self._router.names[group]
        return BlockStates(
            self._router.tensors[g, layer],
            self._packed,
            self._working_blocks(g),
            self._is_written(g),
        )

    def _entry_pool(self, group: str, layer: int) -> tuple[Any, Tensor]:
        g = self._router.names[group]
        return self._plan(g), self._router.tensors[g, layer]


class BlockStates:
    """`RowStates` in the working blocks of one layer's pool [B, num_values]."""

    def __init__(
        self, pool: Tensor, packed: PackedRows, blocks: list[int], is_written: list[bool]
    ) -> None:
        self._pool = pool
        self.starts = tuple(packed.starts.tolist())
        self.positions = tuple(row.start for row in packed.rows)
        self._blocks = torch.tensor(blocks, dtype=torch.int64)
        self._written = torch.tensor(is_written)

    def read(self) -> Tensor:
        """[R, num_values]; zeros for rows that start at position 0."""
        values = self._pool[self._blocks]
        values[torch.tensor([p == 0 for p in self.positions])] = 0
        return values

    def write(self, values: Tensor) -> None:
        """Keep [R, num_values] in the rows that write the group."""
        self._pool[self._blocks[self._written]] = values[self._written].to(self._pool.dtype)
