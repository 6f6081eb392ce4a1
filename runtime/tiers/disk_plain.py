"""Plain pages on their way into blocks: read in runs, copied, and only then verified.

Whatever a thread does for each page holds the interpreter's lock, and after every read it comes out
of cold caches. So a run is read and copied by one native call (`write_from_file`), into blocks that
nobody reads before their pages were confirmed, and what is compared is compared afterwards, as
bytes. A page is confirmed if its header is the one that the index names (`PlainHeaders`), and the
digests in it are those of what went into the block. Where a device takes rows from memory alone, or
reads are not the system's own, a run is read as a whole, then copied: the same, slower.

A page that is not confirmed, for whatever reason, takes the long way (`DiskTier.fetch`): read again
by itself, looked at field by field, counted and dropped if it is damaged. So do pages of a cache
with a secret, which are sealed. This module drops nothing and never says what is wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import numpy as np

from statewise.runtime.tiers.blocks import BlockIO, Digests, FileRun
from statewise.runtime.tiers.buffers import Bytes, Slabs
from statewise.runtime.tiers.disk_index import IndexRow
from statewise.runtime.tiers.disk_read import MAX_RUN_BYTES
from statewise.runtime.tiers.extents import Extent, Extents
from statewise.runtime.tiers.page import GroupShape
from statewise.runtime.tiers.record import PlainHeaders

Source = tuple[Extents, Slabs]  # what is read, and memory to read into

READ_BYTES = 1 << 20  # at a time: small pieces stay in the cache that processors share


@functools.lru_cache(maxsize=64)
def plain_headers(shape: GroupShape) -> PlainHeaders:
    """What headers of a group's plain pages look like."""
    sizes = (shape.num_layers, shape.page_size, shape.block_bytes, shape.item_bytes)
    return PlainHeaders(shape.name, shape.stamp, sizes)


class PlainRun:
    """Neighbouring pages of one group; `indices` are those of the caller's order."""

    def __init__(
        self, shape: GroupShape, indices: list[int], rows: Sequence[IndexRow], source: Source
    ) -> None:
        self.indices = indices
        self.shape = shape
        self.num_loaded = 0
        self._rows = rows
        self._extents, self._slabs = source
        self._plain = plain_headers(shape)

    def load(self, io: BlockIO, group: int, blocks: Sequence[int]) -> list[bool]:
        """See `StoredRun`."""
        count = len(self._rows)
        heads = np.empty((count, self._plain.header_bytes), dtype=np.uint8)
        try:
            extent = self._extents.lease(self._rows[0].extent)
        except OSError:
            return [False] * count
        try:
            landed = self._read(io, group, blocks, extent, heads)
        except OSError:
            return [False] * count
        finally:
            self._extents.release(extent)
        good = self._confirm(extent.container, heads, landed)
        self.num_loaded = sum(good)
        return good + [False] * (count - len(good))

    def _read(
        self, io: BlockIO, group: int, blocks: Sequence[int], extent: Extent, heads: Bytes
    ) -> Digests:
        """Digests of what went into the first blocks: those whose records are there."""
        offset, size = self._rows[0].offset, self._plain.record_bytes
        if not self._extents.has_own_reads:
            slab = self._slabs.take(size)
            run = FileRun(extent.fd, offset, self._plain.header_bytes, size)
            try:
                buffer = slab.memory[: max(READ_BYTES, size)]
                landed = io.write_from_file(group, blocks, run, buffer, heads)
            finally:
                self._slabs.discard(slab)
            if landed is not None:
                return landed
        return self._read_whole(io, group, blocks, extent, heads)

    def _read_whole(
        self, io: BlockIO, group: int, blocks: Sequence[int], extent: Extent, heads: Bytes
    ) -> Digests:
        """`_read`, by way of memory."""
        head, size, num = self._plain.header_bytes, self._plain.record_bytes, len(blocks)
        slab = self._slabs.take(num * size)
        rows = slab.even_rows(num, head, size, self.shape.block_bytes, self.shape.name)
        try:
            memory = slab.memory[: num * size]
            count = self._extents.read(extent, [memory], self._rows[0].offset) // size
            if not count:
                return np.empty((0, self.shape.num_layers), dtype=np.uint64)
            heads[:count] = memory.reshape(num, size)[:count, :head]
            return io.write(group, blocks[:count], rows[:count])
        finally:
            slab.give_back(num)

    def _confirm(self, container: bytes, heads: Bytes, landed: Digests) -> list[bool]:
        """Whether each page is the one that the index names, and went into its block as stored.

        `landed` [m, num_layers]: the digests of what the first m blocks got.
        """
        plain = self._plain
        stored = heads[: len(landed), plain.digests_at :].view("<u8")[:, : landed.shape[1]]
        good: list[bool] = (stored == landed).all(axis=1).tolist()
        start, end, view = 0, plain.header_bytes, heads.reshape(-1).data
        for i, at in enumerate(self._rows[: len(good)]):
            expected = plain.expected(
                at.header_sum, at.key, (at.content, at.dependency), (container, at.offset)
            )
            good[i] = good[i] and plain.is_header(view[start:end], expected)
            start += plain.header_bytes
            end += plain.header_bytes
        return good


def plain_runs(
    shape: GroupShape, rows: Sequence[IndexRow | None], keys: Sequence[bytes], source: Source
) -> Iterator[PlainRun]:
    """Plain pages of one group, run by run; pages that are not plain are in none of them.

    Whoever asks for page i believes that its row is `rows[i]` and its key `keys[i]`.
    """
    plain = plain_headers(shape)
    size = plain.record_bytes
    kind = (shape.name, 0, 0, size, plain.header_bytes)
    places = sorted(
        (at.extent, at.offset, i, at)
        for i, at in enumerate(rows)
        if at is not None
        and at.key == keys[i]
        and (at.group, at.codec, at.sealing, at.record_bytes, at.header_bytes) == kind
    )
    most = max(MAX_RUN_BYTES // size, 1)
    start = 0
    for end in range(1, len(places) + 1):
        extent, offset = places[end - 1][:2]
        is_full = end - start == most
        if is_full or end == len(places) or places[end][:2] != (extent, offset + size):
            indices = [place[2] for place in places[start:end]]
            yield PlainRun(shape, indices, [place[3] for place in places[start:end]], source)
            start = end
