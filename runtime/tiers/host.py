"""The host tier: pages in slots of large buffers, a budget for each state group.

    free --stage--> staged --commit--> kept --free / evicted--> free
                    staged --discard--> free

A slot that is being read is leased: if its page is freed or evicted meanwhile, the slot becomes
free when the last reader is done, so that no copy reads another page's bytes. A group's budget
never takes room from another group. Buffers are on huge pages and page-locked where the data plane
has a device to copy to (`pin`).

Full groups evict their least recently used pages. This module does not decide what is demoted, and
does not verify payloads: they are checked where they land.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from statewise.radix.segment import Tier
from statewise.runtime.tiers.buffers import Bytes, Row, allocate
from statewise.runtime.tiers.page import GroupShape, PageRecord
from statewise.runtime.tiers.store import (
    NO_HANDLE,
    Counters,
    Fetched,
    HandleSource,
    Loss,
    Outcome,
    TierError,
    TierStatus,
)


@dataclass(slots=True, eq=False)
class _Kept:
    """A page in a slot."""

    handle: int
    record: PageRecord
    group: _GroupSlots
    slot: int


@dataclass(slots=True, eq=False)
class _GroupSlots:
    """One group's buffer and what is in it."""

    shape: GroupShape
    rows: Bytes  # [num_slots, row_bytes]
    free: list[int]
    order: OrderedDict[int, _Kept] = field(default_factory=OrderedDict)  # handle -> page, LRU
    readers: dict[int, int] = field(default_factory=dict)  # slot -> leases
    parting: set[int] = field(default_factory=set)  # leased slots whose page is gone

    @property
    def num_slots(self) -> int:
        return len(self.rows)

    def unread(self, count: int) -> list[_Kept]:
        """The least recently used pages that nobody reads, at most `count`; looks at no more."""
        if count <= 0:
            return []
        unread = (kept for kept in self.order.values() if kept.slot not in self.readers)
        return list(islice(unread, count))

    def row(self, owner: object, slot: int) -> Row:
        return Row(owner, slot, self.rows[slot], self.shape.block_bytes, self.shape.name)


def slots_within(shapes: Sequence[GroupShape], weights: Sequence[float], budget: int) -> list[int]:
    """Slots per group: `budget` bytes split in proportion to `weights`; TierError if too small."""
    total = sum(weights)
    slots = [
        int(budget * weight / total) // shape.row_bytes
        for shape, weight in zip(shapes, weights, strict=True)
    ]
    for shape, count in zip(shapes, slots, strict=True):
        if count < 1:
            raise TierError(
                f"host cache: {budget} bytes leave group {shape.name!r} without a single page of "
                f"{shape.row_bytes} bytes; raise --host-cache-gb"
            )
    return slots


class HostTier:
    """Pages in host memory; a `TierStore`. `num_slots[i]` pages of `shapes[i]`."""

    tier = Tier.HOST

    def __init__(
        self,
        shapes: Sequence[GroupShape],
        num_slots: Sequence[int],
        pin: Callable[[Bytes], None] | None = None,
        memory: Callable[[int], Bytes] = allocate,
    ) -> None:
        """`memory` gives a group's buffer of so many bytes."""
        self._groups: dict[str, _GroupSlots] = {}
        for shape, count in zip(shapes, num_slots, strict=True):
            buffer = memory(count * shape.row_bytes)
            if pin is not None:
                pin(buffer)
            rows = buffer.reshape(count, shape.row_bytes)
            self._groups[shape.name] = _GroupSlots(shape, rows, list(range(count - 1, -1, -1)))
        self._lock = threading.Lock()
        self._by_handle: dict[int, _Kept] = {}
        self._by_key: dict[bytes, _Kept] = {}
        self._handles = HandleSource()
        self._dropped: list[tuple[int, bytes, Loss]] = []
        self._counters = Counters()
        self.version = 0  # changes whenever a page was added

    # ---------------------------------------------------------------- control plane

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """See `TierStore`."""
        with self._lock:
            found = (self._by_key.get(key) for key in keys)
            return [NO_HANDLE if kept is None else kept.handle for kept in found]

    def content(self, key: bytes) -> int:
        """See `TierStore`."""
        with self._lock:
            kept = self._by_key.get(key)
            return 0 if kept is None else kept.record.content

    def dependency(self, handle: int) -> int:
        """See `TierStore`."""
        with self._lock:
            kept = self._by_handle.get(handle)
            return 0 if kept is None else kept.record.dependency

    def key_of(self, handle: int) -> bytes:
        """See `TierStore`."""
        with self._lock:
            kept = self._by_handle.get(handle)
            return b"" if kept is None else kept.record.address.key

    def touch(self, handles: Sequence[int]) -> None:
        """See `TierStore`."""
        with self._lock:
            for handle in handles:
                kept = self._by_handle.get(handle)
                if kept is not None:
                    kept.group.order.move_to_end(handle)

    def oldest(self, group: str, count: int) -> list[int]:
        """Handles of the least recently used pages of a group, oldest first."""
        with self._lock:
            order = self._groups[group].order
            return [handle for handle, _ in zip(order, range(count), strict=False)]

    def num_free(self, group: str) -> int:
        """Slots of a group that hold nothing."""
        with self._lock:
            return len(self._groups[group].free)

    def capacity(self, group: str) -> int:
        """Slots of a group."""
        return self._groups[group].num_slots

    def free(self, handles: Sequence[int]) -> None:
        """See `TierStore`."""
        with self._lock:
            for handle in handles:
                kept = self._by_handle.get(handle)
                if kept is not None:
                    self._remove(kept)

    def withdraw(self, keys: Sequence[bytes]) -> None:
        """See `TierStore`."""
        self.free([handle for handle in self.find(keys) if handle != NO_HANDLE])

    def pop_dropped(self) -> list[tuple[int, bytes, Loss]]:
        """See `TierStore`."""
        with self._lock:
            dropped, self._dropped = self._dropped, []
            return dropped

    def all_handles(self) -> list[int]:
        """See `TierStore`."""
        with self._lock:
            return list(self._by_handle)

    def rebind(self, shapes: Sequence[GroupShape]) -> None:
        """See `TierStore`. Pages of the old ones are forgotten: nobody can ask for them."""
        self.free(self.all_handles())
        with self._lock:
            for shape in shapes:
                self._groups[shape.name].shape = shape

    def status(self) -> TierStatus:
        """See `TierStore`."""
        with self._lock:
            pages = {name: len(slots.order) for name, slots in self._groups.items()}
            used = sum(n * self._groups[name].shape.row_bytes for name, n in pages.items())
            budget = sum(slots.rows.size for slots in self._groups.values())
            counters = self._counters.as_dict()
        total = sum(pages.values())
        return TierStatus(Tier.HOST, "online", total, used, budget, pages, counters)

    # ---------------------------------------------------------------- I/O threads

    def stage(self, group: str, count: int) -> list[Row]:
        """See `TierStore`. Evicts the group's oldest pages where it must."""
        with self._lock:
            slots = self._groups[group]
            for kept in slots.unread(count - len(slots.free)):
                self._evict(kept)
            taken = [slots.free.pop() for _ in range(min(count, len(slots.free)))]
            return [slots.row(self, slot) for slot in sorted(taken)]

    def discard(self, rows: Sequence[Row]) -> None:
        """See `TierStore`."""
        with self._lock:
            for row in rows:
                self._slots_of(row).free.append(row.slot)

    def commit(self, pages: Sequence[tuple[PageRecord, Row]]) -> list[int]:
        """See `TierStore`."""
        handles = []
        for record, row in pages:
            own = row if row.owner is self else self._copied(record, row)
            handles.append(NO_HANDLE if own is None else self._keep(record, own))
        return handles

    def _copied(self, record: PageRecord, row: Row) -> Row | None:
        """Copy another's row into a slot; None where there is no room."""
        with self._lock:
            if record.address.key in self._by_key:
                return row
        staged = self.stage(record.address.group, 1)
        if not staged:
            self._counters.add("refused")
            return None
        staged[0].data[:] = row.data
        return staged[0]

    def _keep(self, record: PageRecord, row: Row) -> int:
        with self._lock:
            known = self._by_key.get(record.address.key)
            if known is not None:
                if row.owner is self:
                    self._slots_of(row).free.append(row.slot)
                known.group.order.move_to_end(known.handle)
                self._counters.add("duplicates")
                return known.handle
            if row.owner is not self:  # its twin went between `_copied` and now
                self._counters.add("refused")
                return NO_HANDLE
            slots = self._groups[record.address.group]
            handle = self._handles.take(self._by_handle)
            kept = _Kept(handle, record, slots, row.slot)
            slots.order[handle] = kept
            self._by_handle[handle] = self._by_key[record.address.key] = kept
            self.version += 1
            self._counters.add("pages_written")
            self._counters.add("bytes_written", row.size)
            return handle

    def fetch(self, handles: Sequence[int]) -> list[Fetched]:
        """See `TierStore`."""
        with self._lock:
            return [self._lease(handle) for handle in handles]

    def _lease(self, handle: int) -> Fetched:
        kept = self._by_handle.get(handle)
        if kept is None:
            return Fetched(handle, Outcome.MISSING)
        slots = kept.group
        slots.readers[kept.slot] = slots.readers.get(kept.slot, 0) + 1
        self._counters.add("pages_read")
        self._counters.add("bytes_read", slots.shape.block_bytes)
        return Fetched(handle, Outcome.OK, slots.row(self, kept.slot), kept.record)

    def release(self, fetched: Sequence[Fetched]) -> None:
        """See `TierStore`."""
        with self._lock:
            for one in fetched:
                if one.row is None:
                    continue
                slots = self._slots_of(one.row)
                slots.readers[one.row.slot] -= 1
                if not slots.readers[one.row.slot]:
                    del slots.readers[one.row.slot]
                    if one.row.slot in slots.parting:
                        slots.parting.remove(one.row.slot)
                        slots.free.append(one.row.slot)

    def report_corrupt(self, handle: int) -> None:
        """Drop a page whose payload was found damaged where it landed."""
        with self._lock:
            kept = self._by_handle.get(handle)
            if kept is not None:
                self._counters.add("corrupt")
                self._dropped.append((handle, kept.record.address.key, Loss.DAMAGED))
                self._remove(kept)

    def close(self) -> None:
        """Forget all pages."""
        with self._lock:
            for kept in list(self._by_handle.values()):
                self._remove(kept)

    # ---------------------------------------------------------------- under the lock

    def _slots_of(self, row: Row) -> _GroupSlots:
        assert row.owner is self, "a row of another store"
        return self._groups[row.group]

    def _evict(self, kept: _Kept) -> None:
        self._dropped.append((kept.handle, kept.record.address.key, Loss.ROOM))
        self._counters.add("evicted")
        self._remove(kept)

    def _remove(self, kept: _Kept) -> None:
        slots = kept.group
        del self._by_handle[kept.handle]
        del self._by_key[kept.record.address.key]
        del slots.order[kept.handle]
        if slots.readers.get(kept.slot):
            slots.parting.add(kept.slot)
        else:
            slots.free.append(kept.slot)


def even_weights(shapes: Sequence[GroupShape], blocks: Mapping[str, int]) -> list[float]:
    """Weights for `slots_within`: every group as its device pool is to the others, in bytes."""
    return [float(blocks[shape.name] * shape.row_bytes) for shape in shapes]
