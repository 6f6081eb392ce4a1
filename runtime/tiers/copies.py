"""The copies that transfers are made of: out of device blocks, into them, between stores.

    demote   blocks --read--> rows of the store --digests--> records --commit--> handles
    load     handles --fetch--> rows --write--> blocks --digests--> compared with the records
    move     handles of one store --> handles of another

A load is confirmed by the digests of the words that went into the blocks, not by the absence of an
error; a page that fails this is dropped from its store. A demotion's digests are those of the
blocks it read, so damage anywhere in between shows when the page comes back. Those of a lossy copy
are of the block that it will be read into (`Landing`), which is not the one it was made of.

This module does not queue (`transfer`) and does not decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from statewise.radix.segment import Tier
from statewise.runtime.clock import Clock
from statewise.runtime.tiers.blocks import BlockIO, Digests
from statewise.runtime.tiers.buffers import Row
from statewise.runtime.tiers.checksums import differing_layers
from statewise.runtime.tiers.page import GroupShape, PageAddress, PageRecord, content_of
from statewise.runtime.tiers.store import (
    NO_HANDLE,
    Fetched,
    Outcome,
    PlainStore,
    TierStore,
)
from statewise.runtime.tiers.transfer import PageResult, Step

LANDED = PageResult(Outcome.OK)
NOT_LANDED = PageResult(Outcome.FAILED, reason="never confirmed")
COMMIT_STEPS = 4  # steps that one commit to a disk takes: waiting for the medium costs the same


@dataclass(frozen=True, slots=True)
class DevicePage:
    """A page to demote: its block, and what it is. `num_tokens`: valid ones in the page.

    `expected`, if given, are the digests that the block must have, [num_layers].
    """

    group: int
    block: int
    address: PageAddress
    num_tokens: int
    expected: Digests | None = None


@dataclass(frozen=True, slots=True)
class LoadPage:
    """A page to load: its handle and key in the store, and the private block it is for."""

    group: int
    block: int
    handle: int
    key: bytes


# (group, rows that were read, digests of their blocks) -> digests of blocks after their `write`
Landing = Callable[[int, Sequence[Row], Digests], Digests]
T = TypeVar("T")


def as_read(_group: int, _rows: Sequence[Row], digests: Digests) -> Digests:
    """Copies that keep every bit land as they were read."""
    return digests


def _cut(
    pages: Sequence[T], group_of: Callable[[T], int], row_bytes: Sequence[int], step_bytes: int
) -> Iterator[tuple[int, list[T]]]:
    """(index of the first, pages): runs of one group, at most `step_bytes` or one page."""
    first = 0
    run: list[T] = []
    for i, page in enumerate(pages):
        group = group_of(page)
        full = (len(run) + 1) * row_bytes[group] > step_bytes
        if run and (full or group_of(run[-1]) != group):
            yield first, run
            first, run = i, []
        run.append(page)
    if run:
        yield first, run


class Copier:
    """Makes the steps of transfers; `shapes` are in the schema's order of groups."""

    def __init__(
        self,
        shapes: Sequence[GroupShape],
        blocks: BlockIO,
        clock: Clock,
        secret: bytes = b"",
        step_bytes: int = 4 << 20,
        landing: Landing = as_read,
    ) -> None:
        self.shapes = tuple(shapes)
        self._blocks = blocks
        self._clock = clock
        self._secret = secret
        self._landing = landing
        self.step_bytes = step_bytes
        self._row_bytes = [shape.row_bytes for shape in shapes]
        self._index = {shape.name: i for i, shape in enumerate(shapes)}

    def rebind(self, shapes: Sequence[GroupShape]) -> None:
        """Other stamps, the same sizes."""
        assert [s.row_bytes for s in shapes] == self._row_bytes, "sizes do not change"
        self.shapes = tuple(shapes)

    def _step(
        self, first: int, group: int, count: int, run: Callable[[], Sequence[PageResult]]
    ) -> Step:
        return Step(first, count, count * self.shapes[group].block_bytes, run)

    # ---------------------------------------------------------------- demote

    def demote(self, store: TierStore, pages: Sequence[DevicePage]) -> list[Step]:
        """Steps that copy pages into a store. Index pages come after the pages they route into."""

        def run_of(run: list[DevicePage]) -> Callable[[], list[PageResult]]:
            return lambda: self._demote(store, run)

        return [
            self._step(first, run[0].group, len(run), run_of(run))
            for first, run in _cut(
                pages, lambda p: p.group, self._row_bytes, self._commit_bytes(store)
            )
        ]

    def _commit_bytes(self, store: TierStore) -> int:
        return self.step_bytes * (COMMIT_STEPS if store.tier is Tier.DISK else 1)

    def _demote(self, store: TierStore, pages: list[DevicePage]) -> list[PageResult]:
        group = pages[0].group
        rows = store.stage(self.shapes[group].name, len(pages))
        try:
            taken = pages[: len(rows)]
            digests = self._blocks.read(group, [page.block for page in taken], rows)
            landing = self._landing(group, rows, digests)
        except BaseException:
            store.discard(rows)
            raise
        records: list[tuple[PageRecord, Row]] = []
        results = [PageResult(Outcome.REFUSED, reason="no room")] * len(pages)
        wanted: list[int] = []
        for i, (page, row) in enumerate(zip(taken, rows, strict=True)):
            if page.expected is not None and not np.array_equal(page.expected, digests[i]):
                store.discard([row])
                results[i] = PageResult(Outcome.CORRUPT, reason="the block is not as published")
                continue
            record = self._record(store, page, landing[i])
            if record is None:
                store.discard([row])
                results[i] = PageResult(Outcome.REFUSED, reason="what it routes into is not there")
            else:
                records.append((record, row))
                wanted.append(i)
        for i, handle in zip(wanted, store.commit(records), strict=True):
            if handle != NO_HANDLE:
                results[i] = PageResult(Outcome.OK, handle)
        return results

    def _record(self, store: TierStore, page: DevicePage, sums: Digests) -> PageRecord | None:
        dependency = 0
        if page.address.base:
            dependency = store.content(page.address.base)
            if not dependency:
                return None
        digests = np.ascontiguousarray(sums)
        return PageRecord(
            page.address,
            page.num_tokens,
            digests,
            content_of(digests, self._secret),
            dependency,
            self._clock.wall(),
        )

    # ---------------------------------------------------------------- load

    def load(self, store: TierStore, pages: Sequence[LoadPage]) -> list[Step]:
        """Steps that copy pages of a store into blocks."""
        plain = store if isinstance(store, PlainStore) else None

        def run_of(run: list[LoadPage]) -> Callable[[], list[PageResult]]:
            return lambda: self._load(store, plain, run)

        return [
            self._step(first, run[0].group, len(run), run_of(run))
            for first, run in _cut(pages, lambda p: p.group, self._row_bytes, self.step_bytes)
        ]

    def _load(
        self, store: TierStore, plain: PlainStore | None, pages: list[LoadPage]
    ) -> list[PageResult]:
        results = [NOT_LANDED] * len(pages)
        if plain is not None:
            self._load_plain(plain, pages, results)
        left = [i for i, result in enumerate(results) if result is NOT_LANDED]
        if left:
            wanted = [pages[i] for i in left]
            fetched = store.fetch([page.handle for page in wanted])
            try:
                landed = self._land(store, wanted, fetched)
            finally:
                store.release(fetched)
            for i, result in zip(left, landed, strict=True):
                results[i] = result
        store.touch([page.handle for page, r in zip(pages, results, strict=True) if r is LANDED])
        return results

    def _load_plain(
        self, store: PlainStore, pages: list[LoadPage], results: list[PageResult]
    ) -> None:
        """Load what can be loaded without looking at each page; `results` tells which are."""
        group = pages[0].group
        name = self.shapes[group].name
        handles, keys = [page.handle for page in pages], [page.key for page in pages]
        for run in store.plain_runs(name, handles, keys):
            good = run.load(self._blocks, group, [pages[i].block for i in run.indices])
            for i, is_good in zip(run.indices, good, strict=True):
                if is_good:
                    results[i] = LANDED

    def _land(
        self, store: TierStore, pages: list[LoadPage], fetched: Sequence[Fetched]
    ) -> list[PageResult]:
        group = pages[0].group
        layers = self.shapes[group].num_layers
        results: list[PageResult] = []
        there: list[tuple[int, Row, PageRecord]] = []
        for page, one in zip(pages, fetched, strict=True):
            record = one.record
            if one.row is None or record is None:
                results.append(PageResult(one.outcome, reason=one.reason))
            elif record.address.key != page.key or len(record.digests) != layers:
                results.append(PageResult(Outcome.CORRUPT, reason="another page's record"))
                store.report_corrupt(page.handle)
            else:
                there.append((len(results), one.row, record))
                results.append(NOT_LANDED)
        if not there:
            return results
        blocks = [pages[i].block for i, _, _ in there]
        landed = self._blocks.write(group, blocks, [row for _, row, _ in there])
        same = (np.array([record.digests for _, _, record in there]) == landed).all(axis=1)
        for (i, _, record), sums, is_same in zip(there, landed, same.tolist(), strict=True):
            if is_same:
                results[i] = LANDED
            else:
                store.report_corrupt(pages[i].handle)
                bad = differing_layers(record.digests, sums)
                results[i] = PageResult(Outcome.CORRUPT, bad_layers=bad, reason="digests differ")
        return results

    # ---------------------------------------------------------------- move

    def move(
        self, source: TierStore, target: TierStore, pages: Sequence[tuple[int, str]]
    ) -> list[Step]:
        """Steps that copy pages, (handle, group name) each, from one store to another."""

        def group_of(page: tuple[int, str]) -> int:
            return self._index[page[1]]

        def run_of(run: list[tuple[int, str]]) -> Callable[[], list[PageResult]]:
            return lambda: _move(source, target, [handle for handle, _ in run])

        return [
            self._step(first, group_of(run[0]), len(run), run_of(run))
            for first, run in _cut(pages, group_of, self._row_bytes, self._commit_bytes(target))
        ]


def _move(source: TierStore, target: TierStore, handles: list[int]) -> list[PageResult]:
    fetched = source.fetch(handles)
    try:
        results = [PageResult(one.outcome, reason=one.reason) for one in fetched]
        there = [
            (i, one.record, one.row)
            for i, one in enumerate(fetched)
            if one.record is not None and one.row is not None
        ]
        kept = target.commit([(record, row) for _, record, row in there])
        for (i, _, _), handle in zip(there, kept, strict=True):
            if handle == NO_HANDLE:
                results[i] = PageResult(Outcome.REFUSED, reason="no room")
            else:
                results[i] = PageResult(Outcome.OK, handle)
        return results
    finally:
        source.release(fetched)
