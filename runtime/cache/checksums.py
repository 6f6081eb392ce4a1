"""Checksums of device blocks, taken when a block is handed to the tree.

    publication   the block's bytes are digested; the digests travel with the page (radix segments)
    use, patrol   the bytes are digested again and compared with what travels with the page

A block is never written after it was handed over, so any difference is damage. Digests come from
the worker, one for each layer, which is what lets recovery rebuild one layer and keep the rest.

This module does not compare and does not decide when: validation and the patrol do.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from statewise.radix.schema import CacheSchema

Int32 = NDArray[np.int32]
UInt64 = NDArray[np.uint64]
Bool = NDArray[np.bool_]
Digest = Callable[[int, Int32], UInt64]  # (group, blocks) -> [num_blocks, num_layers]


class BlockChecksums:
    """Digests by block, as they were at publication. Without a `digest` nothing is kept."""

    def __init__(
        self, schema: CacheSchema, num_blocks: tuple[int, ...], digest: Digest | None
    ) -> None:
        self.digest = digest
        self.tables: tuple[UInt64, ...] | None = None
        if digest is not None:
            self.tables = tuple(
                np.zeros((count, len(spec.layers)), dtype=np.uint64)
                for spec, count in zip(schema.groups, num_blocks, strict=True)
            )

    def record_pages(self, group: int, blocks: Int32) -> None:
        """Digest `blocks` (-1 for none) as they are now."""
        blocks = blocks[blocks >= 0]
        if self.tables is not None and self.digest is not None and len(blocks):
            self.tables[group][blocks] = self.digest(group, blocks)

    def record(self, group: int, block: int) -> None:
        """Digest one block as it is now."""
        self.record_pages(group, np.array([block], dtype=np.int32))

    def differ(self, group: int, blocks: Int32) -> Bool:
        """[n] whether a published block's bytes are no longer those that were handed over."""
        if self.tables is None or self.digest is None:
            return np.zeros(len(blocks), dtype=np.bool_)
        changed: Bool = (self.digest(group, blocks) != self.tables[group][blocks]).any(axis=1)
        return changed
