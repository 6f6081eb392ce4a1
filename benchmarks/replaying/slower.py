"""Slower tiers of a replay: the real engine, host store and policies, pages without bytes.

    host    slots for a share of the endless cache's bytes, least recently used first out
    disk    the same; large enough for everything, where the share is 1

Names, records, copies out and back, and what is found by name are what serves. A page's memory is a
single page that all of them share, so what a copy would move is counted and not moved; how long it
would take is what the planner is told. Copies have ended before the next request comes.

This module does not serve requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from statewise.radix import CacheSchema, Tier
from statewise.runtime.cache.prefix_cache import PrefixCache
from statewise.runtime.tiers.buffers import Bytes, Row
from statewise.runtime.tiers.copies import Copier
from statewise.runtime.tiers.host import HostTier
from statewise.runtime.tiers.page import GroupShape, shapes_of
from statewise.runtime.tiers.store import TierStore
from statewise.runtime.tiers.tiers import Tiers
from statewise.runtime.tiers.transfer import EngineOptions, TransferEngine


@dataclass(frozen=True, slots=True)
class SlowTier:
    """One tier: blocks per group, in the schema's order, and what copying from it costs."""

    num_blocks: tuple[int, ...]
    bytes_per_s: float


class StillClock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        """See `Clock`."""
        return self.now_s

    def wall(self) -> float:
        """See `Clock`."""
        return self.now_s


class _NoBytes:
    """A `BlockIO` that moves nothing: every page has the same digests."""

    def __init__(self, schema: CacheSchema) -> None:
        self._layers = [len(spec.layers) for spec in schema.groups]

    def _digests(self, group: int, count: int) -> NDArray[np.uint64]:
        same = np.zeros(self._layers[group], dtype=np.uint64)
        return np.broadcast_to(same, (count, self._layers[group]))

    def read(self, group: int, blocks: Sequence[int], rows: Sequence[Row]) -> NDArray[np.uint64]:
        """See `BlockIO`."""
        return self._digests(group, len(rows))

    def write(self, group: int, blocks: Sequence[int], rows: Sequence[Row]) -> NDArray[np.uint64]:
        """See `BlockIO`."""
        return self._digests(group, len(blocks))

    def write_from_file(self, *_args: object) -> None:
        """See `BlockIO`: there are no files."""


def _shared_memory(size: int) -> Bytes:
    """`size` bytes that are one and the same byte."""
    return np.lib.stride_tricks.as_strided(np.zeros(1, dtype=np.uint8), (size,), (0,))


class CountedTier(HostTier):
    """A `HostTier` of any speed whose pages take no room."""

    def __init__(self, tier: Tier, shapes: Sequence[GroupShape], num_blocks: Sequence[int]) -> None:
        super().__init__(shapes, num_blocks, memory=_shared_memory)
        self.tier = tier


class SlowerTiers:
    """The slower tiers of one replayed cache."""

    def __init__(self, cache: PrefixCache, slow: Mapping[Tier, SlowTier]) -> None:
        schema = cache.schema
        shapes = shapes_of(schema, [1] * schema.num_groups)
        stores: list[TierStore] = [
            CountedTier(tier, shapes, one.num_blocks) for tier, one in slow.items()
        ]
        self._clock = StillClock()
        self._engine = TransferEngine(EngineOptions(num_threads=0), self._clock)
        copier = Copier(shapes, _NoBytes(schema), self._clock)
        cache.use_tiers(Tiers(stores, copier, self._engine), self._clock)
        assert cache.tiering is not None
        self.tiering = cache.tiering

    def settle(self) -> None:
        """Let every copy that is due begin and end."""
        self._clock.now_s += 1.0
        while True:
            self._engine.drain()
            self.tiering.poll()
            if not self.tiering.is_busy:
                return
