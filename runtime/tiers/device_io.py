"""Device blocks as rows of bytes: the data plane's end of every transfer.

A payload is a block's bytes layer after layer, in the group's order of layers. On the CPU one
native call copies and digests all layers of many blocks, on the I/O thread alone and without the
interpreter's lock, so that a step beside it keeps its threads. Elsewhere copies go layer by layer;
on a device through its copy engine, from page-locked memory where `pin` was applied to the buffers.

This module does not know which blocks may be touched: they are leased by whoever asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from statewise.kernels import native
from statewise.kernels.blocks import BlockRows
from statewise.runtime.memory.block_store import DeviceStore
from statewise.runtime.tiers.blocks import Digests, FileRun
from statewise.runtime.tiers.buffers import Bytes, Row, stacked


def layer_bytes_of(store: DeviceStore) -> list[int]:
    """Bytes of one layer of one block, per group."""
    return [pool.layers[0][0].numel() * pool.layers[0].element_size() for pool in store.groups]


class DeviceIO:
    """Copies between the blocks of a `DeviceStore` and rows; a `BlockIO`."""

    def __init__(self, store: DeviceStore) -> None:
        self._store = store
        self._layer_bytes = layer_bytes_of(store)
        self._native = [
            BlockRows(pool.layers)
            if native.is_available() and pool.layers[0].device.type == "cpu"
            else None
            for pool in store.groups
        ]
        self._flat = [
            [layer.view(torch.uint8).reshape(layer.shape[0], -1) for layer in pool.layers]
            for pool in store.groups
        ]

    def read(self, group: int, blocks: Sequence[int], rows: Sequence[Row]) -> Digests:
        """See `BlockIO`."""
        wanted = np.array(blocks, dtype=np.int32)
        copier = self._native[group]
        if copier is not None:
            return copier.copy(wanted, _addresses(rows), to_blocks=False)
        digests = self._store.digests(group, wanted)
        index = torch.from_numpy(wanted.astype(np.int64))
        for target in self._views(group, rows):
            part = index[target.first : target.first + target.count]
            for layer, flat in enumerate(self._flat[group]):
                if flat.device.type == "cpu":
                    target.rows[:, layer] = flat.numpy()[part.numpy()]
                else:
                    target.rows[:, layer] = flat.index_select(0, part.to(flat.device)).cpu().numpy()
        return digests

    def write(self, group: int, blocks: Sequence[int], rows: Sequence[Row]) -> Digests:
        """See `BlockIO`."""
        wanted = np.array(blocks, dtype=np.int32)
        assert len(set(blocks)) == len(blocks), "a block is the target of two pages"
        copier = self._native[group]
        if copier is not None:
            return copier.copy(wanted, _addresses(rows), to_blocks=True)
        index = torch.from_numpy(wanted.astype(np.int64))
        for source in self._views(group, rows):
            part = index[source.first : source.first + source.count]
            for layer, flat in enumerate(self._flat[group]):
                if flat.device.type == "cpu":
                    flat.numpy()[part.numpy()] = source.rows[:, layer]
                else:
                    data = torch.from_numpy(source.rows[:, layer]).to(flat.device)
                    flat.index_copy_(0, part.to(flat.device), data)
        return self._store.digests(group, wanted)

    def write_from_file(
        self, group: int, blocks: Sequence[int], run: FileRun, buffer: Bytes, heads: Bytes
    ) -> Digests | None:
        """See `BlockIO`."""
        copier = self._native[group]
        if copier is None:
            return None
        assert len(set(blocks)) == len(blocks), "a block is the target of two pages"
        wanted = np.array(blocks, dtype=np.int32)
        return copier.read_records(wanted, run.fd, run.offset, run.record_bytes, buffer, heads)

    def _views(self, group: int, rows: Sequence[Row]) -> list[_Rows]:
        """Rows as arrays [n, num_layers, layer_bytes]: one where they are neighbours."""
        shape = (len(self._flat[group]), self._layer_bytes[group])
        together = stacked(list(rows)) if rows else None
        if together is not None:
            data = together[:, : shape[0] * shape[1]]
            return [_Rows(0, len(rows), data.reshape(len(rows), *shape))]
        return [_Rows(i, 1, row.data.reshape(1, *shape)) for i, row in enumerate(rows)]


def _addresses(rows: Sequence[Row]) -> NDArray[np.uint64]:
    """Where rows lie in memory."""
    return np.array([row.address for row in rows], dtype=np.uint64)


class _Rows:
    """`count` rows from the `first` on, as one array."""

    def __init__(self, first: int, count: int, rows: Bytes) -> None:
        self.first = first
        self.count = count
        self.rows = rows


def pin(buffer: Bytes) -> None:
    """Page-lock a buffer where a CUDA device will copy from or to it; RuntimeError if it fails."""
    if not torch.cuda.is_available():
        return
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = runtime.cudaHostRegister(buffer.ctypes.data, buffer.size, 0)
    if int(status) != 0:
        raise RuntimeError(f"page-locking {buffer.size} bytes failed: {status}")
