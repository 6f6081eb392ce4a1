"""The remote tier: one object a page, in an S3-compatible store or a shared folder.

    s3://BUCKET/PREFIX[?endpoint=URL&region=NAME]      credentials come from the environment
    gs://..., az://..., file:///FOLDER

An object is a record (`record`) and is written whole or not at all; its name is its key, so many
servers may share one place, and none needs to own it. What is there is learnt from what this
process wrote, from `probe`, which asks the store for pages' headers, and by presumption
(`presume`): who found a page of a prompt may expect the ones before it. `known` says for how long.

A store that fails, or answers a question later than `SLOW_S`, four times in a row, is left alone
for a minute.

There is no budget here: object stores expire objects by their own rules, and `collect` deletes old
ones. This module does not verify payloads' digests: they are checked where they land.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit

from statewise.radix.segment import Tier
from statewise.runtime.clock import Clock
from statewise.runtime.tiers.body import Bodies, check_content
from statewise.runtime.tiers.buffers import Arena, Row
from statewise.runtime.tiers.connections import Connections
from statewise.runtime.tiers.files import DIRECTORY_MODE
from statewise.runtime.tiers.health import RETRY_S, Health
from statewise.runtime.tiers.known import KnownPages
from statewise.runtime.tiers.page import ALIGNMENT, GroupShape, PageAddress, PageRecord
from statewise.runtime.tiers.record import (
    NO_CONTAINER,
    Header,
    RecordError,
    check_place,
    decode_header,
    encode_header,
    header_bytes,
)
from statewise.runtime.tiers.store import (
    NO_HANDLE,
    Counters,
    Fetched,
    Loss,
    Outcome,
    TierError,
    TierStatus,
)
from statewise.runtime.tiers.url import URL_SETTINGS

logger = logging.getLogger(__name__)

NUM_CONNECTIONS = 16
OBJECTS = "v1"
TIMEOUT, CONNECT_TIMEOUT = "20s", "5s"  # of one request; it is tried twice
SLOW_S = 0.5  # an answer to a question that comes later is none


def object_name(key: bytes) -> str:
    """Where a page lies, below the URL's prefix."""
    name = key.hex()
    return f"{OBJECTS}/{name[:2]}/{name}"


def open_url(url: str, settings: Mapping[str, str] | None = None) -> Any:
    """Object store of a URL; TierError for one that cannot be understood.

    `settings` are further ones of the store, by obstore's names.
    """
    try:
        stores = importlib.import_module("obstore.store")
    except ImportError as error:
        raise TierError(
            "a remote cache needs the package obstore: pip install 'statewise[tiers]'"
        ) from error
    parts = urlsplit(url)
    chosen: dict[str, Any] = dict(parse_qsl(parts.query))
    unknown = sorted(chosen.keys() - set(URL_SETTINGS))
    if unknown:
        raise TierError(f"remote cache URL: unknown setting {unknown[0]!r}; known: {URL_SETTINGS}")
    chosen.update(settings or {})
    plain = urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))
    try:
        if parts.scheme == "file":
            _make_private(Path(unquote(parts.path)))
            return stores.from_url(plain, mkdir=True)
        insecure = str(chosen.get("endpoint", "")).startswith("http://")
        return stores.from_url(
            plain,
            client_options={
                "timeout": TIMEOUT,
                "connect_timeout": CONNECT_TIMEOUT,
                "allow_http": insecure,
            },
            retry_config={"max_retries": 1},
            **chosen,
        )
    except Exception as error:  # the package's own errors, which are not importable everywhere
        raise TierError(f"remote cache {plain}: {_first_line(error)}") from error


def _make_private(folder: Path) -> None:
    """Make a shared folder that only its owner may look into; one that is there stays as it is.

    The store makes files that others may read, so the directory around them is closed.
    """
    folder.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
    with contextlib.suppress(OSError):  # one that cannot be written gets no files either
        (folder / OBJECTS).mkdir(mode=DIRECTORY_MODE, exist_ok=True)


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]


class RemoteTier:
    """Pages as objects; a `TierStore`. `objects` is an open store (`open_url`)."""

    tier = Tier.REMOTE

    def __init__(
        self,
        objects: Any,
        shapes: Sequence[GroupShape],
        clock: Clock,
        bodies: Bodies | None = None,
        retry_s: float = RETRY_S,
    ) -> None:
        self.bodies = bodies if bodies is not None else Bodies()
        self._api: Any = importlib.import_module("obstore")
        self._objects = objects
        self._clock = clock
        self._shapes = {shape.name: shape for shape in shapes}
        self._arenas = {s.name: Arena(s.block_bytes, 1 << 20) for s in shapes}
        self._counters = Counters()
        self._health = Health("remote cache", clock, self._counters, retry_s)
        self._known = KnownPages(clock)
        self._connections = Connections(NUM_CONNECTIONS, "remote")

    # ---------------------------------------------------------------- control plane

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """See `TierStore`. Pages nobody wrote or probed here are not known."""
        return [NO_HANDLE] * len(keys) if self._health.is_down else self._known.find(keys)

    @property
    def can_ask(self) -> bool:
        """See `AskedStore`. Whether the store answers, as far as is known."""
        return not self._health.is_down

    def knows_absent(self, key: bytes) -> bool:
        """See `AskedStore`."""
        return self._known.is_absent(key)

    def presume(self, addresses: Sequence[PageAddress]) -> None:
        """See `AskedStore`. Pages after these are there; a load finds out.

        Not for pages whose content others depend on, nor for those that depend.
        """
        for address in addresses:
            if not self._known.is_absent(address.key):
                self._known.learn(address.key, address.group)
                self._counters.add("presumed")

    def gave_no_answer(self, seconds: float) -> None:
        """See `AskedStore`."""
        self._counters.add("unanswered")
        self._health.read_failed(TimeoutError(f"no answer within {seconds:g} s"))

    def content(self, key: bytes) -> int:
        """See `TierStore`."""
        known = self._known.by_key(key)
        return 0 if known is None else known.content

    def dependency(self, handle: int) -> int:
        """See `TierStore`."""
        known = self._known.by_handle(handle)
        return 0 if known is None else known.dependency

    def key_of(self, handle: int) -> bytes:
        """See `TierStore`."""
        known = self._known.by_handle(handle)
        return b"" if known is None else known.key

    def touch(self, handles: Sequence[int]) -> None:
        """See `TierStore`. Objects have no recency."""

    def free(self, handles: Sequence[int]) -> None:
        """See `TierStore`. Other servers may use the objects: they stay."""
        for handle in handles:
            self._known.forget(handle)

    def report_corrupt(self, handle: int) -> None:
        """See `TierStore`. The object is not believed again before it is written anew."""
        self._counters.add("corrupt")
        self._distrust(handle)

    def _distrust(self, handle: int) -> None:
        known = self._known.by_handle(handle)
        if known is not None:
            self._known.note_absent(known.key, math.inf)
        self._known.forget(handle, Loss.DAMAGED)

    def pop_dropped(self) -> list[tuple[int, bytes, Loss]]:
        """See `TierStore`."""
        return self._known.pop_dropped()

    def all_handles(self) -> list[int]:
        """See `TierStore`. Those known to this process."""
        return self._known.handles()

    def rebind(self, shapes: Sequence[GroupShape]) -> None:
        """See `TierStore`."""
        self._shapes = {shape.name: shape for shape in shapes}

    def status(self) -> TierStatus:
        """See `TierStore`. Pages and bytes are those known to this process."""
        pages = self._known.counts()
        used = sum(count * self._shapes[group].block_bytes for group, count in pages.items())
        counters = self._counters.as_dict()
        figures = (sum(pages.values()), used, 0, pages, counters)
        return TierStatus(Tier.REMOTE, self._health.state, *figures, self.bodies.codec_name)

    # ---------------------------------------------------------------- I/O threads

    def stage(self, group: str, count: int) -> list[Row]:
        """See `TierStore`."""
        return self._arenas[group].take(count)

    def discard(self, rows: Sequence[Row]) -> None:
        """See `TierStore`."""
        for row in rows:
            arena = row.owner
            if isinstance(arena, Arena) and arena in self._arenas.values():
                arena.give_back([row])

    def commit(self, pages: Sequence[tuple[PageRecord, Row]]) -> list[int]:
        """See `TierStore`. Returns when the store has confirmed the objects."""
        shapes = self._shapes  # those of now: a store may answer after it was rebound
        try:
            return self._connections.each(lambda page: self._put(shapes, *page), pages)
        finally:
            self.discard([row for _, row in pages])

    def _put(self, shapes: Mapping[str, GroupShape], record: PageRecord, row: Row) -> int:
        known = self._known.by_key(record.address.key)
        if known is not None:
            self._counters.add("duplicates")
            return known.handle
        if self._connections.is_closed or not self._health.may_write():
            self._counters.add("refused")
            return NO_HANDLE
        header, body = self.bodies.encode(shapes[record.address.group], record, row.data)
        head, _ = encode_header(header)
        padding = bytes(header.record_bytes - len(head) - body.size)
        try:
            name = object_name(record.address.key)
            parts = [head, body.data, padding] if padding else [head, body.data]
            self._counters.add("requests_write")
            self._api.put(self._objects, name, parts, use_multipart=False)
        except Exception as error:
            self._counters.add("refused")
            self._write_failed(error)
            return NO_HANDLE
        self._health.write_ok()
        self._counters.add("pages_written")
        self._counters.add("bytes_written", row.size)
        address = record.address
        return self._known.learn(address.key, address.group, record.content, record.dependency)

    def withdraw(self, keys: Sequence[bytes]) -> None:
        """See `TierStore`. The objects are deleted, whoever wrote them."""
        for key, handle in zip(keys, self._known.find(keys), strict=True):
            self._known.note_absent(key, math.inf)
            self._known.forget(handle)
        self._connections.each(self._delete, keys)

    def _delete(self, key: bytes) -> None:
        self._counters.add("requests_delete")
        try:
            self._api.delete(self._objects, object_name(key))
        except FileNotFoundError:
            pass  # it was never written
        except Exception as error:
            self._counters.add("withdrawals_failed")
            self._write_failed(error)

    def _write_failed(self, error: Exception) -> None:
        """A write failed; what fails after `close` concerns nobody."""
        if not self._connections.is_closed:
            self._health.write_failed(RuntimeError(_first_line(error)))

    def probe(self, addresses: Sequence[PageAddress]) -> list[Outcome]:
        """Ask the store which pages are there; `find` knows them afterwards."""
        return self._connections.each(self._probe, addresses)

    def _probe(self, address: PageAddress) -> Outcome:
        if self._known.by_key(address.key) is not None:
            return Outcome.OK
        if self._known.is_absent(address.key):
            return Outcome.MISSING
        shape = self._shapes[address.group]
        size = header_bytes(shape.name, shape.stamp, shape.num_layers)
        got = self._get(address.key, size, "requests_probe", SLOW_S)
        if isinstance(got, Outcome):
            return got
        try:
            header = _header_of(got, address.key)
        except RecordError as error:
            self._count_corrupt(error)
            self._known.note_absent(address.key, math.inf)
            return Outcome.CORRUPT
        if not self.bodies.can_decode(header.codec, header.sealing):
            self._known.note_absent(address.key)
            return Outcome.MISSING
        page = header.page
        self._known.learn(address.key, address.group, page.content, page.dependency)
        return Outcome.OK

    def _get(
        self, key: bytes, size: int, counter: str, slow_s: float = math.inf
    ) -> memoryview | Outcome:
        """At most `size` bytes of an object; an answer after `slow_s` seconds counts as none."""
        if self._connections.is_closed or not self._health.may_read():
            return Outcome.FAILED
        self._counters.add(counter)
        began_s = self._clock.monotonic()
        data: Any = None
        name = object_name(key)
        try:
            data = self._api.get_range(self._objects, name, start=0, length=size)
        except FileNotFoundError:
            self._known.note_absent(key)
        except Exception as error:
            if "range" in str(error).lower() and self._is_empty(name):
                return memoryview(b"")
            if not self._connections.is_closed:
                self._health.read_failed(RuntimeError(_first_line(error)))
            return Outcome.FAILED
        seconds = self._clock.monotonic() - began_s
        if seconds > slow_s:
            self._health.read_failed(TimeoutError(f"an answer took {seconds:.1f} s"))
        else:
            self._health.read_ok()
        return Outcome.MISSING if data is None else memoryview(data)

    def _is_empty(self, name: str) -> bool:
        """Whether an object has no bytes: stores call every range of it invalid."""
        try:
            return bool(self._api.head(self._objects, name)["size"] == 0)
        except Exception:
            return False

    def fetch(self, handles: Sequence[int]) -> list[Fetched]:
        """See `TierStore`."""
        return self._connections.each(self._fetch, handles)

    def _fetch(self, handle: int) -> Fetched:
        known = self._known.by_handle(handle)
        if known is None:
            return Fetched(handle, Outcome.MISSING)
        shape = self._shapes[known.group]
        head = header_bytes(shape.name, shape.stamp, shape.num_layers)
        size = head + shape.row_bytes + ALIGNMENT
        got = self._get(known.key, size, "requests_read")
        if isinstance(got, Outcome):
            if got is Outcome.MISSING:
                self._known.forget(handle, Loss.GONE)
            return Fetched(handle, got)
        row = self._arenas[known.group].take(1)[0]
        try:
            page = self._decode(got, known.key, row)
        except RecordError as error:
            self.discard([row])
            self._count_corrupt(error)
            self._distrust(handle)
            return Fetched(handle, Outcome.CORRUPT, reason=str(error))
        self._counters.add("pages_read")
        self._counters.add("bytes_read", row.size)
        self._known.learn(known.key, known.group, page.content, page.dependency)
        return Fetched(handle, Outcome.OK, row, page)

    def _decode(self, data: memoryview, key: bytes, row: Row) -> PageRecord:
        header = _header_of(data, key)
        if len(data) != header.record_bytes:
            raise RecordError("truncated", f"{len(data)} bytes of {header.record_bytes}")
        body = data[header.header_bytes : header.header_bytes + header.body_bytes]
        page = self.bodies.decode(header, body, row)
        row.clear_padding()
        check_content(page, self.bodies.secret)
        return page

    def _count_corrupt(self, error: RecordError) -> None:
        self._counters.add("corrupt")
        self._counters.add(f"corrupt_{error.kind}")

    def release(self, fetched: Sequence[Fetched]) -> None:
        """See `TierStore`."""
        self.discard([one.row for one in fetched if one.row is not None])

    # ---------------------------------------------------------------- care

    def collect(self, ttl_s: float) -> int:
        """Delete objects written more than `ttl_s` seconds ago; returns how many. OSError."""
        limit = datetime.fromtimestamp(self._clock.wall() - ttl_s, UTC)
        count = 0
        try:
            for found in self._api.list(self._objects, prefix=OBJECTS):
                old = [meta["path"] for meta in found if meta["last_modified"] < limit]
                if old:
                    self._api.delete(self._objects, old)
                    count += len(old)
        except Exception as error:
            raise OSError(f"remote cache: {_first_line(error)}") from error
        return count

    def close(self) -> None:
        """See `TierStore`. Requests under way are not waited for."""
        self._connections.close()


def _header_of(data: memoryview, key: bytes) -> Header:
    header = decode_header(data)
    check_place(header, NO_CONTAINER, 0)
    if header.page.address.key != key:
        raise RecordError("place", "a record of another key")
    return header
