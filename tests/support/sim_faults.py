"""Faults that strike inside a step: at every seam between two operations of the control plane.

    lookup | begin | reserve | enter replay | reserve replay | execute

The wrapped methods are the real ones; before each of them the seed may evict, drop or flush, as
another thread or an operator could. Allocations may fail although blocks are free. Between steps
bits flip in cached blocks that no running request reads: whoever uses them next must notice, since
these worlds audit every use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from statewise.radix import Namespace, TokenKey
from statewise.radix.results import Freed
from statewise.radix.validation import Condition, Verdict
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
            self.evict_all(seam)
            return
        group = self.rng.randrange(self.sim.schema.num_groups)
        count = self.rng.choice([1, 2, 5, 50])
        self.counts["eviction"] += 1
        self.sim.journal.add("evict at", seam, group, count)
        self._free(self.cache.tree.evict(group, count))

    def evict_all(self, seam: str) -> None:
        """Evict everything that is not leased."""
        self.sim.journal.add("flush at", seam)
        self._free(self.cache.tree.flush())

    def drop(self, seam: str) -> None:
        """Drop some pages of one group, as a failed validation would."""
        prompt = self.rng.choice(self.sim.history)
        match = self.cache.tree.match(Namespace(), TokenKey(prompt))
        group = self.rng.randrange(self.sim.schema.num_groups)
        if self.sim.schema.groups[group].kind.is_snapshot:
            places = [s.position for s in match.snapshots if self.rng.random() < 0.5]
            verdicts = [Verdict(group, Condition.CHECKSUM, position=p) for p in places]
        else:
            places = [p for p in range(match.logical_pages) if self.rng.random() < 0.3]
            verdicts = [self._verdict(group, page) for page in places]
        if places:
            self.counts["drop"] += 1
            self.sim.journal.add("drop at", seam, [str(v) for v in verdicts])
            self.cache.validity.discard(match, verdicts, "simulation")

    def _verdict(self, group: int, page: int) -> Verdict:
        """One page failed as a whole, or one of its layers."""
        layers = len(self.sim.schema.groups[group].layers)
        if self.rng.random() < 0.5:
            return Verdict(group, Condition.CHECKSUM, (page,))
        return Verdict(group, Condition.CHECKSUM, (page,), layers=1 << self.rng.randrange(layers))

    def _free(self, freed: Freed) -> None:
        for pool, blocks in zip(self.cache.pools, freed.blocks, strict=True):
            pool.free(blocks)

    def between_steps(self) -> None:
        """Poison what nobody owns; flip bits of what nobody reads at this moment."""
        if "bit_flips" in self.operations and self.rng.random() < 0.1:
            self._flip()
        if "poison_free" in self.operations and self.rng.random() < 0.3:
            for group, pool in enumerate(self.cache.pools):
                free = np.concatenate((pool.free_blocks(), pool.limbo_blocks()))
                free = np.setdiff1d(free, pool.parked_blocks())  # a copy reads them
                self.sim.worker.poison(group, free)

    def _flip(self) -> None:
        """Flip one bit of a cached block that is not in use."""
        if any(request.replays for request in self.sim.core.scheduler.running):
            return  # what a replay will read has been audited already
        group = self.rng.randrange(self.sim.schema.num_groups)
        idle = sorted(set(self.cache.tree.blocks(group).tolist()) - self._in_use(group))
        if not idle:
            return
        words = self.sim.worker.blocks(group)
        where = (
            self.rng.randrange(words.shape[0]),
            self.rng.choice(idle),
            self.rng.randrange(words.shape[2]),
            self.rng.randrange(64),
        )
        self.counts["bit flip"] += 1
        self.sim.journal.add("flip", group, where)
        self.sim.worker.flip(group, *where)

    def _in_use(self, group: int) -> set[int]:
        """Blocks that a running request may read without looking again."""
        used: set[int] = set()
        for request in self.sim.core.scheduler.running:
            if request.sequence is not None:
                used.update(request.sequence.view(group).tolist())
        for _, node in self.cache.tree.topology.nodes():
            used.update(c.block for c in node.condemned if c.group == group)
            for checkpoint in node.checkpoints.values():
                if checkpoint.locks:
                    used.update(b.block for b in checkpoint.blocks if b.group == group)
        return used
