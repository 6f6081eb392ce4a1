"""What every slower tier is: pages by handle and by key, bytes in rows.

    stage    rows to fill with payloads         they belong to the caller until commit or discard
    commit   records and rows -> handles        a page is found from then on, whole
    fetch    handles -> rows with payloads      leased: not reused before release
    free     handles are forgotten

A handle is a small number that a store gives once: it never means another page, so whoever kept
one too long gets MISSING, never foreign bytes. Stores drop pages on their own (budget, age,
corruption, a failing device) and say so in `pop_dropped`.

Threads: `find`, `record`, `content`, `touch`, `free`, `oldest`, `pop_dropped`, `status` return at
once and may be called from the control plane; `stage`, `commit`, `fetch`, `release`, `discard`,
`withdraw`, `plain_runs` are for I/O threads. All are thread-safe. None raises for a page that is
missing, damaged or refused.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from statewise.radix.segment import Tier
from statewise.runtime.errors import OperatingError
from statewise.runtime.tiers.blocks import BlockIO
from statewise.runtime.tiers.buffers import Row
from statewise.runtime.tiers.page import GroupShape, PageAddress, PageRecord

NO_HANDLE = -1
MAX_HANDLE = (1 << 31) - 1  # handles fit the tree's int32 tables


class TierError(OperatingError):
    """A tier cannot be opened or used as asked; the message says what to do."""

    code = "tier"


class Outcome(enum.Enum):
    """What became of one page; the value is the word of metrics."""

    OK = "ok"
    MISSING = "missing"  # not there (any more)
    CORRUPT = "corrupt"  # there, and not what it should be
    FAILED = "failed"  # the medium did not deliver
    REFUSED = "refused"  # no room, or not taken now
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Fetched:
    """One page's payload, leased until `TierStore.release`.

    `row` and `record` are there if and only if the outcome is OK. The layers' digests are not yet
    checked: that is done where the payload lands (`transfer`).
    """

    handle: int
    outcome: Outcome
    row: Row | None = None
    record: PageRecord | None = None
    reason: str = ""


class Loss(enum.Enum):
    """Why a store let go of a page by itself; the value is the word of metrics and events."""

    ROOM = "room"  # others needed its place
    AGE = "age"
    DAMAGED = "damaged"
    GONE = "gone"  # the medium has it no more, or nothing here can read it


@dataclass(frozen=True, slots=True)
class TierStatus:
    """One tier's figures. `state`: "online", "read only" or "offline".

    `codec` compresses what is stored now; "none" where rows are kept as they are.
    """

    tier: Tier
    state: str
    num_pages: int
    used_bytes: int
    budget_bytes: int  # 0: unbounded
    pages_by_group: dict[str, int] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    codec: str = "none"


class TierStore(Protocol):
    """One slower tier; see the module's text."""

    @property
    def tier(self) -> Tier:
        """Which tier this is."""
        ...

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Handle of each key's page, `NO_HANDLE` where there is none."""
        ...

    def content(self, key: bytes) -> int:
        """`PageRecord.content` of the key's page; 0 where there is none."""
        ...

    def dependency(self, handle: int) -> int:
        """`PageRecord.dependency` of a page; 0 for none."""
        ...

    def key_of(self, handle: int) -> bytes:
        """Key of the page; empty where the handle means nothing any more."""
        ...

    def touch(self, handles: Sequence[int]) -> None:
        """These pages were of use: evict others first."""
        ...

    def free(self, handles: Sequence[int]) -> None:
        """Forget pages; unknown handles are ignored."""
        ...

    def withdraw(self, keys: Sequence[bytes]) -> None:
        """Destroy pages whose content is wrong though whole: nobody finds them again, ever.

        For I/O threads. Unknown keys are ignored; what cannot be destroyed is counted.
        """
        ...

    def stage(self, group: str, count: int) -> list[Row]:
        """Rows for `count` payloads of a group; fewer where there is no room."""
        ...

    def discard(self, rows: Sequence[Row]) -> None:
        """Give staged rows back unused."""
        ...

    def commit(self, pages: Sequence[tuple[PageRecord, Row]]) -> list[int]:
        """Keep pages; handles in order, `NO_HANDLE` for those refused.

        Rows that `stage` gave are the store's again. Rows of others are read only. A key that is
        there already keeps its page and gives its handle.
        """
        ...

    def fetch(self, handles: Sequence[int]) -> list[Fetched]:
        """Payloads, in order. Being fetched is no use: whoever uses a page says so by `touch`."""
        ...

    def release(self, fetched: Sequence[Fetched]) -> None:
        """Their rows are no longer read."""
        ...

    def report_corrupt(self, handle: int) -> None:
        """Count and drop a page whose payload was found damaged where it landed."""
        ...

    def pop_dropped(self) -> list[tuple[int, bytes, Loss]]:
        """(handle, key, why) of pages dropped by the store itself since the last call."""
        ...

    def all_handles(self) -> list[int]:
        """Handles of all pages."""
        ...

    def rebind(self, shapes: Sequence[GroupShape]) -> None:
        """Other weights or versions, the same sizes: what is stored from now on has these stamps.

        No I/O thread may be using the store.
        """
        ...

    def status(self) -> TierStatus:
        """Figures now."""
        ...

    def close(self) -> None:
        """Stop using it. Idempotent."""
        ...


class StoredRun(Protocol):
    """Pages that are read together, and believed only where they arrived."""

    @property
    def indices(self) -> list[int]:
        """Which of the pages asked for these are, in the caller's order."""
        ...

    def load(self, io: BlockIO, group: int, blocks: Sequence[int]) -> list[bool]:
        """Copy them into private blocks; whether each is the page asked for, as it was stored.

        A block whose page is not holds anything. Raises nothing that a medium does.
        """
        ...


@runtime_checkable
class PlainStore(TierStore, Protocol):
    """A store that gives payloads before it has verified what they are."""

    def plain_runs(
        self, group: str, handles: Sequence[int], keys: Sequence[bytes]
    ) -> Iterator[StoredRun]:
        """Runs of a group's pages, by handle and key, to be loaded one after the other.

        What is in none of the runs, or was not found good, must be fetched: that says what is
        wrong. For I/O threads.
        """
        ...


@runtime_checkable
class AskedStore(TierStore, Protocol):
    """A store that knows of pages which others wrote only once it was asked for them."""

    @property
    def can_ask(self) -> bool:
        """Whether asking makes sense now."""
        ...

    def probe(self, addresses: Sequence[PageAddress]) -> list[Outcome]:
        """Ask which pages are there; `find` knows afterwards. For I/O threads."""
        ...

    def presume(self, addresses: Sequence[PageAddress]) -> None:
        """Take pages for stored without asking; returns at once."""
        ...

    def knows_absent(self, key: bytes) -> bool:
        """Whether asking for a key would be for nothing; returns at once."""
        ...

    def gave_no_answer(self, seconds: float) -> None:
        """Nobody waits any longer for an answer to a question of `seconds` ago."""
        ...


class HandleSource:
    """Gives numbers that are not in use, in a circle through int32. Not thread-safe."""

    def __init__(self, start: int = 0) -> None:
        self._next = start

    def take(self, in_use: object) -> int:
        """Return a number that is not in the container `in_use`."""
        while self._next in in_use:  # type: ignore[operator]
            self._advance()
        handle = self._next
        self._advance()
        return handle

    def _advance(self) -> None:
        self._next = 0 if self._next == MAX_HANDLE else self._next + 1


class Counters:
    """Event counts by word. Adding is atomic enough under the interpreter's lock and a store's."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, word: str, count: int = 1) -> None:
        """Count an event."""
        if count:
            self._counts[word] += count

    def __getitem__(self, word: str) -> int:
        return self._counts[word]

    def as_dict(self) -> dict[str, int]:
        """All counts, by word."""
        return dict(sorted(self._counts.items()))
