"""The bytes of a stored page: docs/storage-format.md, byte by byte.

    record  = header | body | zeros to a multiple of 4096
    header  = fixed part (256 bytes) | group name | stamp | digests of the layers | zeros

The header says everything about the page and, through `body_sum`, everything about the body; its
own checksum covers all of it. It names the place that it was written for (container and offset), so
a record that lies elsewhere is not believed. `body_sum` is seeded with the key: a body under
another's header is not believed either.

This module does no I/O. What is in the body is `body`'s matter.
"""

from __future__ import annotations

import functools
import struct
import sys
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import xxhash

from statewise.radix.stamp import Stamp
from statewise.runtime.tiers.page import (
    ALIGNMENT,
    MAX_LAYERS,
    NO_KEY,
    PageAddress,
    PageRecord,
    decode_stamp,
    encode_stamp,
    round_up,
)

MAGIC = b"SWPAGE\r\n"
VERSION = 1
NONCE_BYTES = 12
CONTAINER_BYTES = 16
MAX_HEADER_BYTES = 1 << 20
MAX_BODY_BYTES = 1 << 40
NO_CONTAINER = bytes(CONTAINER_BYTES)


class _Fixed(NamedTuple):
    """The fixed part, in order; `_FIXED` packs it."""

    magic: bytes
    header_sum: int
    version: int
    codec: int
    sealing: int
    item_bytes: int
    header_bytes: int
    num_layers: int
    record_bytes: int
    payload_bytes: int
    body_bytes: int
    body_sum: int
    key: bytes
    position: int
    num_tokens: int
    name_bytes: int
    content: int
    dependency: int
    created_s: float
    base: bytes
    container: bytes
    offset: int
    nonce: bytes
    page_size: int
    stamp_bytes: int
    digests_at: int


_FIXED = struct.Struct("<8sQ 4H2I 4Q 16sQ2I 2Qd 16s 16sQ 12s3I")
FIXED_BYTES = 256
# Parts of the fixed part, in bytes; a test compares them with `_FIXED`.
_SIZES, _KEY, _NAME_BYTES = slice(16, 56), slice(64, 80), slice(92, 96)
_CONTENTS, _PLACE = slice(96, 112), slice(136, 160)
_ENDS_AT, _UNUSED_AT = 172, 184
_U64, _U64X2 = struct.Struct("<Q"), struct.Struct("<2Q")
_SUM_FROM = 16  # the header's checksum covers everything after itself

Data = bytes | bytearray | memoryview


class RecordError(Exception):
    """A record is not what it should be; `kind` is a stable word for counters."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Header:
    """A record's header, decoded."""

    page: PageRecord
    stamp: Stamp
    num_layers: int
    page_size: int
    payload_bytes: int
    body_bytes: int
    body_sum: int
    codec: int = 0
    sealing: int = 0
    item_bytes: int = 2
    nonce: bytes = bytes(NONCE_BYTES)
    container: bytes = NO_CONTAINER
    offset: int = 0
    header_sum: int = field(default=0, compare=False)

    @property
    def header_bytes(self) -> int:
        """Bytes of the header, a multiple of 4096."""
        return header_bytes(self.page.address.group, self.stamp, self.num_layers)

    @property
    def record_bytes(self) -> int:
        """Bytes of the whole record, a multiple of 4096."""
        return self.header_bytes + round_up(self.body_bytes)

    def at(self, container: bytes, offset: int) -> Header:
        """Move the same page to another place."""
        return replace(self, container=container, offset=offset)


@functools.lru_cache(maxsize=256)
def header_bytes(group: str, stamp: Stamp, num_layers: int) -> int:
    """Bytes that the header of a group's pages takes, padded."""
    texts = len(group.encode("utf-8", "surrogatepass")) + len(encode_stamp(stamp))
    return round_up(round_up(FIXED_BYTES + texts, 8) + 8 * num_layers)


def body_sum(key: bytes, body: Data) -> int:
    """Checksum of a body as stored, bound to its key."""
    return xxhash.xxh3_64_intdigest(body, int.from_bytes(key[:8], "little"))


def encode_header(header: Header) -> tuple[bytes, int]:
    """(bytes, checksum) of a header. A sealed page's digests lie in its body, not here."""
    page, address = header.page, header.page.address
    name = address.group.encode("utf-8", "surrogatepass")
    stamp = encode_stamp(header.stamp)
    digests_at = round_up(FIXED_BYTES + len(name) + len(stamp), 8)
    out = bytearray(header.header_bytes)
    fixed = _FIXED.pack(
        *_Fixed(
            MAGIC,
            0,
            VERSION,
            header.codec,
            header.sealing,
            header.item_bytes,
            len(out),
            header.num_layers,
            header.record_bytes,
            header.payload_bytes,
            header.body_bytes,
            header.body_sum,
            address.key,
            address.position,
            page.num_tokens,
            len(name),
            page.content,
            page.dependency,
            page.created_s,
            address.base or NO_KEY,
            header.container,
            header.offset,
            header.nonce,
            header.page_size,
            len(stamp),
            digests_at,
        )
    )
    out[: len(fixed)] = fixed
    out[FIXED_BYTES : FIXED_BYTES + len(name)] = name
    out[FIXED_BYTES + len(name) : FIXED_BYTES + len(name) + len(stamp)] = stamp
    if not header.sealing:
        sums = np.ascontiguousarray(page.digests, dtype="<u8").tobytes()
        out[digests_at : digests_at + len(sums)] = sums
    checksum = xxhash.xxh3_64_intdigest(memoryview(out)[_SUM_FROM:])
    struct.pack_into("<Q", out, 8, checksum)
    return bytes(out), checksum


def peek_sizes(data: Data) -> tuple[int, int]:
    """(header bytes, record bytes) that the first 256 bytes of a record claim; unverified.

    Raises RecordError for what cannot be a record of this version.
    """
    fixed = _peek(data)
    return fixed.header_bytes, fixed.record_bytes


def _peek(data: Data) -> _Fixed:
    if len(data) < FIXED_BYTES:
        raise RecordError("truncated", f"{len(data)} bytes are no header")
    fixed = _Fixed._make(_FIXED.unpack_from(data, 0))
    if fixed.magic != MAGIC:
        raise RecordError("magic", "no page record begins here")
    if fixed.version != VERSION:
        raise RecordError("version", f"record format {fixed.version}, this is {VERSION}")
    head, record = fixed.header_bytes, fixed.record_bytes
    if not (ALIGNMENT <= head <= MAX_HEADER_BYTES and head <= record <= MAX_BODY_BYTES):
        raise RecordError("header", f"a header of {head} bytes in a record of {record}")
    if head % ALIGNMENT or record % ALIGNMENT:
        raise RecordError("header", "sizes are not aligned")
    return fixed


def decode_header(data: Data) -> Header:
    """Verify and decode a header; `data` begins with it. Raises RecordError."""
    fixed = _peek(data)
    head = fixed.header_bytes
    if len(data) < head:
        raise RecordError("truncated", f"{len(data)} bytes of a header of {head}")
    view = memoryview(data)[:head]
    checksum = xxhash.xxh3_64_intdigest(view[_SUM_FROM:])
    if checksum != int.from_bytes(view[8:16], "little"):
        raise RecordError("header", "the header's checksum is wrong")
    try:
        header = _decode(view, fixed, checksum)
    except (ValueError, UnicodeDecodeError) as error:
        raise RecordError("header", str(error)) from error
    own = header.header_bytes
    if own != head or own + round_up(header.body_bytes) != fixed.record_bytes:
        raise RecordError("header", "the header's sizes contradict each other")
    return header


def _decode(view: memoryview, fixed: _Fixed, checksum: int) -> Header:
    if not 0 < fixed.num_layers < MAX_LAYERS or fixed.body_bytes > MAX_BODY_BYTES:
        raise ValueError("sizes out of range")
    name_end = FIXED_BYTES + fixed.name_bytes
    texts_end = name_end + fixed.stamp_bytes
    at, num_layers = fixed.digests_at, fixed.num_layers
    if at != round_up(texts_end, 8) or at + 8 * num_layers > len(view):
        raise ValueError("the digests lie outside the header")
    name = sys.intern(bytes(view[FIXED_BYTES:name_end]).decode("utf-8", "surrogatepass"))
    digests = np.frombuffer(view, dtype="<u8", count=num_layers, offset=at).astype(np.uint64)
    base = b"" if fixed.base == NO_KEY else fixed.base
    return Header(
        PageRecord(
            PageAddress(name, fixed.position, fixed.key, base),
            fixed.num_tokens,
            digests,
            fixed.content,
            fixed.dependency,
            fixed.created_s,
        ),
        decode_stamp(bytes(view[name_end:texts_end])),
        num_layers,
        fixed.page_size,
        fixed.payload_bytes,
        fixed.body_bytes,
        fixed.body_sum,
        fixed.codec,
        fixed.sealing,
        fixed.item_bytes,
        fixed.nonce,
        fixed.container,
        fixed.offset,
        checksum,
    )


class PlainHeaders:
    """Tells headers of one group's plain pages, of which an index knows the checksum.

    A header with that checksum is the one that was indexed. What it must say here is compared all
    the same: these sizes, this group, this key, this place, the content that the index names.
    `decode_header` would believe it then; what is not believed here is left to it, which names what
    is wrong. Comparing bytes takes a tenth of the time of decoding them.
    """

    def __init__(self, group: str, stamp: Stamp, sizes: tuple[int, int, int, int]) -> None:
        """`sizes`: layers, tokens of a page, bytes of a payload, bytes of one number."""
        num_layers, page_size, payload_bytes, item_bytes = sizes
        page = PageRecord(PageAddress(group, 0, NO_KEY), 0, np.zeros(num_layers, np.uint64), 0)
        body = (payload_bytes, payload_bytes, 0)
        header = Header(page, stamp, num_layers, page_size, *body, item_bytes=item_bytes)
        data, _ = encode_header(header)
        self.header_bytes = header.header_bytes
        self.record_bytes = header.record_bytes
        self.digests_at = _Fixed._make(_FIXED.unpack_from(data)).digests_at
        self._sizes = data[_SIZES]
        self._name_bytes = data[_NAME_BYTES]
        self._ends = data[_ENDS_AT:_UNUSED_AT]
        self._texts = data[FIXED_BYTES : self.digests_at]

    def expected(
        self, checksum: int, key: bytes, contents: tuple[int, int], place: tuple[bytes, int]
    ) -> tuple[bytes, ...]:
        """What `is_header` compares: the index's checksum, content and dependency; where it lies.

        `place`: the container and the offset in it.
        """
        start = MAGIC + _U64.pack(checksum) + self._sizes
        where = place[0] + _U64.pack(place[1])
        return start, key, self._name_bytes, _U64X2.pack(*contents), where, self._ends, self._texts

    def is_header(self, head: memoryview, expected: tuple[bytes, ...]) -> bool:
        """Whether `head` [header_bytes] is the header that was indexed, and says what it must."""
        data = bytes(head[: self.digests_at])
        start, key, name_bytes, contents, where, ends, texts = expected
        return (
            data[: len(start)] == start
            and start[8:16] == _U64.pack(xxhash.xxh3_64_intdigest(head[_SUM_FROM:]))
            and data[_KEY] == key
            and data[_NAME_BYTES] == name_bytes
            and data[_CONTENTS] == contents
            and data[_PLACE] == where
            and data[_ENDS_AT:_UNUSED_AT] == ends
            and data[FIXED_BYTES:] == texts
        )


def check_body(header: Header, body: Data, padding: Data = b"") -> None:
    """Raise RecordError unless `body` is the stored body and the padding is zero."""
    if len(body) != header.body_bytes:
        raise RecordError("truncated", f"{len(body)} bytes of a body of {header.body_bytes}")
    if body_sum(header.page.address.key, body) != header.body_sum:
        raise RecordError("body", "the body's checksum is wrong")
    if len(padding) and any(bytes(padding)):
        raise RecordError("body", "the padding is not zero")


def check_place(header: Header, container: bytes, offset: int) -> None:
    """Raise RecordError unless the record was written for this place."""
    if header.container != container or header.offset != offset:
        raise RecordError("place", "a record of another place")


assert _FIXED.size <= FIXED_BYTES, "the fixed part has grown over its room"
