"""The device tier's memory: one tensor per layer for every state group's pool.

Pools are anonymous mappings that ask for huge pages (decode reads all of them once a token, and
4 KiB pages cost a quarter of the bandwidth); the kernel backs a page when it is first written, so
a large pool costs nothing until it is used. Under audit every pool starts as NaN: a read of
something never written reaches the logits and is seen.

This module does not know which blocks are free, who owns them or what they mean.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from statewise.kernels import blocks
from statewise.kernels.interface import (
    AttentionBackend,
    AttentionGeometry,
    EntryGeometry,
    GroupGeometry,
    StateGeometry,
)
from statewise.kernels.layout import entry_layout_id, state_layout_id
from statewise.radix import GroupEnv
from statewise.radix.schema import CacheSchema, StateGroupSpec

HUGE_PAGE = 2 << 20


def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, mmap.mmap]:
    """Return a tensor of zeros on its own huge-page-aligned mapping, and the mapping."""
    size = prod(shape) * dtype.itemsize
    mapping = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    base = torch.frombuffer(mapping, dtype=torch.uint8)
    offset = -base.data_ptr() % HUGE_PAGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel built without transparent huge pages refuses.
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return base[offset : offset + size].view(dtype).view(shape), mapping


@dataclass(frozen=True)
class GroupPool:
    """One group's pool: `layers[i]` is the tensor of the group's i-th owning layer."""

    spec: StateGroupSpec
    geometry: GroupGeometry
    num_blocks: int
    layers: tuple[Tensor, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all layers."""
        return sum(t.numel() * t.element_size() for t in self.layers)


def _block_shape(
    geometry: GroupGeometry, backend: AttentionBackend, num_blocks: int
) -> tuple[int, ...]:
    match geometry:
        case AttentionGeometry():
            return backend.pool_shape(geometry, num_blocks)
        case EntryGeometry():
            return (num_blocks, geometry.entries_per_page, geometry.dim)
        case StateGeometry():
            return (num_blocks, geometry.num_values)


def _reading(geometry: GroupGeometry, backend: AttentionBackend) -> tuple[str, int]:
    """(layout that the kernels in use read, bytes that a block's address must divide by)."""
    match geometry:
        case AttentionGeometry():
            return backend.layout_id(geometry), backend.block_alignment(geometry)
        case EntryGeometry():
            return entry_layout_id(geometry), geometry.dtype.itemsize
        case StateGeometry():
            return state_layout_id(geometry), geometry.dtype.itemsize


class DeviceStore:
    """All device pools of one model under one attention backend.

    `num_blocks[g]` blocks for group g of the schema; ValueError for a group without a geometry.
    """

    def __init__(
        self,
        schema: CacheSchema,
        geometries: Mapping[str, GroupGeometry],
        backend: AttentionBackend,
        num_blocks: Sequence[int],
        *,
        poison: bool = False,
    ) -> None:
        self.schema = schema
        self.poison = poison
        self._backend = backend
        self._mappings: list[mmap.mmap] = []
        pools = []
        for spec, count in zip(schema.groups, num_blocks, strict=True):
            if spec.name not in geometries:
                raise ValueError(f"group {spec.name!r} has no geometry")
            geometry = geometries[spec.name]
            shape = _block_shape(geometry, backend, count)
            layers = tuple(self._allocate(shape, geometry.dtype) for _ in spec.layers)
            pools.append(GroupPool(spec, geometry, count, layers))
        self.groups: tuple[GroupPool, ...] = tuple(pools)
        if poison:
            self.clear()

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor, mapping = allocate(shape, dtype)
        self._mappings.append(mapping)
        return tensor

    def clear(self) -> None:
        """Forget what every block holds, as if nothing had ever been written.

        The memory goes back to the system (Linux), or is poisoned under audit.
        """
        if self.poison:
            for pool in self.groups:
                for tensor in pool.layers:
                    tensor.fill_(float("nan"))
        elif hasattr(mmap, "MADV_DONTNEED"):
            for mapping in self._mappings:
                mapping.madvise(mmap.MADV_DONTNEED)

    def tensor(self, group: int, layer: int) -> Tensor:
        """Pool tensor that `layer` reads in `group`: its own, or its owner's; KeyError if none."""
        pool = self.groups[group]
        owner = dict(pool.spec.shared_layers).get(layer, layer)
        if owner not in pool.spec.layers:
            raise KeyError(f"layer {layer} has no state in group {pool.spec.name!r}")
        return pool.layers[pool.spec.layers.index(owner)]

    def environments(self) -> tuple[GroupEnv, ...]:
        """Where each group's blocks lie now, and what the backend in use requires of them."""
        return tuple(self._environment(pool) for pool in self.groups)

    def _environment(self, pool: GroupPool) -> GroupEnv:
        layout_id, alignment = _reading(pool.geometry, self._backend)
        strides = {t.stride(0) * t.element_size() for t in pool.layers}
        assert len(strides) == 1, "layers of a group have blocks of one size"
        return GroupEnv(
            layout_id=layout_id,
            base_addresses=tuple(t.data_ptr() for t in pool.layers),
            block_stride=strides.pop(),
            alignment=alignment,
        )

    def copy_blocks(self, group: int, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy whole blocks within one group, all layers; sources are read before any write."""
        self._check(group, src)
        self._check(group, dst)
        source = torch.tensor(src, dtype=torch.int32)
        target = torch.tensor(dst, dtype=torch.int32)
        for tensor in self.groups[group].layers:
            blocks.copy_blocks(tensor, source, target)

    def fill_blocks(self, group: int, wanted: Sequence[int], value: float) -> None:
        """Overwrite whole blocks with one value (poison of freed blocks under audit)."""
        self._check(group, wanted)
        target = torch.tensor(wanted, dtype=torch.int64)
        for tensor in self.groups[group].layers:
            tensor[target] = value

    def digests(self, group: int, wanted: NDArray[np.int32]) -> NDArray[np.uint64]:
        """[num_blocks, num_layers] 64-bit digests of the blocks' bytes (kernels/blocks.py)."""
        self._check(group, wanted)
        index = torch.from_numpy(np.ascontiguousarray(wanted))
        layers = self.groups[group].layers
        return np.stack([blocks.block_digests(tensor, index) for tensor in layers], axis=1)

    def bytes_by_group(self) -> dict[str, int]:
        """Bytes of each group's pool."""
        return {pool.spec.name: pool.size_bytes for pool in self.groups}

    def _check(self, group: int, wanted: Sequence[int] | NDArray[np.int32]) -> None:
        limit = self.groups[group].num_blocks
        bad = [int(b) for b in wanted if not 0 <= b < limit]
        assert not bad, f"group {group}: blocks {bad[:4]} outside the pool of {limit}"
