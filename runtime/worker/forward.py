"""What a layer may ask of the runtime during one forward pass: `ForwardContext` over pools.

One attention plan is made per group that the pass reaches, on first use; each layer then appends
its K/V to its own pool tensor and attends. A layer that shares another's state attends over the
owner's tensor and appends nothing.

This module does not choose rows and does not touch pools outside `append`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from statewise.kernels.interface import AttentionBackend
from statewise.runtime.memory.block_store import DeviceStore
from statewise.runtime.worker.packing import PackedRows, group_layout


class LayerRouter:
    """Which pool tensor each layer uses; fixed once pools exist."""

    def __init__(self, store: DeviceStore) -> None:
        self.groups: dict[int, int] = {}
        self.tensors: dict[int, Tensor] = {}
        self.owners: frozenset[int] = frozenset()
        owners = set()
        for layer in range(store.schema.num_layers):
            try:
                group, index, owns = store.owner_index(layer)
            except KeyError:  # a layer without attention state
                continue
            self.groups[layer] = group
            self.tensors[layer] = store.groups[group].layers[index]
            if owns:
                owners.add(layer)
        self.owners = frozenset(owners)


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

    def _plan(self, group: int) -> Any:
        plan = self._plans.get(group)
        if plan is None:
            geometry = self._store.groups[group].geometry
            layout = group_layout(self._packed, group, geometry.page_size)
            plan = self._backend.plan(geometry, layout)
            self._plans[group] = plan
        return plan

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Append k, v [T, Hkv, D] of `layer` and attend with q [T, Hq, D] -> [T, Hq, D]."""
        plan = self._plan(self._router.groups[layer])
        kv = self._router.tensors[layer]
        if layer in self._router.owners:
            self._backend.append(plan, kv, k, v)
        return self._backend.run(plan, q, kv, sinks)
