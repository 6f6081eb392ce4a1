"""Faults that strike inside a step: at every seam between two operations of the control plane.

    lookup | begin | reserve | enter replay | reserve replay | execute

The wrapped methods are the real ones; before each of them the seed may evict, drop or flush, as
another thread or an operator could. Allocations may fail although blocks are free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from statewise.radix import Namespace, TokenKey
from statewise.radix.results import Freed
from statewise.runtime.errors import OutOfBlocksError
from statewise.runtime.memory.block_pool import BlockPool

if TYPE_CHECKING:
    from support.simulation import Simulation

SEAMS = ("begin", "reserve", "enter_replay", "reserve_replay", "verify_leases")


class Faults:
    """Attaches to one engine; draws from the simulation's seed."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.rng = sim.rng
        self.cache = sim.core.cache
        self.operations = sim.knobs.operations
        self.counts: Counter[str] = Counter()
        self.active = True
        for name in SEAMS:
            self._wrap(name)
        if "failing_allocations" in self.operations:
            for pool in self.cache.pools:
                self._wrap_allocate(pool)

    def calm(self) -> None:
        """No more faults: everything open must end now."""
        self.active = False

    def _wrap(self, name: str) -> None:
        real: Callable[..., Any] = getattr(self.cache, name)

        def at_seam(*args: Any, **kwargs: Any) -> Any:
            if self.active:
                self._strike(name)
            return real(*args, **kwargs)

        setattr(self.cache, name, at_seam)

    def _wrap_allocate(self, pool: BlockPool) -> None:
        real = pool.allocate

        def allocate(count: int) -> Any:
            if self.active and count and self.rng.random() < 0.02:
                self.counts["allocation"] += 1
                self.sim.journal.add("allocation fails", pool.group, count)
                raise OutOfBlocksError(pool.group, count, pool.num_free)
            return real(count)

        pool.allocate = allocate  # type: ignore[method-assign]

    # ---------------------------------------------------------------- what strikes

    def _strike(self, seam: str) -> None:
        if "evict_at_seams" in self.operations and self.rng.random() < 0.05:
            self.evict(seam)
        if "drop_at_seams" in self.operations and self.rng.random() < 0.03:
            self.drop(seam)

    def evict(self, seam: str) -> None:
        """Evict a few blocks of one group, or everything that is not leased."""
        if self.rng.random() < 0.1:
            self.sim.journal.add("flush at", seam)
            self._free(self.cache.tree.flush())
            return
        group = self.rng.randrange(self.sim.schema.num_groups)
        count = self.rng.choice([1, 2, 5, 50])
        self.counts["eviction"] += 1
        self.sim.journal.add("evict at", seam, group, count)
        self._free(self.cache.tree.evict(group, count))

    def drop(self, seam: str) -> None:
        """Drop some pages of one group, as a failed validation would."""
        prompt = self.rng.choice(self.sim.history)
        match = self.cache.tree.match(Namespace(), TokenKey(prompt))
        group = self.rng.randrange(self.sim.schema.num_groups)
        if self.sim.schema.groups[group].kind.is_snapshot:
            places = [s.position for s in match.snapshots if self.rng.random() < 0.5]
        else:
            places = [p for p in range(match.logical_pages) if self.rng.random() < 0.3]
        if places:
            self.counts["drop"] += 1
            self.sim.journal.add("drop at", seam, group, places)
            self._free(self.cache.tree.drop(match, group, places))

    def _free(self, freed: Freed) -> None:
        for pool, blocks in zip(self.cache.pools, freed.blocks, strict=True):
            pool.free(blocks)

    def between_steps(self) -> None:
        """Poison what nobody owns."""
        if "poison_free" in self.operations and self.rng.random() < 0.3:
            for group, pool in enumerate(self.cache.pools):
                free = np.concatenate((pool.free_blocks(), pool.limbo_blocks()))
                self.sim.worker.poison(group, free)
