"""Plain pages are believed without being decoded: never more than the long way believes."""

from __future__ import annotations

import errno
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from numpy.typing import NDArray

from statewise.kernels.blocks import BlockRows
from statewise.runtime.tiers.blocks import FileRun
from statewise.runtime.tiers.buffers import Bytes, Slabs
from statewise.runtime.tiers.copies import Copier, LoadPage
from statewise.runtime.tiers.disk import DiskTier
from statewise.runtime.tiers.disk_plain import plain_headers
from statewise.runtime.tiers.files import Files
from statewise.runtime.tiers.page import NO_KEY, GroupShape, PageAddress
from statewise.runtime.tiers.record import (
    FIXED_BYTES,
    Header,
    decode_header,
    encode_header,
)
from statewise.runtime.tiers.store import Outcome
from support.memory_files import quick_folder
from support.native_kernels import needs_native
from support.tier_blocks import ArrayBlocks
from support.tier_pages import (
    FULL,
    SHAPES,
    WINDOW,
    ManualClock,
    addresses,
    open_disk,
    payload_of,
    record_of,
    store_pages,
)

PLACE = (b"c" * 16, 8192)
FIELDS = {  # of the fixed part: first byte and bytes of those that differ from page to page
    "body_sum": (56, 8), "position": (80, 8), "num_tokens": (88, 4), "created_s": (112, 8),
    "base": (120, 16), "nonce": (160, 12),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with quick_folder(tmp_path) as found:
        yield found


def header() -> tuple[bytearray, int, PageAddress]:
    """A header of a plain page of FULL, its checksum, and the page's address."""
    (address,) = addresses(1)
    page = replace(record_of(address, FULL, payload_of(address, FULL)), dependency=3)
    size = FULL.block_bytes
    whole = Header(page, FULL.stamp, FULL.num_layers, FULL.page_size, size, size, 7)
    data, checksum = encode_header(whole.at(*PLACE))
    return bytearray(data), checksum, address


class Belief:
    """Whether headers are believed that should be `header()`."""

    def __init__(self, shape: GroupShape = FULL) -> None:
        self.data, self.checksum, self.address = header()
        self.plain = plain_headers(shape)
        self.contents = (decode_header(self.data).page.content, 3)

    def __call__(
        self,
        data: bytearray | None = None,
        checksum: int = 0,
        key: bytes = b"",
        contents: tuple[int, int] = (0, 0),
        place: tuple[bytes, int] = PLACE,
    ) -> bool:
        expected = self.plain.expected(
            checksum or self.checksum,
            key or self.address.key,
            contents if any(contents) else self.contents,
            place,
        )
        return self.plain.is_header(memoryview(self.data if data is None else data), expected)


def test_a_header_as_it_was_written_is_believed() -> None:
    believes = Belief()
    assert believes.plain.header_bytes == len(believes.data)
    assert believes()


def test_every_single_bit_of_a_known_header_matters() -> None:
    believes = Belief()
    data = believes.data
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        assert not believes(), bit
        data[bit // 8] ^= 1 << bit % 8
    assert believes()


def test_a_header_that_says_something_else_is_not_believed_whatever_the_index_holds() -> None:
    """Each byte changed, the checksum made right in header and index: only what differs from page
    to page may differ, and whatever is believed here is believed the long way."""
    believes = Belief()
    free = {i for start, size in FIELDS.values() for i in range(start, start + size)}
    believed = set()
    for at in range(len(believes.data)):
        changed = bytearray(believes.data)
        changed[at] ^= 0x11
        checksum = xxhash.xxh3_64_intdigest(memoryview(changed)[16:])
        if at not in range(8, 16):
            changed[8:16] = checksum.to_bytes(8, "little")
        if believes(changed, checksum):
            believed.add(at)
            known = decode_header(changed)
            page = known.page
            assert (page.content, page.dependency) == believes.contents
            assert (page.address.key, page.address.group) == (believes.address.key, FULL.name)
            assert (known.container, known.offset) == PLACE
    unused = range(184, FIXED_BYTES)
    assert believed == free | {*unused, *range(believes.plain.digests_at, len(believes.data))}


@pytest.mark.parametrize(
    "shape",
    [
        replace(FULL, name="fuII"),
        replace(FULL, stamp=replace(FULL.stamp, weights_epoch=1)),
        replace(FULL, num_layers=4),
        replace(FULL, layer_bytes=1001),
        replace(FULL, page_size=8),
        replace(FULL, item_bytes=4),
    ],
)
def test_headers_of_another_shape_are_not_believed(shape: GroupShape) -> None:
    assert not Belief(shape)()


@pytest.mark.parametrize(
    "known",
    [
        {"place": (b"d" * 16, 8192)}, {"place": (b"c" * 16, 4096)}, {"key": NO_KEY},
        {"contents": (1, 3)}, {"checksum": 1},
    ],
)  # fmt: skip
def test_a_header_of_another_place_key_or_content_is_not_believed(known: dict[str, Any]) -> None:
    assert not Belief()(**known)


# ------------------------------------------------------------------ over files


class NativeBlocks(ArrayBlocks):
    """Takes rows straight from files, by the native library, as pools in memory do."""

    num_reads = 0

    def write_from_file(
        self, group: int, blocks: Sequence[int], run: FileRun, buffer: Bytes, heads: Bytes
    ) -> NDArray[np.uint64]:
        self.num_reads += 1
        shape, pool = self.shapes[group], self.pools[group]
        size = (len(pool), shape.layer_bytes)
        layers = [torch.full(size, 0xEE, dtype=torch.uint8) for _ in range(shape.num_layers)]
        wanted = np.array(blocks, dtype=np.int32)
        digests = BlockRows(layers).read_records(
            wanted, run.fd, run.offset, run.record_bytes, buffer, heads
        )
        landed = list(blocks)[: len(digests)]
        pool[landed] = torch.cat(layers, dim=1).numpy()[landed]
        if not landed:
            return digests
        assert (digests == self._digests(group, landed)).all()
        self.after_write(group, landed)
        return self._digests(group, landed)


BLOCKS = [ArrayBlocks, pytest.param(NativeBlocks, marks=needs_native)]


class Loads:
    """Pages of FULL on disk, and blocks to load them into."""

    def __init__(
        self,
        directory: Path,
        count: int = 4,
        files: Files | None = None,
        kind: type[ArrayBlocks] = ArrayBlocks,
    ) -> None:
        self.disk: DiskTier = open_disk(directory, files=files)
        self.where = addresses(count)
        self.handles = store_pages(self.disk, self.where)
        self.blocks = kind(SHAPES, count)
        self.copier = Copier(SHAPES, self.blocks, ManualClock())
        self.rows = self.disk._catalog.rows_of(self.handles)
        (self.path,) = (directory / "extents").glob("*.swx")

    def load(self, pages: Sequence[int]) -> list[Outcome]:
        """Load pages into blocks of their numbers; what counts as loaded must be right."""
        self.blocks.pools[0][:] = 0xEE
        wanted = [LoadPage(0, i, self.handles[i], self.where[i].key) for i in pages]
        (step,) = self.copier.load(self.disk, wanted)
        outcomes = [result.outcome for result in step.run()]
        for i, outcome in zip(pages, outcomes, strict=True):
            if outcome is Outcome.OK:
                assert (self.blocks.pools[0][i] == payload_of(self.where[i], FULL)).all()
        assert not self.disk._buffers.slabs.num_in_use
        return outcomes

    def flip(self, page: int, at: int) -> None:
        row = self.rows[page]
        assert row is not None
        with self.path.open("r+b", buffering=0) as file:
            file.seek(row.offset + at)
            (byte,) = file.read(1)
            file.seek(row.offset + at)
            file.write(bytes([byte ^ 1 << at % 8]))

    def know_again(self, page: int) -> None:
        """Have the index name a page that was dropped."""
        row = self.rows[page]
        assert row is not None
        (self.handles[page],) = self.disk._catalog.add([row])


def flips(
    folder: Path, offsets: Sequence[int], others: Sequence[int], kind: type[ArrayBlocks]
) -> None:
    """Flip bits of page 1, one after the other, and load it together with `others`."""
    loads = Loads(folder / "c", kind=kind)
    for at in offsets:
        loads.flip(1, at)
        good = at >= 4096 + FULL.block_bytes  # the padding of the body is not part of a page
        found = loads.load([1, *others])
        assert found == [Outcome.OK if good else Outcome.CORRUPT] + [Outcome.OK] * len(others), at
        loads.flip(1, at)
        loads.know_again(1)
    assert loads.load([0, 1, 2, 3]) == [Outcome.OK] * 4
    loads.disk.close()


@pytest.mark.parametrize("kind", BLOCKS)
def test_bits_of_a_record_matter(folder: Path, kind: type[ArrayBlocks]) -> None:
    """F21: what is damaged on the medium costs its own page only, and is never handed over."""
    flips(folder, [*range(0, 320, 7), *range(320, 8192, 331)], [0, 2, 3], kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", BLOCKS)
def test_every_byte_of_a_header_matters(folder: Path, kind: type[ArrayBlocks]) -> None:
    flips(folder, range(4096), [], kind)


ODD = [  # sizes that fit neither words, lines, sectors nor the pieces that are read at a time
    GroupShape("bytes", FULL.stamp, 1, 1, 4, 1),
    GroupShape("odd", FULL.stamp, 3, 1001, 4, 1),
    GroupShape("large", FULL.stamp, 3, 350_003, 4, 1),
    GroupShape("long-header", FULL.stamp, 700, 73, 4, 1),
    GroupShape("n" * 5000, FULL.stamp, 2, 4096, 4, 2),
]


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("shape", ODD, ids=lambda shape: shape.name[:12])
@pytest.mark.parametrize("direct", [True, False])
def test_pages_of_any_size_come_back(
    folder: Path, kind: type[ArrayBlocks], shape: GroupShape, direct: bool
) -> None:
    """What is read ahead ends within the file, and at the last extent's last byte."""
    count = 5
    disk = open_disk(folder / "c", shapes=[shape], extent=3 << 20, files=Files(direct))
    where = addresses(count, shape)
    handles = store_pages(disk, where, shape)
    disk.close()
    disk = open_disk(folder / "c", shapes=[shape], extent=3 << 20, files=Files(direct))
    handles = disk.find([address.key for address in where])
    blocks = kind([shape], count + 1)
    copier = Copier([shape], blocks, ManualClock())
    wanted = [LoadPage(0, count - i, handles[i], where[i].key) for i in range(count)]
    for step in copier.load(disk, wanted):
        assert all(result.outcome is Outcome.OK for result in step.run())
    for i, address in enumerate(where):
        assert (blocks.pools[0][count - i] == payload_of(address, shape)).all()
    assert (blocks.pools[0][0] == 0xEE).all(), "nobody's block"
    counters = disk.status().counters
    assert counters["pages_read"] == count
    assert counters["bytes_read"] == count * shape.block_bytes
    assert not counters.get("corrupt")
    if isinstance(blocks, NativeBlocks):
        assert blocks.num_reads
    disk.close()


@pytest.mark.parametrize("kind", BLOCKS)
def test_cut_at_every_sector(folder: Path, kind: type[ArrayBlocks]) -> None:
    """Truncation under open files: what is left comes back, what is not is never handed over."""
    loads = Loads(folder / "c", kind=kind)
    size = 4096 + 4 * 8192
    for length in range(size, -1, -512):
        Files().truncate(loads.path, length)
        whole = max(0, length - 4096) // 8192
        assert loads.load([0, 1, 2, 3]) == [Outcome.OK] * whole + [Outcome.CORRUPT] * (4 - whole)
        for page in range(whole, 4):
            loads.know_again(page)
    loads.disk.close()


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("body_only", [False, True])
def test_a_record_in_anothers_place_is_not_loaded(
    folder: Path, kind: type[ArrayBlocks], body_only: bool
) -> None:
    """Swapped, and duplicated: a whole record, or its body under another's header."""
    loads = Loads(folder / "c", kind=kind)
    whole = loads.path.read_bytes()
    skip = 4096 if body_only else 0
    for a, b in [(0, 1), (3, 1), (2, 2)]:
        data = bytearray(whole)
        for to, source in ((a, b), (b, a)) if a != b else ((0, 3),):
            start, other = 4096 + to * 8192, 4096 + source * 8192
            data[start + skip : start + 8192] = whole[other + skip : other + 8192]
        loads.path.write_bytes(data)
        moved = {a, b} if a != b else {0}
        found = loads.load([0, 1, 2, 3])
        assert {i for i in range(4) if found[i] is Outcome.CORRUPT} == moved
        assert found.count(Outcome.OK) == 4 - len(moved)
        for page in moved:
            loads.know_again(page)
    loads.disk.close()


@pytest.mark.parametrize("kind", BLOCKS)
def test_pages_are_read_together_and_counted(folder: Path, kind: type[ArrayBlocks]) -> None:
    loads = Loads(folder / "c", 8, kind=kind)
    keys = [address.key for address in loads.where]
    (run,) = loads.disk.plain_runs("full", loads.handles, keys)
    assert run.indices == list(range(8))
    shuffled = [3, 0, 7, 1, 2, 6, 5, 4]
    assert loads.load(shuffled) == [Outcome.OK] * 8
    if isinstance(loads.blocks, NativeBlocks):
        assert loads.blocks.num_reads == 1
    counters = loads.disk.status().counters
    assert counters["pages_read"] == 8
    assert counters["bytes_read"] == 8 * FULL.block_bytes
    loads.disk.close()


def test_an_index_that_errs_about_the_group_is_not_followed(folder: Path) -> None:
    """A row of one group is no larger than that group's pages: nothing else may be copied."""
    loads = Loads(folder / "c")
    row = loads.rows[1]
    assert row is not None
    loads.disk._catalog.add([row._replace(group=WINDOW.name)])
    assert loads.load([0, 1, 2, 3]).count(Outcome.OK) == 3
    loads.disk.close()


@pytest.mark.parametrize(
    "change",
    [
        {"header_sum": 5}, {"offset": 12288 + 4096}, {"record_bytes": 12288},
        {"header_bytes": 8192}, {"codec": 1}, {"sealing": 1},
    ],
)  # fmt: skip
def test_an_index_that_errs_is_not_followed(folder: Path, change: dict[str, int]) -> None:
    loads = Loads(folder / "c")
    row = loads.rows[1]
    assert row is not None
    loads.disk._catalog.add([row._replace(**change)])
    found = loads.load([0, 1, 2, 3])  # asserts that what counts as loaded is right
    assert [found[i] for i in (0, 2, 3)] == [Outcome.OK] * 3
    can_tell = change.keys() & {"header_sum", "offset", "record_bytes", "codec"}
    assert found[1] is Outcome.CORRUPT or not can_tell
    loads.disk.close()


@pytest.mark.parametrize("kind", BLOCKS)
def test_what_an_earlier_read_left_in_a_buffer_is_not_taken_for_read(
    folder: Path, kind: type[ArrayBlocks]
) -> None:
    loads = Loads(folder / "c", kind=kind)
    assert loads.load([0, 1, 2, 3]) == [Outcome.OK] * 4
    row = loads.rows[2]
    assert row is not None
    Files().truncate(loads.path, row.offset)
    assert loads.load([0, 1, 2, 3]) == [Outcome.OK] * 2 + [Outcome.CORRUPT] * 2
    loads.know_again(2)
    assert loads.load([2]) == [Outcome.CORRUPT]
    loads.disk.close()


class Moody(Files):
    """Fails reads when told to."""

    failures = 0

    def read(self, fd: int, buffers: Sequence[np.ndarray], offset: int) -> int:
        if self.failures > 0:
            self.failures -= 1
            raise OSError(errno.EIO, "injected")
        return super().read(fd, buffers, offset)


def test_a_read_that_failed_once_is_tried_the_long_way(folder: Path) -> None:
    files = Moody()
    assert files.has_own_reads
    assert not Files().has_own_reads
    loads = Loads(folder / "c", files=files, kind=NativeBlocks)
    files.failures = 1
    assert loads.load([0, 1, 2, 3]) == [Outcome.OK] * 4
    files.failures = 2
    assert loads.load([3]) == [Outcome.FAILED]
    assert loads.load([0, 1, 2, 3]) == [Outcome.OK] * 4, "nothing was dropped"
    loads.disk.close()


@pytest.mark.parametrize("kind", BLOCKS)
def test_damage_on_the_way_costs_a_second_read_and_no_page(
    folder: Path, kind: type[ArrayBlocks]
) -> None:
    """F22: a bit that flips between medium and block, once."""
    loads = Loads(folder / "c", kind=kind)
    struck = []

    def strike(group: int, blocks: Sequence[int]) -> None:
        if not struck:
            struck.append(blocks)
            loads.blocks.pools[group][2, 77] ^= 4

    loads.blocks.after_write = strike
    assert loads.load([0, 1, 2, 3]) == [Outcome.OK] * 4
    assert loads.disk.status().counters.get("corrupt", 0) == 0
    loads.disk.close()


def test_encoded_pages_take_the_long_way(folder: Path) -> None:
    disk = open_disk(folder / "c", codec="zstd")
    where = addresses(2)
    handles = store_pages(disk, where)
    rows = disk._catalog.rows_of(handles)
    num_plain = sum(row is not None and not row.codec for row in rows)
    found = list(disk.plain_runs("full", handles, [address.key for address in where]))
    assert sum(len(run.indices) for run in found) == num_plain
    disk.close()


def test_buffers_that_are_not_kept_are_given_back_at_once() -> None:
    """Memory of large reads must not wait for the garbage collector."""
    slabs = Slabs(4096, num_kept=1)
    kept, large = slabs.take(4096), slabs.take(8192)
    held = [weakref.ref(slab) for slab in (kept, large)]
    for slab, count in ((kept, 1), (large, 2)):
        rows = slab.even_rows(count, 0, 4096, 4000, "full")
        assert [row.address - slab.address for row in rows] == [0, 4096][:count]
        assert slab.even_rows(count, 0, 4096, 4000, "full")[0] is rows[0], "kept for the next time"
        slab.give_back(2 * count)
    del kept, large, slab, rows
    assert [ref() is None for ref in held] == [False, True]
