"""Plain pages on their way into blocks: read in runs, copied, and only then verified.

Whatever a thread does for each page holds the interpreter's lock, and after every read it comes out
of cold caches. So a run is copied as soon as it is read, into blocks that nobody reads before their
pages were confirmed, and what is compared is compared afterwards, as bytes. A page is confirmed if
its header is the one that the index names (`PlainHeaders`), and the digests in it are those of what
went into the block.

A page that is not confirmed, for whatever reason, takes the long way (`DiskTier.fetch`): read again
by itself, looked at field by field, counted and dropped if it is damaged. So do pages of a cache
with a secret, which are sealed. This module drops nothing and never says what is wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from statewise.runtime.tiers.buffers import Row, Slab, Slabs
from statewise.runtime.tiers.disk_index import IndexRow
from statewise.runtime.tiers.disk_read import Place, runs_of
from statewise.runtime.tiers.extents import Extents
from statewise.runtime.tiers.page import GroupShape
from statewise.runtime.tiers.record import PlainHeaders

Digests = NDArray[np.uint64]


@functools.lru_cache(maxsize=64)
def plain_headers(shape: GroupShape) -> PlainHeaders:
    """What headers of a group's plain pages look like."""
    sizes = (shape.num_layers, shape.page_size, shape.block_bytes, shape.item_bytes)
    return PlainHeaders(shape.name, shape.stamp, sizes)


class PlainRun:
    """Neighbouring pages of one group in one buffer; `indices` are those of the caller's order.

    `rows` are their payloads, not verified. They are the caller's until `release`.
    """

    def __init__(self, places: Sequence[Place], container: bytes, slab: Slab) -> None:
        shape = places[0].shape
        plain = plain_headers(shape)
        self.indices = [place.index for place in places]
        self.num_confirmed = 0
        self._slab = slab
        self._plain = plain
        self._num_layers = shape.num_layers
        self._expected = [
            plain.expected(
                at.header_sum, at.key, (at.content, at.dependency), (container, at.offset)
            )
            for at in (place.at for place in places)
        ]
        head, size = plain.header_bytes, plain.record_bytes
        payload = (shape.block_bytes, shape.name)
        self.rows: list[Row] = slab.even_rows(len(places), head, size, *payload)

    def confirm(self, landed: Digests) -> list[bool]:
        """Whether each page is what the index names, and went into its block as it was stored.

        `landed` [n, num_layers]: the digests of what the rows were copied into blocks as.
        """
        plain, memory = self._plain, self._slab.memory
        shape = (len(self.rows), self._num_layers)
        strides = (plain.record_bytes, 8)
        stored: Digests = np.ndarray(shape, "<u8", memory, plain.digests_at, strides)
        good: list[bool] = (stored == landed).all(axis=1).tolist()
        start, end, view = 0, plain.header_bytes, memory.data
        for i, expected in enumerate(self._expected):
            good[i] = good[i] and plain.is_header(view[start:end], expected)
            start += plain.record_bytes
            end += plain.record_bytes
        self.num_confirmed = sum(good)
        return good

    def release(self) -> None:
        """The rows are no longer read."""
        self._slab.give_back(len(self.rows))


def plain_runs(extents: Extents, slabs: Slabs, places: Sequence[Place]) -> Iterator[PlainRun]:
    """Read plain pages of one group, run by run; each is released by the caller.

    Pages that are not plain, or could not be read, are in none of them. Raises nothing.
    """
    if not places:
        return
    plain = plain_headers(places[0].shape)
    sizes = (plain.record_bytes, plain.header_bytes)
    for neighbours in runs_of([place for place in places if _is_plain(place.at, sizes)]):
        run = _read(extents, slabs, neighbours)
        if run is not None:
            yield run


def _is_plain(at: IndexRow, sizes: tuple[int, int]) -> bool:
    """`sizes`: of record and header."""
    return not at.codec and not at.sealing and (at.record_bytes, at.header_bytes) == sizes


def _read(extents: Extents, slabs: Slabs, places: Sequence[Place]) -> PlainRun | None:
    """A run, read as a whole; None where it could not be."""
    at = places[0].at
    size = len(places) * at.record_bytes
    try:
        extent = extents.lease(at.extent)
    except OSError:
        return None
    slab = slabs.take(size)
    run = PlainRun(places, extent.container, slab)
    try:
        is_whole = extents.read(extent, [slab.memory[:size]], at.offset) >= size
    except OSError:
        is_whole = False
    finally:
        extents.release(extent)
    if not is_whole:
        run.release()
        return None
    return run
