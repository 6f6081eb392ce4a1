"""The tree behind the prefix-tree benchmark's adapter interface: measured beside others.

    FullCache      one FULL group
    HybridCache    FULL + WINDOW

An adapter's row is a page table with the lease that it belongs to. Publishing moves the lease to
the new end, so "unlock the old node, lock the new one" needs no work of its own: an unlock after an
insert waits for the next call, and is dropped if that call locks the inserted end. As the prefix
cache does, windows are kept where a request ends, and at a branch point that its match named.
Pools are counters; slots are handed out once, as in the benchmark's other adapters. Every match
runs the validation chain over what it would reuse, generations of every block included.

This module measures nothing itself.
"""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

from statewise.radix import (
    CacheSchema,
    Freed,
    GroupEnv,
    GroupKind,
    Lease,
    Match,
    Namespace,
    RadixTree,
    StampTable,
    StateGroupSpec,
    TokenKey,
    ValidationEnv,
    Written,
    validate,
)
from statewise.radix.segment import BLOCK

Int32 = NDArray[np.int32]
EVERYONE = Namespace()
MAX_PAGES = 1 << 26  # page ids handed out in one run


class Handle:
    """Where a request stands: a match before it is locked, a lease afterwards."""

    __slots__ = ("branch", "key", "lease", "match", "moved_to", "position")

    def __init__(
        self, key: TokenKey, match: Match | None, lease: Lease | None, position: int
    ) -> None:
        self.key = key
        self.match = match
        self.lease = lease
        self.position = position
        self.moved_to: Handle | None = None  # where an insert took the lease
        self.branch = 0  # tokens: where windows are wanted; 0: nowhere


class Row:
    """A page table that the benchmark slices by tokens, at page boundaries."""

    __slots__ = ("handle", "pages", "size")

    def __init__(self, pages: Int32, size: int, handle: Handle | None) -> None:
        self.pages = pages
        self.size = size
        self.handle = handle

    def __len__(self) -> int:
        return len(self.pages) * self.size

    def numel(self) -> int:
        """Slots of the row."""
        return len(self)

    def _cut(self, tokens: slice) -> slice:
        start, stop, _ = tokens.indices(len(self))
        return slice(start // self.size, -(-stop // self.size))

    def __getitem__(self, tokens: slice) -> Int32:
        return self.pages[self._cut(tokens)]

    def __setitem__(self, tokens: slice, pages: Int32) -> None:
        self.pages[self._cut(tokens)] = pages


class FullCache:
    """One FULL group under the benchmark's interface."""

    has_window = False

    def __init__(self, page: int, cap_full: int, cap_swa: int, window: int) -> None:
        self.page = page
        groups = [StateGroupSpec("full", GroupKind.FULL, (0,), "bench", "v1", entry_bytes=1)]
        if self.has_window:
            spec = StateGroupSpec(
                "window", GroupKind.WINDOW, (0,), "bench", "v1", entry_bytes=1, window=window
            )
            groups.append(spec)
        schema = CacheSchema(page, 1, tuple(groups), "bench")
        stamp_table = StampTable()
        stamps = stamp_table.of_schema(schema)
        self.tree = RadixTree(schema, stamps)
        generations = tuple(np.zeros(MAX_PAGES, dtype=np.int32) for _ in groups)
        pools = tuple(GroupEnv(now) for now in generations)
        self.env = ValidationEnv(schema, stamps, stamp_table, pools)
        self.capacity = [cap_full // page, cap_swa // page][: len(groups)]
        self.free = list(self.capacity)  # pages
        self.next_page = 1
        self.written = Written(stamps, 1, generations)
        self.leaving: Handle | None = None  # unlocked after an insert, not yet released

    # ---------------------------------------------------------------- interface

    def key(self, tokens: array[int], n: int) -> TokenKey:
        """Key of the first n tokens."""
        return TokenKey(np.frombuffer(tokens, dtype=np.int64)[:n])

    def match(self, key: TokenKey) -> tuple[int, Handle, int | None]:
        """Look up: (reusable tokens, handle, branch position)."""
        self._settle()
        match = self.tree.match(EVERYONE, key)
        position = match.intersection()[0] * self.page
        assert not validate(match, self.env, position), "nothing here goes wrong"
        branch = match.branch_position if position < match.logical_tokens else None
        handle = Handle(key, match, None, position)
        handle.branch = branch or 0
        return position, handle, branch

    def indices(self, handle: Handle) -> Row:
        """Page table of what the handle covers."""
        if handle.lease is not None:
            pages = self.tree.pages(handle.lease, 0)[0]
        else:
            match = self._matched(handle)
            pages = match.pairs(0, 0, handle.position // self.page)[BLOCK]
        return Row(pages, self.page, handle)

    def cat(self, row: Row, more: Row) -> Row:
        """Append freshly allocated pages."""
        return Row(np.concatenate((row.pages, more.pages)), self.page, row.handle)

    def lock(self, handle: Handle) -> Handle:
        """Protect what the handle covers."""
        if handle is self.leaving:
            self.leaving = None
            return handle
        self._settle()
        if handle.lease is None:
            handle.lease = self.tree.lease(self._matched(handle), handle.position)
        return handle

    def unlock(self, handle: Handle) -> None:
        """Give protection back."""
        self._settle()
        if handle.moved_to is not None:
            self.leaving = handle.moved_to
        elif handle.lease is not None:
            self._take(self.tree.release(handle.lease))
            handle.lease = None
            handle.match = None

    def insert(
        self, key: TokenKey, n: int, row: Row, protected: int, swa_evicted: int
    ) -> tuple[Handle, int]:
        """Publish the row's whole pages: (new handle, tokens that the tree had already)."""
        self._settle()
        handle = row.handle
        held = handle.lease if handle is not None else None
        lease = held if held is not None else self._fresh_lease(handle, key, protected)
        first, num_pages = lease.num_published_pages, n // self.page
        tables = self._tables(row, num_pages, swa_evicted)
        done = self.tree.publish(lease, key, num_pages, tables, self.written, n)
        doubled = 0
        for twin in done.duplicates:
            self.free[twin.group] += len(twin.pages)
            if twin.group == 0:
                doubled = len(twin.pages)
                tables[0][twin.pages] = twin.tree_blocks
        self._take(done.freed)
        if self.has_window and (held is None or (handle is not None and handle.branch == n)):
            self.tree.keep(lease, n)
        moved = Handle(key, None, lease, num_pages * self.page)
        row.handle = moved
        if held is None:
            self._take(self.tree.release(lease))
            moved.lease = None
        else:
            assert handle is not None, "a held lease comes with its handle"
            handle.lease = None
            handle.moved_to = moved
        return moved, (first + doubled) * self.page

    def evict(self, full_tokens: int, swa_tokens: int) -> tuple[int, int]:
        """Free at least so many tokens of each pool."""
        self._settle()
        before = list(self.free)
        if full_tokens > 0:
            self._take(self.tree.evict(0, -(-full_tokens // self.page)))
        if swa_tokens > 0 and self.has_window:
            left = -(-swa_tokens // self.page) - (self.free[1] - before[1])
            if left > 0:
                self._take(self.tree.evict(1, left))
        gained = [(now - was) * self.page for now, was in zip(self.free, before, strict=True)]
        return gained[0], gained[1] if self.has_window else 0

    def alloc(self, tokens: int) -> Row:
        """Hand out fresh pages."""
        num = tokens // self.page
        first = self.next_page
        self.next_page = (first + num) % MAX_PAGES
        self.free = [n - num for n in self.free]
        return Row(np.arange(first, first + num, dtype=np.int32), self.page, None)

    def free_row(self, row: Row, lo: int, hi: int) -> None:
        """Take back a request's own slots."""
        if hi > lo:
            self.free = [n + len(row[lo:hi]) for n in self.free]

    def free_row_full_only(self, row: Row, lo: int, hi: int) -> None:
        """Take back slots of the FULL pool."""
        if hi > lo:
            self.free[0] += len(row[lo:hi])

    def free_swa(self, row: Row, lo: int, hi: int) -> None:
        """Take back slots of the WINDOW pool."""
        if hi > lo:
            self.free[1] += len(row[lo:hi])

    def avail(self) -> tuple[int, int]:
        """Free tokens of each pool."""
        swa = self.free[1] * self.page if self.has_window else 1 << 60
        return self.free[0] * self.page, swa

    def stats(self) -> dict[str, int]:
        """Evictable and protected tokens."""
        out = {}
        for g, prefix in enumerate(("", "swa_")[: len(self.free)]):
            evictable = self.tree.evictable(g) * self.page
            out[f"{prefix}evictable"] = evictable
            used = (self.capacity[g] - self.free[g]) * self.page
            out[f"{prefix}protected"] = used - evictable
        return out

    def check(self) -> None:
        """Recount the tree, and that every page is free or in the tree."""
        self._settle()
        self.tree.audit()
        for g, free in enumerate(self.free):
            assert free + len(self.tree.blocks(g)) == self.capacity[g], "pages are conserved"

    # ---------------------------------------------------------------- inside

    def _settle(self) -> None:
        """Release what was unlocked after an insert and not locked again."""
        if self.leaving is not None:
            handle, self.leaving = self.leaving, None
            if handle.lease is not None:
                if self.has_window:
                    self.tree.keep(handle.lease, handle.position)
                self._take(self.tree.release(handle.lease))
                handle.lease = None

    def _matched(self, handle: Handle) -> Match:
        if handle.match is None:
            handle.match = self.tree.match(EVERYONE, handle.key)
        return handle.match

    def _fresh_lease(self, handle: Handle | None, key: TokenKey, protected: int) -> Lease:
        """Lease for a row that nobody locked: from its match if there is one."""
        match = handle.match if handle is not None else None
        if match is None:
            match = self.tree.match(EVERYONE, key)
        position = min(match.intersection()[0], protected // self.page) * self.page
        return self.tree.lease(match, position)

    def _tables(self, row: Row, num_pages: int, swa_evicted: int) -> list[Int32]:
        if not self.has_window:
            return [row.pages]
        own = row.pages
        gone = min(swa_evicted // self.page, num_pages)
        if gone:
            own = own.copy()
            own[:gone] = -1
        return [row.pages, own]

    def _take(self, freed: Freed) -> None:
        for g, blocks in enumerate(freed.blocks):
            self.free[g] += len(blocks)


class HybridCache(FullCache):
    """FULL + WINDOW under the benchmark's interface."""

    has_window = True
