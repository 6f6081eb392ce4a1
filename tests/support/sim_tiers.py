"""Slower tiers of a simulated world: the real engine, stores in memory, I/O when the seed says so.

Fault model. Bits of stored pages flip; reads fail, or find nothing; writes find no room. A worker's
death takes the host tier with it, and every copy that had not ended; the disk's pages stay.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from statewise.radix.cost import CostModel, TierCost
from statewise.radix.schema import CacheSchema
from statewise.radix.segment import Tier
from statewise.runtime.engine.core import EngineCore
from statewise.runtime.tiers.buffers import Row
from statewise.runtime.tiers.copies import Copier
from statewise.runtime.tiers.host import HostTier
from statewise.runtime.tiers.page import GroupShape, PageAddress, PageRecord, shapes_of
from statewise.runtime.tiers.store import NO_HANDLE, Fetched, Outcome, TierStore
from statewise.runtime.tiers.tiers import Tiers
from statewise.runtime.tiers.transfer import EngineOptions, TransferEngine
from support.digest_worker import DigestWorker, digests_of
from support.sim_knobs import TierKnobs
from support.sim_world import SimClock

HALF = np.uint64(32)  # bits of a word that a lossy copy does not keep


class SimBlocks:
    """A `BlockIO` over a digest worker's memory; a lossy copy keeps the upper half of each word.

    What was read from such a copy changes every later token of the digest model.
    """

    def __init__(self, worker: DigestWorker) -> None:
        self._worker = worker
        self._is_lossy = [bool(spec.lossy) for spec in worker.schema.groups]

    def layer_bytes(self) -> list[int]:
        """Bytes of one layer of a block, as a tier keeps it."""
        pairs = zip(self._worker.slots, self._is_lossy, strict=True)
        return [(4 if is_lossy else 8) * slots for slots, is_lossy in pairs]

    def read(self, group: int, blocks: Sequence[int], rows: Sequence[Row]) -> NDArray[np.uint64]:
        words = self._worker.blocks(group)
        for block, row in zip(blocks, rows, strict=True):
            kept = words[:, block]
            if self._is_lossy[group]:
                kept = (kept >> HALF).astype(np.uint32)
            row.data[:] = np.frombuffer(kept.tobytes(), dtype=np.uint8)
        return self._worker.checksums(group, np.array(blocks, dtype=np.int32))

    def _words(self, group: int, row: Row) -> NDArray[np.uint64]:
        """[layers, slots] what a row reads as."""
        kind = np.uint32 if self._is_lossy[group] else np.uint64
        words = np.frombuffer(row.data.tobytes(), dtype=kind).astype(np.uint64)
        if self._is_lossy[group]:
            words = words << HALF
        return words.reshape(-1, self._worker.slots[group])

    def write(self, group: int, blocks: Sequence[int], rows: Sequence[Row]) -> NDArray[np.uint64]:
        words = self._worker.blocks(group)
        for block, row in zip(blocks, rows, strict=True):
            words[:, block] = self._words(group, row)
        return self._worker.checksums(group, np.array(blocks, dtype=np.int32))

    def write_from_file(self, *_args: object) -> None:
        """Takes rows from memory alone."""

    def landing(
        self, group: int, rows: Sequence[Row], digests: NDArray[np.uint64]
    ) -> NDArray[np.uint64]:
        if not self._is_lossy[group] or not rows:
            return digests
        return digests_of(np.stack([self._words(group, row) for row in rows], axis=1))


class SimStore(HostTier):
    """Pages in memory, as a tier of any speed, with faults."""

    def __init__(self, tier: Tier, shapes: Sequence[GroupShape], pages: int) -> None:
        super().__init__(shapes, [pages] * len(shapes))
        self.tier = tier
        self.rng: random.Random | None = None  # faults strike while there is one
        self.faults: Counter[str] = Counter()

    def _strikes(self, fault: str, chance: float) -> bool:
        if self.rng is None or self.rng.random() >= chance:
            return False
        self.faults[fault] += 1
        return True

    def stage(self, group: str, count: int) -> list[Row]:
        return super().stage(group, 0 if self._strikes("no room", 0.05) else count)

    def fetch(self, handles: Sequence[int]) -> list[Fetched]:
        if self._strikes("read error", 0.03):
            raise OSError("injected")
        fetched = super().fetch(handles)
        for i, one in enumerate(fetched):
            if one.row is not None and self._strikes("lost page", 0.03):
                super().release([one])
                fetched[i] = Fetched(one.handle, Outcome.MISSING)
            elif one.row is not None and self.rng and self._strikes("stored bit flip", 0.03):
                one.row.data[self.rng.randrange(one.row.size)] ^= 1 << self.rng.randrange(8)
        return fetched

    def rebind(self, shapes: Sequence[GroupShape]) -> None:
        if self.tier is Tier.HOST:
            super().rebind(shapes)

    def close(self) -> None:
        if self.tier is Tier.HOST:
            super().close()


class SimRemote(SimStore):
    """Such a store that must be asked what it has, and may not answer."""

    def __init__(self, shapes: Sequence[GroupShape], pages: int) -> None:
        super().__init__(Tier.REMOTE, shapes, pages)
        self.known: set[bytes] = set()

    def find(self, keys: Sequence[bytes]) -> list[int]:
        found = super().find(keys)
        return [h if k in self.known else NO_HANDLE for h, k in zip(found, keys, strict=True)]

    def commit(self, pages: Sequence[tuple[PageRecord, Row]]) -> list[int]:
        handles = super().commit(pages)
        self.known |= {r.address.key for (r, _), h in zip(pages, handles, strict=True) if h >= 0}
        return handles

    @property
    def can_ask(self) -> bool:
        return True

    def knows_absent(self, key: bytes) -> bool:
        return False

    def probe(self, addresses: Sequence[PageAddress]) -> list[Outcome]:
        if self._strikes("no answer", 0.1):
            return [Outcome.FAILED] * len(addresses)
        handles = super().find([address.key for address in addresses])
        there = [handle != NO_HANDLE for handle in handles]
        self.known |= {a.key for a, is_there in zip(addresses, there, strict=True) if is_there}
        return [Outcome.OK if is_there else Outcome.MISSING for is_there in there]

    def presume(self, addresses: Sequence[PageAddress]) -> None:
        self.known |= {address.key for address in addresses}

    def gave_no_answer(self, seconds: float) -> None:
        self.faults["gave up"] += 1


class SimTiers:
    """Makes the tiers of one world, for each engine it starts."""

    def __init__(
        self, schema: CacheSchema, knobs: TierKnobs, rng: random.Random, clock: SimClock
    ) -> None:
        self.schema, self.knobs, self.rng, self.clock = schema, knobs, rng, clock
        self.faults: Counter[str] = Counter()
        self.layer_bytes: list[int] = []
        self.disk: SimStore | None = None
        self.remote: SimRemote | None = None
        self.stores: list[SimStore] = []
        self.engine: TransferEngine | None = None

    def shapes(self, epoch: int) -> tuple[GroupShape, ...]:
        """Names of pages under the weights of an epoch."""
        return shapes_of(self.schema, self.layer_bytes, epoch, item_bytes=8)

    def open(self, worker: DigestWorker, epoch: int) -> Tiers:
        """Tiers over a new worker; the disk is the old one's."""
        blocks = SimBlocks(worker)
        self.layer_bytes = blocks.layer_bytes()
        shapes = self.shapes(epoch)
        stores: list[SimStore] = []
        if self.knobs.host_pages:
            stores.append(SimStore(Tier.HOST, shapes, self.knobs.host_pages))
        if self.knobs.disk_pages:
            if self.disk is None:
                self.disk = SimStore(Tier.DISK, shapes, self.knobs.disk_pages)
            stores.append(self.disk)
        if self.knobs.remote_pages:
            if self.remote is None:
                self.remote = SimRemote(shapes, self.knobs.remote_pages)
            self.remote.known.clear()  # to this process
            stores.append(self.remote)
        for store in stores:
            store.rng = self.rng if self.knobs.faults else None
            store.faults = self.faults
        self.stores = stores
        options = EngineOptions(0, self.knobs.max_queued_bytes, step_bytes=1 << 13)
        self.engine = TransferEngine(options, self.clock)
        step_bytes, landing = options.step_bytes, blocks.landing
        copier = Copier(shapes, blocks, self.clock, step_bytes=step_bytes, landing=landing)
        every: list[TierStore] = [*stores]
        return Tiers(every, copier, self.engine)

    def set_cost(self, core: EngineCore) -> None:
        """Make the planner believe in this world's speed."""
        model = core.cache.cost.model
        if self.knobs.tokens_per_s:
            rate = self.knobs.tokens_per_s
            model = CostModel.uniform(model.num_layers, rate, chunk=model.chunk)
        if self.knobs.batch_bytes and core.cache.tiering is not None:
            core.cache.tiering.meetings.batch_bytes = self.knobs.batch_bytes
            core.cache.tiering.meeting_share = 1.0
        cost = TierCost(self.knobs.bytes_per_s)
        core.cache.use_cost(replace(model, tiers=dict.fromkeys(model.tiers, cost)))

    def run_some(self, *, must: bool) -> int:
        """Some steps of I/O; how many. `must`: faults have ended, and copies do not stall."""
        assert self.engine is not None
        if must:
            for store in self.stores:
                store.rng = None
        count = 0
        for _ in range(self.rng.randint(int(must), max(self.knobs.steps_between, int(must)))):
            if not self.engine.run_one():
                break
            self.clock.pass_time(self.knobs.step_s)
            count += 1
        return count
