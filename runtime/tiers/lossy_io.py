"""Device blocks as rows at fewer bits: what `device_io` is, for tiers that keep lossy copies.

    read     blocks -> scratch -> rows of quantised pages       digests of the blocks, as published
    landing  rows -> scratch                                    digests of what the rows read into
    write    rows -> scratch -> blocks                          digests of what now lies in them

Stores, records and codecs see smaller payloads of another layout and need not know why. Groups that
are not quantised pass through. It declares the dequantiser: where it is missing, layer 2 of the
validation chain finds every page of such a group unusable.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from statewise.kernels import native
from statewise.kernels.blocks import BlockRows
from statewise.radix.lossy import lossy_layout
from statewise.radix.schema import CacheSchema
from statewise.radix.validation import GroupEnv, dequantiser
from statewise.runtime.memory.block_store import DeviceStore
from statewise.runtime.tiers.blocks import Digests, FileRun
from statewise.runtime.tiers.buffers import Arena, Bytes, Row
from statewise.runtime.tiers.checksums import layer_digests
from statewise.runtime.tiers.device_io import DeviceIO, layer_bytes_of
from statewise.runtime.tiers.quantise import Quantiser, is_available

SCRATCH_BLOCKS = 8  # of each group and I/O thread


class LossyIO:
    """A `BlockIO` over a device store, for the copies that its schema names."""

    def __init__(self, store: DeviceStore, schema: CacheSchema) -> None:
        self._device = DeviceIO(store)
        raw = layer_bytes_of(store)
        self._layers = [len(pool.layers) for pool in store.groups]
        self._quantisers = [
            Quantiser.of(spec.lossy, pool.geometry, size) if spec.lossy else None
            for spec, pool, size in zip(schema.groups, store.groups, raw, strict=True)
        ]
        self._block_bytes = [n * size for n, size in zip(self._layers, raw, strict=True)]
        self.layer_bytes = [
            size if q is None else q.copy_bytes
            for q, size in zip(self._quantisers, raw, strict=True)
        ]
        self._local = threading.local()

    @staticmethod
    def operators(kind: str) -> frozenset[str]:
        """What this machine adds to a backend's operators."""
        return frozenset({dequantiser(kind)}) if is_available(kind) else frozenset()

    # ---------------------------------------------------------------- copies

    def read(self, group: int, blocks: Sequence[int], rows: Sequence[Row]) -> Digests:
        """See `BlockIO`."""
        quantiser = self._quantisers[group]
        if quantiser is None or not blocks:
            return self._device.read(group, blocks, rows)
        found = []
        for first, scratch in self._parts(group, len(blocks)):
            part = blocks[first : first + len(scratch)]
            found.append(self._device.read(group, part, scratch))
            for whole, row in zip(scratch, rows[first : first + len(scratch)], strict=True):
                quantiser.quantise(whole.data, row.data)
        return np.concatenate(found)

    def write(self, group: int, blocks: Sequence[int], rows: Sequence[Row]) -> Digests:
        """See `BlockIO`."""
        quantiser = self._quantisers[group]
        if quantiser is None or not blocks:
            return self._device.write(group, blocks, rows)
        found = []
        for first, scratch in self._parts(group, len(blocks)):
            for whole, row in zip(scratch, rows[first : first + len(scratch)], strict=True):
                quantiser.dequantise(row.data, whole.data)
            found.append(self._device.write(group, blocks[first : first + len(scratch)], scratch))
        return np.concatenate(found)

    def write_from_file(
        self, group: int, blocks: Sequence[int], run: FileRun, buffer: Bytes, heads: Bytes
    ) -> Digests | None:
        """See `BlockIO`; what is read for a lossy copy is decoded in memory first."""
        if self._quantisers[group] is not None:
            return None
        return self._device.write_from_file(group, blocks, run, buffer, heads)

    def landing(self, group: int, rows: Sequence[Row], digests: Digests) -> Digests:
        """[n, num_layers] digests that blocks will have after `write` of these rows.

        `digests` are those of the blocks that were read.
        """
        quantiser = self._quantisers[group]
        if quantiser is None or not rows:
            return digests
        found = []
        for first, scratch in self._parts(group, len(rows)):
            for whole, row in zip(scratch, rows[first : first + len(scratch)], strict=True):
                quantiser.dequantise(row.data, whole.data)
            found.append(self._scratch(group).digests(len(scratch)))
        return np.concatenate(found)

    def _scratch(self, group: int) -> _Scratch:
        known: dict[int, _Scratch] = self._local.__dict__.setdefault("scratch", {})
        if group not in known:
            known[group] = _Scratch(self._layers[group], self._block_bytes[group])
        return known[group]

    def _parts(self, group: int, count: int) -> Iterator[tuple[int, list[Row]]]:
        """(first, rows for whole blocks): this thread's own, a few at a time."""
        rows = self._scratch(group).rows
        for first in range(0, count, SCRATCH_BLOCKS):
            yield first, rows[: count - first]


class _Scratch:
    """One thread's room for a few whole blocks of one group."""

    def __init__(self, num_layers: int, block_bytes: int) -> None:
        self.rows = Arena(block_bytes, SCRATCH_BLOCKS).take(SCRATCH_BLOCKS)
        self._num_layers = num_layers
        self._blocks: BlockRows | None = None
        if native.is_available():  # digests there take no lock and no threads
            size = block_bytes // num_layers
            layers = [
                torch.empty(SCRATCH_BLOCKS, size, dtype=torch.uint8) for _ in range(num_layers)
            ]
            self._pool = layers
            self._blocks = BlockRows(layers)

    def digests(self, count: int) -> Digests:
        """[count, num_layers] digests of what the first rows hold."""
        rows = self.rows[:count]
        if self._blocks is None:
            return np.stack([layer_digests(row.data, self._num_layers) for row in rows])
        addresses = np.array([row.address for row in rows], dtype=np.uint64)
        return self._blocks.copy(np.arange(count, dtype=np.int32), addresses, to_blocks=True)


def lossy_environments(
    places: Sequence[GroupEnv], kind: str, operators: frozenset[str]
) -> tuple[GroupEnv, ...]:
    """What a backend declares together with the dequantiser of slower tiers."""
    return tuple(
        replace(
            place,
            layout_id=lossy_layout(place.layout_id or "", kind),
            operators=place.operators | operators,
        )
        for place in places
    )
