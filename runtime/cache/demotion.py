"""Copies of cached state into slower tiers, made before the device needs the room.

    a request ends    its path is queued
    tick              the next pages: pinned, copied, unpinned when the copy ended
    few blocks free   with nothing queued, the paths that would be evicted first

First goes what is evicted first. What a resume needs beside history, windows and snapshots, is, and
without it history is worth nothing: it is copied of all paths, and then history path by path. Both
from the end backwards, since a path is evicted from its end.

Copies go to the fastest tier, which passes them on; what would push its own predecessors out of a
small host goes straight to the tier behind it (`host_room`).

What has a copy is evicted for nothing. What has none, because the write-behind was full or the
tier refused, is evicted all the same: nobody waits for a copy. Pins never hold more than a share of
a pool, and `yield_blocks` gives up what has not begun as soon as a running request is short: it
gets its turn again later.

This module does not evict, and runs on the control plane's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from statewise.radix import Cause, Match, Namespace, RadixTree, Tier, TokenKey
from statewise.radix.lasting import lasting_pages, lasting_snapshots
from statewise.radix.overlay import sources_first
from statewise.runtime.cache.blocks import Blocks
from statewise.runtime.cache.host_room import REFUSED_PAUSE_S, HostRoom
from statewise.runtime.cache.mirror import Mirror
from statewise.runtime.cache.stored import Names, StoredState
from statewise.runtime.cache.tier_events import TierEvents
from statewise.runtime.clock import Clock
from statewise.runtime.tiers.copies import DevicePage
from statewise.runtime.tiers.page import PageAddress
from statewise.runtime.tiers.store import NO_HANDLE, Outcome
from statewise.runtime.tiers.tiers import Tiers
from statewise.runtime.tiers.transfer import Transfer

Bool = NDArray[np.bool_]
Int32 = NDArray[np.int32]
PAGES_PER_TICK = 64  # looked at between two steps
PAGES_BESIDE_ROWS = 16  # while rows decode: they wait for it
QUEUED_BESIDE_ROWS = 16 << 20  # bytes, while rows decode: more of them would only wait, pinned
MAX_PATHS = 256  # queued; more push out the oldest
PIN_SHARE = 0.25  # of a pool, for copies that are queued or run
LOW_SHARE = 0.25  # free blocks below which the oldest paths are copied early
EARLY_NODES = 16  # looked at for that, each time
YIELD_PAUSE_S = 0.05  # after blocks were needed
LOOK_PAUSE_S = 0.1  # after a look ahead that found nothing to copy


@dataclass(eq=False)
class Path:
    """A path of the tree to copy.

    `resume_at`: a position at which the same prompt would resume; 0 for none. History has been
    copied from page `history_from` on, windows from `windows_from` on (None: none yet).
    """

    namespace: Namespace
    key: TokenKey
    resume_at: int
    history_from: int | None = None
    windows_from: int | None = None


class Demotion:
    """Copies one tree's state into the fastest slower tier, which passes it on."""

    def __init__(
        self,
        tree: RadixTree,
        blocks: Blocks,
        tiers: Tiers,
        stored: StoredState,
        mirror: Mirror,
        clock: Clock,
        told: TierEvents,
    ) -> None:
        self._told = told
        self._tree, self._tiers = tree, tiers
        self._pools, self._sums = blocks.pools, blocks.sums
        self._stored, self._mirror, self._clock = stored, mirror, clock
        self._schema = tree.schema
        self.room = HostRoom(tree.schema, tiers, clock)
        self._target = self.room.target
        self._perishable: deque[Path] = deque()  # of which windows and snapshots are left
        self._paths: deque[Path] = deque()
        self._open: dict[Transfer, None] = {}  # in order: what is called off asks again in it
        self._copying: set[bytes] = set()  # keys of pages in open copies
        self._num_pinned = [0] * len(blocks.pools)
        self._paused_until_s = 0.0
        self._look_at_s = 0.0
        self._is_full = False  # what comes next was refused; until a copy has ended

    @property
    def is_busy(self) -> bool:
        """Whether a tick may find something to do."""
        return self.has_more and self._clock.monotonic() >= self._paused_until_s

    @property
    def has_more(self) -> bool:
        """Whether something is queued, be it after a pause."""
        return bool(self._paths or self._perishable)

    def note(self, namespace: Namespace, key: TokenKey, resume_at: int = 0) -> None:
        """State along this path is worth a copy.

        Of window groups: what checkpoints keep, and what a resume at `resume_at` tokens needs.
        Whoever insists on exact state would not have it back from here: nothing of it is copied.
        """
        if namespace.exact:
            return
        path = Path(namespace, key, resume_at)
        for queue in (self._perishable, self._paths):
            queue.append(path)
            if len(queue) > MAX_PATHS:
                queue.popleft()

    def forget_paths(self) -> None:
        """Nothing that was queued is to be copied."""
        self._perishable.clear()
        self._paths.clear()

    def yield_blocks(self) -> bool:
        """A running request is short of blocks: begin no more copies; whether any was open."""
        if not self._open:
            return False
        for transfer in self._open:
            self._tiers.engine.cancel(transfer)
        self._paused_until_s = self._clock.monotonic() + YIELD_PAUSE_S
        return True

    # ---------------------------------------------------------------- ticking

    def tick(self) -> None:
        """Queue the next copies, a bounded number."""
        if self._clock.monotonic() < self._paused_until_s or (self._is_full and self._open):
            return
        decoding = self._tiers.engine.decoding
        if decoding and sum(copy.size_bytes for copy in self._open) >= QUEUED_BESIDE_ROWS:
            return
        if not self._paths and not self._perishable:
            self._look_ahead()
        self._is_full = False  # or it is found out again: others than these copies fill a queue
        left = PAGES_BESIDE_ROWS if decoding else PAGES_PER_TICK
        while left > 0 and not self._is_full and (self._perishable or self._paths):
            left -= self._copy_trailing(left) if self._perishable else self._copy_history(left)

    def _look_ahead(self) -> None:
        """Queue what would be evicted first, where room is getting short, now and then."""
        now = self._clock.monotonic()
        if now < self._look_at_s or all(
            pool.num_free >= LOW_SHARE * pool.num_blocks for pool in self._pools
        ):
            return
        for node in islice(self._tree.topology.recency, EARLY_NODES):
            for group in self._tree.topology.paged:
                segment = node.segments[group]
                blocks = segment.blocks[segment.resident(self._tree.stamps[group])]
                is_history = self._schema.groups[group].kind.is_history
                if is_history and not self._mirror.has(group, blocks).all():
                    namespace, key = self._tree.topology.path_of(node)
                    self.note(namespace, key)
                    if not namespace.exact:
                        return
        self._look_at_s = now + LOOK_PAUSE_S

    # ---------------------------------------------------------------- copying

    def _copy_trailing(self, most: int) -> int:
        """Copy snapshots, and about `most` window pages of the first path; how many there were."""
        path = self._perishable[0]
        match = self._tree.match(path.namespace, path.key)
        names = self._stored.names(match.namespace, match.key)
        end = match.logical_pages if path.windows_from is None else path.windows_from
        lasting = {
            group: lasting_pages(match, group, path.resume_at)[:end]
            for group, spec in enumerate(self._schema.groups)
            if spec.kind.is_window
        }
        none = np.empty(0, dtype=np.int64)
        places = np.sort(np.concatenate([none, *map(np.flatnonzero, lasting.values())]))
        start = int(places[-most]) if len(places) > most else 0
        pages = self._snapshots(match, names) if path.windows_from is None else []
        for group, kept in lasting.items():
            pages += self._pages(match, names, group, start, kept[start:])
        if self._copy(pages, partial(self._trailing_again, path)):
            path.windows_from = start
            if not start:
                self._perishable.popleft()
        return min(len(places), most)

    def _copy_history(self, most: int) -> int:
        """Copy at most `most` pages of the first path; how many were looked at."""
        path = self._paths[0]
        match = self._tree.match(path.namespace, path.key)
        names = self._stored.names(match.namespace, match.key)
        end = match.logical_pages
        if path.history_from is not None:
            end = min(end, path.history_from)
        start = max(end - most, 0)
        pages: list[DevicePage] = []
        for group in sources_first(self._schema):
            if self._schema.groups[group].kind.is_history:
                lasting = lasting_pages(match, group)[start:end]
                pages += self._pages(match, names, group, start, lasting)
        if self._copy(pages, partial(self._history_again, path, end)):
            path.history_from = start
            if not start:
                self._paths.popleft()
        return max(end - start, 1)

    def _trailing_again(self, path: Path) -> None:
        path.windows_from = None
        if path not in self._perishable:
            self._perishable.append(path)

    def _history_again(self, path: Path, end: int) -> None:
        path.history_from = max(path.history_from or 0, end)
        if path not in self._paths:
            self._paths.append(path)

    def _copy(self, pages: list[DevicePage], again: Callable[[], None]) -> bool:
        """Queue copies of what has none; False: not now. `again`: they were called off."""
        parts = self.room.split(self._without_known(self._target, pages))
        self._is_full = not all(self._submit(tier, part, again) for tier, part in parts)
        return not self._is_full

    def _pages(
        self, match: Match, names: Names, group: int, start: int, wanted: Bool
    ) -> list[DevicePage]:
        blocks = match.blocks(group)[start : start + len(wanted)]
        wanted[wanted] = ~self._mirror.has(group, blocks[wanted])
        return [
            self._page(group, int(blocks[i]), self._stored.page_address(names, group, start + i))
            for i in np.flatnonzero(wanted).tolist()
        ]

    def _page(self, group: int, block: int, address: PageAddress) -> DevicePage:
        """A block to copy; where checksums are kept, only as it was when it was published."""
        tables = self._sums.tables
        expected = None if tables is None else tables[group][block].copy()
        return DevicePage(group, block, address, self._schema.page_size, expected)

    def _snapshots(self, match: Match, names: Names) -> list[DevicePage]:
        size = self._schema.page_size
        out = []
        for position, held in lasting_snapshots(match):
            block = np.array([held.block], dtype=np.int32)
            if position and not self._mirror.has(held.group, block)[0]:
                address = self._stored.snapshot_address(names, held.group, position // size)
                out.append(self._page(held.group, held.block, address))
        return out

    def _without_known(self, tier: Tier, pages: list[DevicePage]) -> list[DevicePage]:
        """Leave out what is being copied and, marked, what the tier has already."""
        pages = [page for page in pages if page.address.key not in self._copying]
        if not pages:
            return pages
        handles = self._tiers.stores[tier].find([page.address.key for page in pages])
        for page, handle in zip(pages, handles, strict=True):
            if handle != NO_HANDLE:
                self._mirror.mark(page.group, [page.block], [page.address.key])
        known = zip(pages, handles, strict=True)
        return [page for page, handle in known if handle == NO_HANDLE]

    def _submit(self, tier: Tier, pages: list[DevicePage], again: Callable[[], None]) -> bool:
        if tier is not self._target:
            pages = self._without_known(tier, pages)
        if not pages:
            return True
        by_group: dict[int, list[int]] = {}
        generations = [int(self._pools[p.group].generations[p.block]) for p in pages]
        for page in pages:
            by_group.setdefault(page.group, []).append(page.block)
        if not self._may_pin(by_group):
            self._told.demotion_refused(tier, len(pages), "pins")
            return False
        keys = [page.address.key for page in pages]

        def ended(transfer: Transfer) -> None:
            self._open.pop(transfer, None)
            self._copying.difference_update(keys)
            self._is_full = False
            self._ended(transfer, pages, generations)
            self._pin(by_group, -1)
            if transfer.is_cancelled and transfer.num_ok < transfer.num_pages:
                again()

        self._pin(by_group, 1)
        transfer = self._tiers.demote(tier, pages, ended)
        if transfer is None:
            self._pin(by_group, -1)
            self._told.demotion_refused(tier, len(pages), "queue")
            return False
        self.room.enter(tier, pages)
        self._copying.update(keys)
        self._open[transfer] = None
        return True

    def _may_pin(self, by_group: dict[int, list[int]]) -> bool:
        """Whether copies would hold no more than their share of each pool; one may always run."""
        for group, blocks in by_group.items():
            room = max(int(PIN_SHARE * self._pools[group].num_blocks), len(blocks))
            if self._num_pinned[group] and self._num_pinned[group] + len(blocks) > room:
                return False
        return True

    def _pin(self, by_group: dict[int, list[int]], sign: int) -> None:
        for group, blocks in by_group.items():
            pool, array = self._pools[group], np.array(blocks, dtype=np.int32)
            pool.pin(array) if sign > 0 else pool.unpin(array)
            self._num_pinned[group] += sign * len(blocks)

    def _ended(self, transfer: Transfer, pages: list[DevicePage], generations: list[int]) -> None:
        """Mark what has a copy now; what was evicted meanwhile has one all the same."""
        arrived: list[tuple[int, str]] = []
        copied = [0] * len(self._pools)
        for page, generation, result in zip(pages, generations, transfer.results, strict=True):
            assert result is not None, "a transfer that is done has results"
            if result.outcome is not Outcome.OK:
                continue
            arrived.append((result.handle, page.address.group))
            copied[page.group] += 1
            if self._pools[page.group].generations[page.block] == generation:
                self._mirror.mark(page.group, [page.block], [page.address.key])
        self._tree.ledger.note_all(copied, Cause.MIRROR)
        if not arrived and not transfer.is_cancelled:
            self._pause_after_refusal(transfer.tier)
        self._tiers.pass_on(
            transfer.tier, arrived, lambda: self.room.enter(transfer.tier, pages, -1)
        )

    def _pause_after_refusal(self, tier: Tier) -> None:
        if tier is self._target:
            self._paused_until_s = self._clock.monotonic() + REFUSED_PAUSE_S
        else:
            self.room.refuse()
