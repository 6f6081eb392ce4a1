"""Pages for tests of the tiers: shapes, addresses, payloads that are a function of their key."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from statewise.radix.key import Namespace
from statewise.radix.stamp import Stamp
from statewise.runtime.tiers.body import Bodies
from statewise.runtime.tiers.buffers import Row
from statewise.runtime.tiers.checksums import layer_digests
from statewise.runtime.tiers.disk import DiskOptions, DiskTier
from statewise.runtime.tiers.files import Files
from statewise.runtime.tiers.page import (
    GroupShape,
    PageAddress,
    PageRecord,
    PrefixChain,
    content_of,
)
from statewise.runtime.tiers.store import Outcome, TierStore

PAGE = 4
FULL = GroupShape("full", Stamp("model", "v1", "layout-a"), 3, 1000, PAGE, 2)
WINDOW = GroupShape("window", Stamp("model", "v1", "layout-b", 0, "window/8"), 2, 2048, PAGE, 2)
SHAPES = (FULL, WINDOW)


class ManualClock:
    """A clock that a test moves."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


def tokens_of(seed: int, pages: int, page_size: int = PAGE) -> bytes:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 1000, pages * page_size, dtype=np.int32).tobytes()


def addresses(
    count: int, shape: GroupShape = FULL, seed: int = 0, salt: str = "", secret: bytes = b""
) -> list[PageAddress]:
    """Addresses of the first `count` pages of a sequence."""
    chain = PrefixChain(Namespace(salt), shape.page_size, secret)
    chain.extend(tokens_of(seed, count, shape.page_size))
    return [chain.address(shape, page) for page in range(count)]


def payload_of(address: PageAddress, shape: GroupShape) -> NDArray[np.uint8]:
    """What must be in a page: random bytes that its key decides."""
    rng = np.random.default_rng(int.from_bytes(address.key, "little"))
    return rng.integers(0, 256, shape.block_bytes, dtype=np.uint8)


def record_of(
    address: PageAddress,
    shape: GroupShape,
    payload: NDArray[np.uint8],
    secret: bytes = b"",
    created_s: float = 1000.0,
) -> PageRecord:
    digests = layer_digests(payload, shape.num_layers)
    content = content_of(digests, secret)
    return PageRecord(address, shape.page_size, digests, content, 0, created_s)


def store_pages(
    store: TierStore,
    where: Sequence[PageAddress],
    shape: GroupShape = FULL,
    secret: bytes = b"",
    created_s: float = 1000.0,
) -> list[int]:
    """Put pages with their right payloads; handles."""
    pages: list[tuple[PageRecord, Row]] = []
    rows = store.stage(shape.name, len(where))
    for address, row in zip(where, rows, strict=False):
        payload = payload_of(address, shape)
        row.data[:] = payload
        pages.append((record_of(address, shape, payload, secret, created_s), row))
    return store.commit(pages)


def check_fetch(
    store: TierStore, handles: Sequence[int], where: Sequence[PageAddress], shape: GroupShape
) -> list[Outcome]:
    """Fetch pages; assert that whatever is given is right. Damaged payloads count as CORRUPT."""
    outcomes = []
    fetched = store.fetch(handles)
    for one, address in zip(fetched, where, strict=True):
        outcome = one.outcome
        if one.row is not None:
            assert one.record is not None
            assert one.record.address == address
            digests = layer_digests(one.row.data, shape.num_layers)
            if (digests == one.record.digests).all():
                assert (one.row.data == payload_of(address, shape)).all(), "wrong bytes"
                assert not one.row.whole[one.row.size :].any()
            else:
                store.report_corrupt(one.handle)
                outcome = Outcome.CORRUPT
        outcomes.append(outcome)
    store.release(fetched)
    return outcomes


def open_disk(
    directory: Path,
    *,
    budget: int = 64 << 20,
    extent: int = 1 << 20,
    clock: ManualClock | None = None,
    bodies: Bodies | None = None,
    files: Files | None = None,
    shapes: Sequence[GroupShape] = SHAPES,
    **options: Any,
) -> DiskTier:
    chosen = DiskOptions(budget, extent, **options)
    return DiskTier(directory, shapes, chosen, clock or ManualClock(), bodies, files)
