"""All slower tiers of one engine, as the prefix cache uses them.

    find        addresses -> where each page is, fastest first
    demote      device blocks -> a tier                 write-behind; None where it is refused
    load        a tier -> device blocks                 confirmed by digests
    prefetch    disk or remote -> host                  so that a later load is short
    probe       ask the remote store what it has
    poll        deliver what ended; keep the host's oldest pages copied on disk

An index page is found only where the content it was built over is: its group's entries would route
into something else. `pop_dropped` says which copies are gone and where the same page still is.

This module decides nothing about requests: the planner does, with the figures in `status`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from statewise.radix.key import Namespace
from statewise.radix.segment import Tier
from statewise.runtime.clock import Clock
from statewise.runtime.events import EventLog
from statewise.runtime.tiers.blocks import BlockIO
from statewise.runtime.tiers.body import Bodies, Keys, read_key_file
from statewise.runtime.tiers.buffers import Bytes
from statewise.runtime.tiers.copies import (
    Copier,
    DevicePage,
    Landing,
    LoadPage,
    as_read,
)
from statewise.runtime.tiers.disk import DiskOptions, DiskTier, least_budget
from statewise.runtime.tiers.host import HostTier, slots_within
from statewise.runtime.tiers.lanes import HANG_S, Lanes
from statewise.runtime.tiers.page import GroupShape, PageAddress, PrefixChain
from statewise.runtime.tiers.remote import RemoteTier, open_url
from statewise.runtime.tiers.store import (
    NO_HANDLE,
    AskedStore,
    Counters,
    Loss,
    Outcome,
    TierError,
    TierStatus,
    TierStore,
)
from statewise.runtime.tiers.transfer import (
    CANCELLED,
    EngineOptions,
    PageResult,
    Priority,
    Step,
    Transfer,
    TransferEngine,
)
from statewise.runtime.tiers.withdrawal import Withdrawals

SPILL_SHARE = 0.125  # of the host's slots: copied to disk before they are wanted; at least a step's
SPILL_PAGES = 256  # looked at each time, per group
PROBE_PAGES = 64  # addresses of one step
MAX_REASONS = 8  # of one transfer that an event names
OnDone = Callable[[Transfer], None]


@dataclass(frozen=True, slots=True)
class Location:
    """Where a page is."""

    tier: Tier
    handle: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """A copy that is gone, and where the same page still is."""

    tier: Tier
    handle: int
    key: bytes
    elsewhere: Location | None
    why: Loss


@dataclass(frozen=True)
class TierSettings:
    """Which tiers there are. Bytes, seconds; 0 and "" mean: none."""

    host_bytes: int = 0
    disk_directory: str = ""
    disk_bytes: int = 0
    disk_ttl_s: float = 0.0
    disk_codec: str = "none"
    remote_url: str = ""
    remote_codec: str = "none"
    key_file: str = ""
    engine: EngineOptions = field(default_factory=EngineOptions)


class Tiers:
    """Stores, fastest first, and the engine that copies between them."""

    def __init__(
        self,
        stores: Sequence[TierStore],
        copier: Copier,
        engine: TransferEngine | Lanes,
        secret: bytes = b"",
    ) -> None:
        self.stores = {store.tier: store for store in sorted(stores, key=lambda s: s.tier)}
        asked = self.stores.get(Tier.REMOTE)
        assert asked is None or isinstance(asked, AskedStore)
        self.remote: AskedStore | None = asked
        self.engine = engine
        self.counters = Counters()
        self.events = EventLog()
        self._copier = copier
        self._secret = secret
        self._set_shapes(copier.shapes)
        self.version = 0  # moves whenever `find` may have come to answer differently
        self.withdrawals = Withdrawals(self.stores, engine.submit, self.counters)
        self._spilling: set[tuple[Tier, bytes]] = set()  # on its way to a tier
        self._is_closed = False
        self._era = 0  # moves when copies that run are abandoned
        self._spilled_at = 0  # `HostTier.version` when the oldest pages were last looked at

    def _set_shapes(self, shapes: Sequence[GroupShape]) -> None:
        self.shapes = tuple(shapes)
        by_name = {shape.name: shape for shape in shapes}
        self._bases = [by_name.get(shape.depends_on or "") for shape in shapes]

    # ---------------------------------------------------------------- addresses

    def chain(self, namespace: Namespace) -> PrefixChain:
        """Addresses of a new sequence."""
        return PrefixChain(namespace, self.shapes[0].page_size, self._secret)

    def address(self, chain: PrefixChain, group: int, page: int) -> PageAddress:
        """Address of a whole page of a sequence that `chain` was extended with."""
        return chain.address(self.shapes[group], page, self._bases[group])

    def address_at(
        self, chain: PrefixChain, group: int, tokens: bytes, position: int
    ) -> PageAddress:
        """Address of what belongs to exactly `position`: a snapshot, or a partly filled page."""
        return chain.address_at(self.shapes[group], tokens, position, self._bases[group])

    # ---------------------------------------------------------------- finding

    def find(self, addresses: Sequence[PageAddress]) -> list[Location | None]:
        """Where each page is: the fastest tier that has it, None where none does."""
        found: list[Location | None] = [None] * len(addresses)
        gone = self.withdrawals
        open_ones = [i for i, address in enumerate(addresses) if address.key not in gone]
        for tier, store in self.stores.items():
            handles = store.find([addresses[i].key for i in open_ones])
            left = []
            for i, handle in zip(open_ones, handles, strict=True):
                if handle == NO_HANDLE or not self._is_bound(store, handle, addresses[i]):
                    left.append(i)
                else:
                    found[i] = Location(tier, handle)
            open_ones = left
        return found

    def _is_bound(self, store: TierStore, handle: int, address: PageAddress) -> bool:
        """Whether what an index page was built over is stored as it was then."""
        if not address.base:
            return True
        dependency = store.dependency(handle)
        if any(other.content(address.base) == dependency for other in self.stores.values()):
            return True
        self.counters.add("dependency_mismatch")
        return False

    def withdraw(self, addresses: Sequence[PageAddress]) -> None:
        """Destroy the copies of these pages in every tier, also those that are being made."""
        self.withdrawals.begin((a.key for a in addresses), self.engine.open_transfers())
        self.version += 1

    def touch(self, locations: Sequence[Location]) -> None:
        """These copies were of use."""
        for tier, store in self.stores.items():
            handles = [where.handle for where in locations if where.tier is tier]
            if handles:
                store.touch(handles)

    def free(self, locations: Sequence[Location]) -> None:
        """Forget these copies."""
        for where in locations:
            self.stores[where.tier].free([where.handle])

    def pop_dropped(self) -> list[Dropped]:
        """Copies that stores dropped by themselves since the last call."""
        dropped = []
        for tier, store in self.stores.items():
            for handle, key, why in store.pop_dropped():
                dropped.append(Dropped(tier, handle, key, self._elsewhere(key), why))
        return dropped

    def _elsewhere(self, key: bytes) -> Location | None:
        for tier, store in self.stores.items():
            (handle,) = store.find([key])
            if handle != NO_HANDLE:
                return Location(tier, handle)
        return None

    # ---------------------------------------------------------------- copies

    def demote(
        self, tier: Tier, pages: Sequence[DevicePage], on_done: OnDone | None = None
    ) -> Transfer | None:
        """Copy device blocks into a tier; None, and nothing happens, where write-behind is full.

        Blocks stay leased until `on_done`. `results[i].handle` is the page's in the tier. A page
        that routes into another comes after it.
        """
        store = self.stores[tier]
        steps = self._of_now(self._copier.demote(store, pages), store)
        return self._submit(Transfer("demote", tier, Priority.DEMOTE, steps, on_done))

    def load(
        self,
        tier: Tier,
        pages: Sequence[LoadPage],
        on_done: OnDone | None = None,
        priority: Priority = Priority.LOAD,
    ) -> Transfer:
        """Copy pages of a tier into device blocks, which nobody else uses until `on_done`."""
        steps = self._copier.load(self.stores[tier], pages)
        transfer = Transfer("load", tier, priority, steps, on_done)
        accepted = self._submit(transfer)
        assert accepted is not None, "loads are always accepted"
        return accepted

    def prefetch(
        self,
        tier: Tier,
        pages: Sequence[tuple[int, str]],
        on_done: OnDone | None = None,
    ) -> Transfer:
        """Copy pages, (handle, group name) each, from a tier to the host.

        `results[i].handle` is the page's in the host tier.
        """
        self.stores[tier].touch([handle for handle, _ in pages])
        host = self.stores[Tier.HOST]
        steps = self._of_now(self._copier.move(self.stores[tier], host, pages), host)
        transfer = Transfer("prefetch", tier, Priority.PREFETCH, steps, on_done)
        self.engine.submit(transfer)
        return transfer

    def probe(self, addresses: Sequence[PageAddress], on_done: OnDone | None = None) -> Transfer:
        """Ask the remote store for pages; `find` knows afterwards, results say what is there."""
        remote = self.remote
        assert remote is not None

        def step_of(first: int) -> Step:
            part = addresses[first : first + PROBE_PAGES]
            run = lambda: [PageResult(outcome) for outcome in remote.probe(part)]  # noqa: E731
            return Step(first, len(part), 0, run)

        steps = [step_of(first) for first in range(0, len(addresses), PROBE_PAGES)]
        transfer = Transfer("probe", Tier.REMOTE, Priority.LOAD, steps, on_done)
        self.engine.submit(transfer)
        return transfer

    def _of_now(self, steps: Sequence[Step], target: TierStore) -> list[Step]:
        """Steps that write into a store, and leave nothing there once they were abandoned."""
        era = self._era

        def bound(step: Step) -> Step:
            def run() -> Sequence[PageResult]:
                results = step.run()
                if self._era == era:
                    return results
                target.free([one.handle for one in results if one.outcome is Outcome.OK])
                return [CANCELLED] * step.count

            return replace(step, run=run)

        return [bound(step) for step in steps]

    def _submit(self, transfer: Transfer) -> Transfer | None:
        return transfer if self.engine.submit(transfer) else None

    # ---------------------------------------------------------------- running

    def poll(self) -> list[Transfer]:
        """Deliver what ended (`on_done` has run), and spill the host's oldest pages."""
        ended = self.engine.poll()
        self.version += bool(ended)
        if self.events.is_on:
            for transfer in ended:
                self.events.emit("transfer_ended", **_told(transfer))
        self._spill()
        return ended

    def _spill(self) -> None:
        """Have the host's oldest pages on disk before their slots are wanted."""
        host, disk = self.stores.get(Tier.HOST), self.stores.get(Tier.DISK)
        if not isinstance(host, HostTier) or disk is None or self._spilling:
            return
        if host.version == self._spilled_at:
            return
        self._spilled_at = host.version
        for shape in self.shapes:
            slots = host.capacity(shape.name)
            one_step = -(-self._copier.step_bytes // shape.row_bytes)
            ahead = min(max(int(slots * SPILL_SHARE), one_step), slots // 2)
            short = min(ahead - host.num_free(shape.name), SPILL_PAGES)
            if short > 0:
                self._spill_group(host, disk, shape.name, short)

    def _spill_group(self, host: HostTier, disk: TierStore, group: str, count: int) -> None:
        pages = [(handle, group) for handle in host.oldest(group, count)]
        self._copy_on(host, disk, pages)

    def pass_on(
        self,
        source: Tier,
        pages: Sequence[tuple[int, str]],
        on_done: Callable[[], None] = lambda: None,
    ) -> None:
        """Have pages, (handle, group name) each, that a tier has just got in all slower ones too.

        Where write-behind is full they are not copied now; the host's are when they grow old.
        `on_done` is called, maybe at once, when no copy is under way any more.
        """
        slower = [store for tier, store in self.stores.items() if tier > source and pages]
        left = len(slower) + 1

        def one_ended() -> None:
            nonlocal left
            left -= 1
            if not left:
                on_done()

        for store in slower:
            self._copy_on(self.stores[source], store, pages, one_ended)
        one_ended()

    def _copy_on(
        self,
        source: TierStore,
        target: TierStore,
        pages: Sequence[tuple[int, str]],
        on_done: Callable[[], None] = lambda: None,
    ) -> None:
        keys = [source.key_of(handle) for handle, _ in pages]
        stored = target.find(keys)
        wanted = [
            (page, (target.tier, key))
            for page, key, there in zip(pages, keys, stored, strict=True)
            if there == NO_HANDLE
            and key
            and (target.tier, key) not in self._spilling
            and key not in self.withdrawals
        ]
        if not wanted:
            on_done()
            return
        places = [place for _, place in wanted]

        def ended(_transfer: Transfer) -> None:
            self._spilling.difference_update(places)
            self.version += 1
            on_done()

        self._spilling.update(places)
        moves = self._copier.move(source, target, [page for page, _ in wanted])
        steps = self._of_now(moves, target)
        transfer = Transfer("spill", target.tier, Priority.DEMOTE, steps, ended)
        if not self.engine.submit(transfer):
            told = {"tier": target.tier.name.lower(), "num_pages": transfer.num_pages}
            self.events.emit("demotion_refused", **told, cause="queue")
            ended(transfer)

    # ---------------------------------------------------------------- all at once

    def rebind(self, shapes: Sequence[GroupShape]) -> None:
        """Other weights: pages get other names from now on; those of the old ones are not found.

        Sizes are the same. Copies are called off before: see `call_off`.
        """
        self.call_off()
        self._set_shapes(shapes)
        self._copier.rebind(shapes)
        for store in self.stores.values():
            store.rebind(shapes)

    def call_off(self) -> None:
        """Begin no more copies and wait for those that run, and for what follows from them.

        A remote store that does not answer is waited for no longer than `HANG_S`: what comes of it
        later is handed to nobody, and stays in no tier.
        """
        is_open = True
        while is_open:
            for transfer in self.engine.open_transfers():
                self.engine.cancel(transfer)
            self.engine.settle()
            self.poll()  # what has arrived in one tier is passed on to the next
            is_open = self.num_awaited > 0
        self._era += 1

    @property
    def num_awaited(self) -> int:
        """Copies accepted and not done, without those that are abandoned."""
        return self.engine.num_awaited

    def clear(self) -> None:
        """Forget every page; objects of a remote store stay, since others may use them."""
        for store in self.stores.values():
            store.free(store.all_handles())
        self.version += 1

    def status(self) -> list[TierStatus]:
        """Figures of every tier, fastest first."""
        return [store.status() for store in self.stores.values()]

    def close(self, drain_s: float = 0.0, *, deliver: bool = True, hang_s: float = HANG_S) -> None:
        """Stop. Writes that are queued may take `drain_s` seconds; then they are cancelled.

        What a remote store has been asked is waited for `hang_s` more at most, and not at all
        where it did not come within `drain_s`. `deliver` False: nobody is told what ended.
        Idempotent.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if drain_s and not self.engine.drain(drain_s):
            hang_s = 0.0
        self.engine.close(hang_s)
        if deliver:
            self.engine.poll()
        self.withdrawals.finish(hang_s)
        for store in self.stores.values():
            store.close()


def _told(transfer: Transfer) -> dict[str, object]:
    """Fields of the event that a transfer has ended."""
    results = [result for result in transfer.results if result is not None]
    reasons = dict.fromkeys(result.reason for result in results if result.reason)
    outcomes = Counter(result.outcome.value for result in results)
    return {
        "kind": transfer.kind,
        "tier": transfer.tier.name.lower(),
        "num_pages": transfer.num_pages,
        "num_bytes": transfer.size_bytes,
        "outcomes": dict(sorted(outcomes.items())),
        "reasons": list(reasons)[:MAX_REASONS],
        "seconds": transfer.seconds,
    }


def open_tiers(  # noqa: PLR0913 (parts, each named)
    shapes: Sequence[GroupShape],
    blocks: BlockIO,
    settings: TierSettings,
    clock: Clock,
    *,
    weights: Sequence[float] | None = None,
    pin: Callable[[Bytes], None] | None = None,
    notify: Callable[[], None] | None = None,
    landing: Landing = as_read,
) -> Tiers:
    """Open the tiers that `settings` name. Raises TierError, saying what to change.

    `weights`: how the host's bytes are split over the groups (default: evenly by bytes a page).
    """
    keys = read_key_file(Path(settings.key_file)) if settings.key_file else None
    secret = keys.secret if keys is not None else b""
    stores: list[TierStore] = []
    try:
        if settings.host_bytes:
            split = weights or [float(shape.row_bytes) for shape in shapes]
            stores.append(_open_host(shapes, split, settings.host_bytes, pin))
        if settings.disk_directory:
            stores.append(_open_disk(shapes, settings, clock, keys))
        if settings.remote_url:
            bodies = Bodies(settings.remote_codec, keys)
            stores.append(RemoteTier(open_url(settings.remote_url), shapes, clock, bodies))
    except BaseException:
        for store in stores:
            store.close()
        raise
    copier = Copier(shapes, blocks, clock, secret, settings.engine.step_bytes, landing)
    engine = TransferEngine(settings.engine, clock, notify)
    if not settings.remote_url:
        return Tiers(stores, copier, engine, secret)
    options = settings.engine  # a network is waited for more than it costs: no bound beside rows
    options = replace(options, loads_beside_rows=max(options.num_threads, 1))
    beside = TransferEngine(options, clock, notify)
    return Tiers(stores, copier, Lanes(engine, beside, clock), secret)


def _open_host(
    shapes: Sequence[GroupShape],
    split: Sequence[float],
    size_bytes: int,
    pin: Callable[[Bytes], None] | None,
) -> HostTier:
    slots = slots_within(shapes, split, size_bytes)
    try:
        return HostTier(shapes, slots, pin)
    except (OSError, MemoryError) as error:
        raise TierError(
            f"host cache: no {size_bytes:,} bytes of memory ({error}); lower --host-cache-gb"
        ) from error


def _open_disk(
    shapes: Sequence[GroupShape], settings: TierSettings, clock: Clock, keys: Keys | None
) -> DiskTier:
    least = least_budget(shapes)
    if settings.disk_bytes < least:
        raise TierError(
            f"disk cache: {settings.disk_bytes:,} bytes do not hold a few pages of this model's "
            f"state; set --disk-cache-gb to at least {math.ceil(least / 1e5) / 1e4:g}"
        )
    options = DiskOptions(settings.disk_bytes, ttl_s=settings.disk_ttl_s, codec=settings.disk_codec)
    bodies = Bodies(settings.disk_codec, keys)
    return DiskTier(Path(settings.disk_directory).expanduser(), shapes, options, clock, bodies)


def all_ok(transfer: Transfer) -> bool:
    """Whether every page of a transfer arrived."""
    return all(r is not None and r.outcome is Outcome.OK for r in transfer.results)
