"""Whether a request fits now: blocks per group, counted before it starts.

    need(g)      pages for the known tokens and a share of the output still to come
    promised(g)  what running requests have been admitted for and do not hold yet
    available(g) free + evictable - promised

A request is admitted if, in every group, need <= available - watermark. With nothing running the
watermark and the promise of output are waived, so that whatever can ever fit does run. The share
of output to reserve adapts: it grows when requests had to be preempted and decays while none are.

This module counts; it does not evict or allocate.
"""

from __future__ import annotations

from dataclasses import dataclass

from statewise.radix.schema import CacheSchema, StateGroupSpec
from statewise.runtime.scheduler.request import Request


@dataclass(frozen=True)
class Shortage:
    """The group that keeps a request waiting."""

    group: str
    needed: int  # blocks
    available: int  # blocks


@dataclass(frozen=True, slots=True)
class Blocked:
    """What a request found that did not fit: nothing else can make it fit but a change of these.

    `available` blocks per group before it took its lease; `group` is the short one's index (None:
    there was no count, blocks ran out), of which the request `held` pages by its lease, `taken` of
    them from those available. `circumstances`: who runs, and what is being loaded.
    """

    available: tuple[int, ...]
    circumstances: object
    group: int | None = None
    held: int = 0
    taken: int = 0


class OutputReserve:
    """Share of a request's remaining output for which blocks are reserved at admission."""

    def __init__(self) -> None:
        self.share = 0.4

    def preempted(self) -> None:
        """Blocks ran out: reserve more from now on."""
        self.share = min(1.0, self.share * 1.5)

    def step(self) -> None:
        """A step without preemption passed."""
        self.share = max(0.1, self.share * 0.999)


def pages_of(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` tokens."""
    return -(-num_tokens // page_size)


def live_window_pages(group: StateGroupSpec, chunk: int, page_size: int) -> int:
    """Most pages of a window group that one request holds at once while it computes."""
    return pages_of(group.window + chunk, page_size) + 1 + pages_of(group.sinks, page_size)


def group_need(group: StateGroupSpec, num_tokens: int, chunk: int, page_size: int) -> int:
    """Blocks of `group` that a request of `num_tokens` tokens holds at its largest."""
    if group.kind.is_snapshot:
        return 1
    pages = pages_of(num_tokens, page_size)
    if group.kind.is_window:
        return min(pages, live_window_pages(group, chunk, page_size))
    return pages


def held(request: Request, group_index: int) -> int:
    """Pages of a group that an admitted request's tables cover now."""
    sequence = request.sequence
    if sequence is None:
        return 0
    if group_index in sequence.snapshot_groups:
        return 1
    live_from = sequence.live_from[group_index]
    return sequence.num_pages - live_from + min(sequence.sink_pages[group_index], live_from)


class Admission:
    """Counts blocks for one schema."""

    def __init__(
        self, schema: CacheSchema, num_blocks: tuple[int, ...], watermark: float, chunk: int
    ) -> None:
        self._schema = schema
        self._num_blocks = num_blocks
        self._watermarks = tuple(int(n * watermark) for n in num_blocks)
        self._chunk = chunk
        self.reserve = OutputReserve()

    def capacity_tokens(self) -> int:
        """Longest sequence whose state fits into every pool at once."""
        page = self._schema.page_size
        best = None
        for group, blocks in zip(self._schema.groups, self._num_blocks, strict=True):
            if group.kind.is_history or (
                group.kind.is_window and blocks < live_window_pages(group, page, page)
            ):
                best = min(best if best is not None else blocks * page, blocks * page)
        return best if best is not None else 1 << 40

    def limiting_pool(self) -> str:
        """Name of the group whose pool bounds `capacity_tokens`."""
        pairs = [
            (blocks, group.name)
            for group, blocks in zip(self._schema.groups, self._num_blocks, strict=True)
            if group.kind.is_history
        ]
        return min(pairs)[1] if pairs else self._schema.groups[0].name

    def _expected_tokens(self, request: Request, share: float) -> int:
        return request.num_tokens + int(request.expected_output_len * share) + 1

    def promised(self, group_index: int, running: list[Request]) -> int:
        """Blocks that running requests were admitted for and do not hold yet."""
        group = self._schema.groups[group_index]
        if group.kind.is_snapshot:
            return 0
        total = 0
        for request in running:
            tokens = self._expected_tokens(request, self.reserve.share)
            need = group_need(group, tokens, self._chunk, self._schema.page_size)
            total += max(0, need - held(request, group_index))
        return total

    def shortage(
        self, request: Request, running: list[Request], available: tuple[int, ...]
    ) -> Shortage | None:
        """The first group in which `request` (its reuse already leased) does not fit, or None.

        `available` is free plus evictable blocks per group, the request's lease excluded.
        """
        alone = not running
        tokens = self._expected_tokens(request, 0.0 if alone else self.reserve.share)
        for g, group in enumerate(self._schema.groups):
            chunk = self._schema.page_size if alone else self._chunk
            need = group_need(group, tokens, chunk, self._schema.page_size) - held(request, g)
            spare = available[g] - self.promised(g, running)
            if not alone:
                spare -= self._watermarks[g]
            if need > spare:
                return Shortage(group.name, need, max(spare, 0))
        return None

    def blocked(
        self,
        request: Request,
        shortage: Shortage,
        available: tuple[tuple[int, ...], tuple[int, ...]],
        circumstances: object,
    ) -> Blocked:
        """Remember a shortage of `request`, its reuse leased; `available` before and after that."""
        group = self._schema.index_of(shortage.group)
        before, after = available
        taken = before[group] - after[group]
        return Blocked(before, circumstances, group, held(request, group), taken)

    def is_still_short(
        self,
        request: Request,
        running: list[Request],
        available: tuple[int, ...],
        circumstances: object,
    ) -> bool:
        """Whether what blocked the request blocks it still; its reuse is not leased.

        False is no promise that it fits now.
        """
        blocked = request.blocked
        if blocked is None or not running or blocked.circumstances != circumstances:
            return False
        if blocked.group is None:
            return all(now <= then for now, then in zip(available, blocked.available, strict=True))
        g, page = blocked.group, self._schema.page_size
        tokens = self._expected_tokens(request, self.reserve.share)
        need = group_need(self._schema.groups[g], tokens, self._chunk, page) - blocked.held
        spare = available[g] - blocked.taken - self.promised(g, running) - self._watermarks[g]
        return need > spare
