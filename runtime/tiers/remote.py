"""The remote tier: one object a page, in an S3-compatible store or a shared folder.

    s3://BUCKET/PREFIX[?endpoint=URL&region=NAME]      credentials come from the environment
    gs://..., az://..., file:///FOLDER

An object is a record (`record`) and is written whole or not at all; its name is its key, so many
servers may share one place, and none needs to own it. What is there is learnt page by page: from
what this process wrote, and from `probe`, which asks the store for a page's header.

There is no budget here: object stores expire objects by their own rules, and `collect` deletes old
ones. This module does not verify payloads' digests: they are checked where they land.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from statewise.radix.segment import Tier
from statewise.runtime.clock import Clock
from statewise.runtime.tiers.body import Bodies, check_content
from statewise.runtime.tiers.buffers import Arena, Row
from statewise.runtime.tiers.health import OFFLINE, RETRY_S, Health
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
    HandleSource,
    Outcome,
    TierError,
    TierStatus,
)

logger = logging.getLogger(__name__)

NUM_CONNECTIONS = 16
OBJECTS = "v1"
URL_SETTINGS = ("endpoint", "region")


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
            return stores.from_url(plain, mkdir=True)
        insecure = str(chosen.get("endpoint", "")).startswith("http://")
        return stores.from_url(
            plain,
            client_options={"timeout": "30s", "allow_http": insecure},
            retry_config={"max_retries": 2},
            **chosen,
        )
    except Exception as error:  # the package's own errors, which are not importable everywhere
        raise TierError(f"remote cache {plain}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]


@dataclass(frozen=True, slots=True)
class _Known:
    """A page that is there, as far as this process knows."""

    handle: int
    key: bytes
    group: str
    content: int
    dependency: int


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
        self._lock = threading.Lock()
        self._by_handle: dict[int, _Known] = {}
        self._by_key: dict[bytes, _Known] = {}
        self._handles = HandleSource()
        self._dropped: list[tuple[int, bytes]] = []
        self._distrusted: set[bytes] = set()  # keys of objects found damaged
        self._pool: ThreadPoolExecutor | None = ThreadPoolExecutor(
            NUM_CONNECTIONS, thread_name_prefix="remote"
        )

    # ---------------------------------------------------------------- control plane

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """See `TierStore`. Pages nobody wrote or probed here are not known."""
        if self._health.is_down:
            return [NO_HANDLE] * len(keys)
        with self._lock:
            found = (self._by_key.get(key) for key in keys)
            return [NO_HANDLE if known is None else known.handle for known in found]

    def content(self, key: bytes) -> int:
        """See `TierStore`."""
        known = self._by_key.get(key)
        return 0 if known is None else known.content

    def dependency(self, handle: int) -> int:
        """See `TierStore`."""
        known = self._by_handle.get(handle)
        return 0 if known is None else known.dependency

    def key_of(self, handle: int) -> bytes:
        """See `TierStore`."""
        known = self._by_handle.get(handle)
        return b"" if known is None else known.key

    def touch(self, handles: Sequence[int]) -> None:
        """See `TierStore`. Objects have no recency."""

    def free(self, handles: Sequence[int]) -> None:
        """See `TierStore`. Other servers may use the objects: they stay."""
        for handle in handles:
            self._forget(handle, tell=False)

    def report_corrupt(self, handle: int) -> None:
        """See `TierStore`. The object is not believed again before it is written anew."""
        self._counters.add("corrupt")
        self._distrust(handle)

    def _distrust(self, handle: int) -> None:
        with self._lock:
            known = self._by_handle.get(handle)
            if known is not None:
                self._distrusted.add(known.key)
        self._forget(handle, tell=True)

    def pop_dropped(self) -> list[tuple[int, bytes]]:
        """See `TierStore`."""
        with self._lock:
            dropped, self._dropped = self._dropped, []
            return dropped

    def all_handles(self) -> list[int]:
        """See `TierStore`. Those known to this process."""
        with self._lock:
            return list(self._by_handle)

    def rebind(self, shapes: Sequence[GroupShape]) -> None:
        """See `TierStore`."""
        self._shapes = {shape.name: shape for shape in shapes}

    def status(self) -> TierStatus:
        """See `TierStore`. Pages and bytes are those known to this process."""
        with self._lock:
            pages: dict[str, int] = {}
            for known in self._by_key.values():
                pages[known.group] = pages.get(known.group, 0) + 1
        used = sum(count * self._shapes[group].block_bytes for group, count in pages.items())
        counters = self._counters.as_dict()
        figures = (sum(pages.values()), used, 0, pages, counters)
        return TierStatus(Tier.REMOTE, self._health.state, *figures, self.bodies.codec_name)

    def _forget(self, handle: int, *, tell: bool) -> None:
        with self._lock:
            known = self._by_handle.pop(handle, None)
            if known is not None:
                del self._by_key[known.key]
                if tell:
                    self._dropped.append((handle, known.key))

    def _learn(self, page: PageRecord) -> int:
        with self._lock:
            self._distrusted.discard(page.address.key)
            known = self._by_key.get(page.address.key)
            if known is None:
                handle = self._handles.take(self._by_handle)
                key, group = page.address.key, page.address.group
                known = _Known(handle, key, group, page.content, page.dependency)
                self._by_handle[handle] = self._by_key[key] = known
            return known.handle

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
        try:
            return self._in_parallel(self._put, pages)
        finally:
            self.discard([row for _, row in pages])

    def _in_parallel(self, call: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        if self._pool is None:
            return [call(item) for item in items]
        return list(self._pool.map(call, items))

    def _put(self, page: tuple[PageRecord, Row]) -> int:
        record, row = page
        known = self._by_key.get(record.address.key)
        if known is not None:
            self._counters.add("duplicates")
            return known.handle
        if self._pool is None or not self._health.may_write():
            self._counters.add("refused")
            return NO_HANDLE
        header, body = self.bodies.encode(self._shapes[record.address.group], record, row.data)
        head, _ = encode_header(header)
        padding = bytes(header.record_bytes - len(head) - body.size)
        try:
            name = object_name(record.address.key)
            parts = [head, body.data, padding] if padding else [head, body.data]
            self._api.put(self._objects, name, parts, use_multipart=False)
        except Exception as error:
            self._counters.add("refused")
            self._health.write_failed(RuntimeError(_first_line(error)))
            return NO_HANDLE
        self._health.write_ok()
        self._counters.add("pages_written")
        self._counters.add("bytes_written", row.size)
        return self._learn(record)

    def probe(self, addresses: Sequence[PageAddress]) -> list[Outcome]:
        """Ask the store which pages are there; `find` knows them afterwards."""
        return self._in_parallel(self._probe, addresses)

    def _probe(self, address: PageAddress) -> Outcome:
        if address.key in self._by_key:
            return Outcome.OK
        if address.key in self._distrusted:
            return Outcome.MISSING
        shape = self._shapes[address.group]
        size = header_bytes(shape.name, shape.stamp, shape.num_layers)
        got = self._get(address.key, size)
        if isinstance(got, Outcome):
            return got
        try:
            header = _header_of(got, address.key)
            if not self.bodies.can_decode(header.codec, header.sealing):
                return Outcome.MISSING
        except RecordError as error:
            self._count_corrupt(error)
            return Outcome.CORRUPT
        self._learn(header.page)
        return Outcome.OK

    def _get(self, key: bytes, size: int) -> memoryview | Outcome:
        """At most `size` bytes of an object."""
        if self._pool is None or not self._health.may_read():
            return Outcome.MISSING
        try:
            data = self._api.get_range(self._objects, object_name(key), start=0, length=size)
        except FileNotFoundError:
            self._health.read_ok()
            return Outcome.MISSING
        except Exception as error:
            self._health.read_failed(RuntimeError(_first_line(error)))
            return Outcome.FAILED
        self._health.read_ok()
        return memoryview(data)

    def fetch(self, handles: Sequence[int]) -> list[Fetched]:
        """See `TierStore`."""
        return self._in_parallel(self._fetch, handles)

    def _fetch(self, handle: int) -> Fetched:
        known = self._by_handle.get(handle)
        if known is None:
            return Fetched(handle, Outcome.MISSING)
        shape = self._shapes[known.group]
        head = header_bytes(shape.name, shape.stamp, shape.num_layers)
        got = self._get(known.key, head + shape.row_bytes + ALIGNMENT)
        if isinstance(got, Outcome):
            if got is Outcome.MISSING and self._health.state != OFFLINE:
                self._forget(handle, tell=True)
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
        """See `TierStore`."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)


def _header_of(data: memoryview, key: bytes) -> Header:
    header = decode_header(data)
    check_place(header, NO_CONTAINER, 0)
    if header.page.address.key != key:
        raise RecordError("place", "a record of another key")
    return header
