"""Records: what was encoded is decoded, and nothing else is believed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from statewise.radix.stamp import Stamp
from statewise.runtime.tiers.page import PageAddress, PageRecord
from statewise.runtime.tiers.record import (
    FIXED_BYTES,
    Header,
    RecordError,
    body_sum,
    check_body,
    check_place,
    decode_header,
    encode_header,
    peek_sizes,
)

KEY = bytes(range(16))
GOLDEN_HEADER = 0x1C053CE94C2AB0BA
GOLDEN_EXTENT = 0x62BC1320F133264B
GOLDEN_KEY = "59eda5d4fa6c1c8da41d56ad9b7b7a9b"


def header_of(num_layers: int = 3, name: str = "full", **changes: object) -> Header:
    digests = np.arange(num_layers, dtype=np.uint64) * np.uint64(2**60)
    address = PageAddress(name, 4096, KEY, bytes(range(1, 17)))
    page = PageRecord(address, 16, digests, 2**64 - 1, 2**63, 123.5)
    stamp = Stamp("m", "v", "l", 3, "b")
    header = Header(page, stamp, num_layers, 16, 3000, 3000, 2**64 - 2)
    return replace(header, **changes)  # type: ignore[arg-type]


def same(a: Header, b: Header) -> bool:
    digests = (a.page.digests == b.page.digests).all()
    plain = np.empty(0, dtype=np.uint64)
    a = replace(a, page=replace(a.page, digests=plain), header_sum=0)
    b = replace(b, page=replace(b.page, digests=plain), header_sum=0)
    return bool(digests) and repr(a) == repr(b)


@pytest.mark.parametrize("num_layers", [1, 3, 61, 4000])
@pytest.mark.parametrize("name", ["full", "", "Überraschung" * 40])
def test_headers_survive(num_layers: int, name: str) -> None:
    header = header_of(num_layers, name, container=b"c" * 16, offset=8192, codec=2)
    data, checksum = encode_header(header)
    assert len(data) == header.header_bytes
    assert len(data) % 4096 == 0
    assert peek_sizes(data) == (len(data), header.record_bytes)
    decoded = decode_header(data)
    assert same(decoded, header)
    assert decoded.header_sum == checksum


def test_a_sealed_header_tells_no_digests() -> None:
    data, _ = encode_header(header_of(sealing=1))
    assert not decode_header(data).page.digests.any()


def test_every_single_bit_of_a_header_matters() -> None:
    data, _ = encode_header(header_of())
    damaged = bytearray(data)
    for bit in range(8 * len(data)):
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RecordError):
            decode_header(bytes(damaged))
        damaged[bit // 8] ^= 1 << bit % 8
    assert same(decode_header(bytes(damaged)), header_of())


@pytest.mark.parametrize("size", [0, 8, FIXED_BYTES - 1, FIXED_BYTES, 4095])
def test_short_headers_are_refused(size: int) -> None:
    data, _ = encode_header(header_of())
    with pytest.raises(RecordError) as caught:
        decode_header(data[:size])
    assert caught.value.kind == "truncated"


@pytest.mark.parametrize("kind", ["magic", "version"])
def test_foreign_records_are_told_from_damaged_ones(kind: str) -> None:
    data = bytearray(encode_header(header_of())[0])
    data[0 if kind == "magic" else 16] ^= 0xFF
    with pytest.raises(RecordError) as caught:
        decode_header(bytes(data))
    assert caught.value.kind == kind


def test_bodies_are_bound_to_their_key() -> None:
    body = bytes(3000)
    header = header_of(body_sum=body_sum(KEY, body))
    check_body(header, body, bytes(1096))
    for wrong, padding in [(body[:-1], b""), (b"\1" + body[1:], b""), (body, b"\0\1")]:
        with pytest.raises(RecordError):
            check_body(header, wrong, padding)
    assert body_sum(b"\1" + KEY[1:], body) != header.body_sum


def test_a_record_elsewhere_is_not_believed() -> None:
    header = header_of(container=b"c" * 16, offset=4096)
    check_place(header, b"c" * 16, 4096)
    for container, offset in [(b"d" * 16, 4096), (b"c" * 16, 8192)]:
        with pytest.raises(RecordError) as caught:
            check_place(header, container, offset)
        assert caught.value.kind == "place"


def test_sizes_that_contradict_each_other_are_refused() -> None:
    """A header with a right checksum and impossible numbers, as a bug would write it."""
    import struct

    import xxhash

    data, _ = encode_header(header_of())
    for offset, size, value in [(24, 4, 0), (24, 4, 1 << 21), (28, 4, 0), (32, 8, 1 << 50),
                                (92, 4, 1 << 31), (176, 4, 5), (180, 4, 4096)]:  # fmt: skip
        bad = bytearray(data)
        bad[offset : offset + size] = value.to_bytes(size, "little")
        struct.pack_into("<Q", bad, 8, xxhash.xxh3_64_intdigest(bytes(bad[16:])))
        with pytest.raises(RecordError):
            decode_header(bytes(bad))


def test_format_one_stays_what_it_is() -> None:
    """Golden numbers: a change of any byte of version 1 needs a new version."""
    from statewise.radix.key import Namespace
    from statewise.runtime.tiers.extents import encode_extent_header
    from statewise.runtime.tiers.page import GroupShape, PrefixChain

    _, checksum = encode_header(header_of(container=b"c" * 16, offset=8192))
    assert checksum == GOLDEN_HEADER
    extent = encode_extent_header(b"c" * 16, 1 << 20)
    assert int.from_bytes(extent[8:16], "little") == GOLDEN_EXTENT
    chain = PrefixChain(Namespace("salt", "adapter"), 2)
    chain.extend(b"".join(i.to_bytes(4, "little") for i in range(4)))
    shape = GroupShape("full", Stamp("m", "v", "l", 3, "b"), 2, 8, 2)
    assert chain.address(shape, 1).key.hex() == GOLDEN_KEY
