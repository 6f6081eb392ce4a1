"""A digest engine over real slower tiers, in which I/O happens when a test says so.

The cache, the pools, the transfer engine and the stores are the real ones; device memory is the
digest model's, so that a block that holds anything else than it should changes the output at once.
Computing is believed to be slow: what is stored is worth loading.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from statewise.radix import CostModel, CostObserver, Namespace, Tier, TokenKey
from statewise.radix.cost import TierCost
from statewise.radix.lossy import lossy_schema
from statewise.radix.plan import Level, RecoveryPlan
from statewise.radix.planner import Budget
from statewise.radix.validation import GroupEnv, operators_of
from statewise.runtime.cache.promotion import Offer
from statewise.runtime.cache.tiering import Tiering
from statewise.runtime.messages import CacheOptions
from statewise.runtime.tiers.copies import Copier
from statewise.runtime.tiers.host import HostTier
from statewise.runtime.tiers.page import GroupShape, shapes_of
from statewise.runtime.tiers.store import TierStore
from statewise.runtime.tiers.tiers import Tiers
from statewise.runtime.tiers.transfer import EngineOptions, TransferEngine
from support.engine import Driver, make_schema
from support.sim_tiers import SimBlocks
from support.tier_pages import open_disk

PAGE = 4
SLOW_TOKENS_PER_S = 10.0
QUICK, SLOW = 1e12, 1e4  # bytes per second: loads that are waited for, and loads that are not
PROMPT = [1 + i % 90 for i in range(41)]  # ten pages, and the token that is always computed


class Belief(CostObserver):
    """A cost model that no experience changes."""

    def observe_prefill(self, start: int, end: int, num_layers: int, seconds: float) -> None:
        """Learn nothing."""

    def observe_load(self, tier: Tier, num_bytes: int, seconds: float) -> None:
        """Learn nothing."""

    def observe_queue(self, tier: Tier, seconds: float) -> None:
        """Learn nothing."""


class Scene(Driver):
    """A driver whose cache has a host tier (`host_pages` of each group), a disk, or both."""

    def __init__(
        self,
        shape: str = "FW",
        *,
        blocks: int = 64,
        host_pages: int = 64,
        disk: Path | None = None,
        bytes_per_s: float = SLOW,
        max_queued_bytes: int = 1 << 30,
        step_bytes: int = 1 << 20,
        lossy: bool = False,
        **args: object,
    ) -> None:
        """`lossy`: copies in tiers keep half of each word of history and windows."""
        schema = make_schema(shape, PAGE, 6)
        schema = lossy_schema(schema, "int8") if lossy else schema
        super().__init__(schema, (blocks,) * schema.num_groups, **args)
        if lossy:
            self.core.use_device([GroupEnv(operators=operators_of(s)) for s in schema.groups])
        stores: list[TierStore] = []
        self.device = SimBlocks(self.worker)
        shapes = self.shapes()
        if host_pages:
            stores.append(HostTier(shapes, [host_pages] * len(shapes)))
        if disk is not None:
            stores.append(open_disk(disk, shapes=shapes))
        options = EngineOptions(0, max_queued_bytes, step_bytes=step_bytes)
        self.io = TransferEngine(options, self.clock)
        landing = self.device.landing
        copier = Copier(shapes, self.device, self.clock, step_bytes=step_bytes, landing=landing)
        self.core.use_tiers(Tiers(stores, copier, self.io), lambda _schema: self.shapes())
        self.believe(bytes_per_s)

    def shapes(self) -> tuple[GroupShape, ...]:
        """What pages are called under the weights of now."""
        return shapes_of(self.schema, self.device.layer_bytes(), self.epoch, item_bytes=8)

    def believe(self, bytes_per_s: float, tokens_per_s: float = SLOW_TOKENS_PER_S) -> None:
        """Make the planner take computing and loading for this quick."""
        model = CostModel.uniform(self.schema.num_layers, tokens_per_s)
        self.core.use_cost(replace(model, tiers=dict.fromkeys(model.tiers, TierCost(bytes_per_s))))
        self.cache.cost = Belief(self.cache.cost.model)
        self.tiering.observe(self.cache.cost)

    @property
    def tiering(self) -> Tiering:
        """The cache's slower tiers."""
        assert self.cache.tiering is not None
        return self.cache.tiering

    def store(self, tier: Tier = Tier.HOST) -> TierStore:
        """One of the stores."""
        return self.tiering.tiers.stores[tier]

    # ---------------------------------------------------------------- copies

    def run_io(self) -> None:
        """Every step that is queued runs, and is delivered."""
        while self.io.run_one():
            pass
        self.tiering.deliver()

    def settle(self) -> None:
        """Everything that is worth a copy gets one: what an idle server does."""
        for _ in range(100):
            self.core.idle()
            if not self.tiering.is_busy:
                return
            self.run_io()
            self.clock.pass_time(1.1)
        raise AssertionError("copies never end")

    def run(self, max_steps: int = 2000) -> None:
        """Step until nothing is open, I/O between the steps."""
        for _ in range(max_steps):
            if not self.core.has_work():
                return
            self.step()
            self.run_io()
        raise AssertionError(f"still open: {self.core.stats()}")

    def keep(self, prompt: list[int] = PROMPT, rid: str = "first", **options: object) -> None:
        """Serve a prompt and copy its state out."""
        self.serve(rid, prompt, **options)
        self.settle()

    def forget_device(self) -> None:
        """Evict everything from the device and fill what was freed with poison."""
        self.cache.free_all()
        for group, pool in enumerate(self.cache.pools):
            self.worker.poison(group, pool.free_blocks().copy())

    # ---------------------------------------------------------------- looking

    def num_stored(self, group: str, tier: Tier = Tier.HOST) -> int:
        """Pages of a group in a store."""
        return self.store(tier).status().pages_by_group.get(group, 0)

    def offer(self, prompt: list[int] = PROMPT, salt: str = "") -> Offer | None:
        """What slower tiers offer a prompt now."""
        tokens = np.array(prompt, dtype=np.int32)
        return self.cache.lookup(CacheOptions(salt=salt), tokens, len(prompt) - 1).offer

    def offer_by(self, plan: RecoveryPlan, prompt: list[int] = PROMPT) -> Offer | None:
        """What they offer where the device's plan is this one."""
        key = TokenKey(np.array(prompt[:-1], dtype=np.int32))
        match = self.cache.tree.match(Namespace(), key)
        budget = Budget(len(prompt))
        return self.tiering.offer(match, (), plan, budget, self.cache.cost)[0]


NO_PLAN = RecoveryPlan(0, Level.RECOMPUTE, (), None, 0, total_s=1e9)
