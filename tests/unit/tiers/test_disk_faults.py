"""Damage to real files, and a file system that fails: never wrong bytes, never an exception."""

from __future__ import annotations

import errno
import logging
import resource
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from statewise.runtime.tiers.buffers import Bytes
from statewise.runtime.tiers.disk import DiskTier
from statewise.runtime.tiers.disk_index import FILE_NAME
from statewise.runtime.tiers.files import Files
from statewise.runtime.tiers.page import PageAddress
from statewise.runtime.tiers.store import NO_HANDLE, Outcome
from support.memory_files import quick_folder
from support.tier_faults import KINDS, Crash, FaultyFiles, abandon, flip_bit
from support.tier_pages import FULL, ManualClock, addresses, check_fetch, open_disk, store_pages

RECORD = 8192  # header and payload of a page of FULL
PAGES = 4


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """A folder on files in memory where there are such."""
    with quick_folder(tmp_path) as found:
        yield found


@pytest.fixture
def where() -> list[PageAddress]:
    return addresses(PAGES)


@pytest.fixture
def stored(tmp_path: Path, where: list[PageAddress]) -> Path:
    """A closed disk cache of four pages in one extent."""
    disk = open_disk(tmp_path / "c")
    store_pages(disk, where)
    disk.close()
    return tmp_path / "c"


def extent_of(directory: Path) -> Path:
    (path,) = (directory / "extents").glob("*.swx")
    return path


def outcomes(directory: Path, where: list[PageAddress]) -> tuple[list[Outcome], dict[str, int]]:
    """Reopen, fetch by key (right bytes are asserted), and say what came of it."""
    disk = open_disk(directory)
    try:
        found = check_fetch(disk, disk.find([a.key for a in where]), where, FULL)
        return found, disk.status().counters
    finally:
        disk.close()


def changed_copies(
    stored: Path, tmp_path: Path
) -> Iterator[Callable[[Callable[[Path], None]], Path]]:
    """Fresh copies of a cache, one after the other, each changed by a function."""
    for i in range(1 << 30):
        target = tmp_path / f"copy{i}"

        def change(how: Callable[[Path], None], target: Path = target) -> Path:
            shutil.copytree(stored, target)
            how(extent_of(target))
            return target

        yield change
        shutil.rmtree(target)


@pytest.mark.slow
def test_every_byte_of_a_record_header_matters(
    stored: Path, tmp_path: Path, where: list[PageAddress]
) -> None:
    """F21 on disk: any flipped bit costs at most the page it is in, and is counted."""
    place = 4096 + RECORD  # the second page
    used = [*range(0, 184, 2), *range(184, 320, 16), *range(320, 4096, 512)]
    for offset, change in zip(used, changed_copies(stored, tmp_path), strict=False):
        bit = 8 * (place + offset) + offset % 8
        found, counters = outcomes(change(lambda path, bit=bit: flip_bit(path, bit)), where)
        assert found == [Outcome.OK, Outcome.CORRUPT, Outcome.OK, Outcome.OK], offset
        assert counters["corrupt"] == 1


def test_every_part_of_a_payload_matters(
    stored: Path, tmp_path: Path, where: list[PageAddress]
) -> None:
    place = 4096 + 2 * RECORD + 4096
    for offset, change in zip(range(0, 4096, 97), changed_copies(stored, tmp_path), strict=False):
        bit = 8 * (place + offset) + offset % 8
        found, counters = outcomes(change(lambda path, bit=bit: flip_bit(path, bit)), where)
        in_payload = offset < FULL.block_bytes
        assert found[2] is (Outcome.CORRUPT if in_payload else Outcome.OK)
        assert found[:2] + found[3:] == [Outcome.OK] * 3
        assert counters.get("corrupt_payload", 0) == in_payload


def test_a_damaged_extent_header_costs_the_extent(
    stored: Path, tmp_path: Path, where: list[PageAddress]
) -> None:
    for offset, change in zip(range(0, 4096, 61), changed_copies(stored, tmp_path), strict=False):
        found, _ = outcomes(change(lambda path, at=offset: flip_bit(path, 8 * at + 3)), where)
        assert found == [Outcome.MISSING] * PAGES


def test_truncation_at_every_sector(stored: Path, tmp_path: Path, where: list[PageAddress]) -> None:
    size = extent_of(stored).stat().st_size
    assert size == 4096 + PAGES * RECORD
    steps = range(0, size, 512)
    for length, change in zip(steps, changed_copies(stored, tmp_path), strict=False):
        found, _ = outcomes(change(lambda path, n=length: Files().truncate(path, n)), where)
        whole = max(0, length - 4096) // RECORD
        assert found == [Outcome.OK] * whole + [Outcome.MISSING] * (PAGES - whole), length


def test_truncation_while_it_is_open(tmp_path: Path, where: list[PageAddress]) -> None:
    for length in range(0, 4096 + PAGES * RECORD, 2048):
        disk = open_disk(tmp_path / str(length))
        handles = store_pages(disk, where)
        Files().truncate(extent_of(tmp_path / str(length)), length)
        whole = max(0, length - 4096) // RECORD
        found = check_fetch(disk, handles, where, FULL)
        assert found == [Outcome.OK] * whole + [Outcome.CORRUPT] * (PAGES - whole)
        assert disk.status().counters.get("corrupt", 0) == PAGES - whole
        assert check_fetch(disk, handles, where, FULL).count(Outcome.OK) == whole
        disk.close()


def record_at(path: Path, page: int, *, body_only: bool = False) -> tuple[int, bytes]:
    start = 4096 + page * RECORD + (4096 if body_only else 0)
    end = 4096 + (page + 1) * RECORD
    return start, path.read_bytes()[start:end]


@pytest.mark.parametrize("body_only", [False, True])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("index", ["kept", "lost"])
def test_swapped_and_duplicated_pages(
    stored: Path, where: list[PageAddress], body_only: bool, both: bool, index: str
) -> None:
    """A record, or a body, in another's place is not believed, with the index and without."""
    path = extent_of(stored)
    (start1, data1) = record_at(path, 1, body_only=body_only)
    (start2, data2) = record_at(path, 2, body_only=body_only)
    with path.open("r+b") as file:
        file.seek(start2)
        file.write(data1)
        if both:
            file.seek(start1)
            file.write(data2)
    if index == "lost":
        (stored / FILE_NAME).unlink()
    found, _ = outcomes(stored, where)
    assert found[0] is Outcome.OK
    assert found[3] is Outcome.OK
    assert found[2] in (Outcome.CORRUPT, Outcome.MISSING)
    assert (found[1] is Outcome.OK) == (not both)


def test_a_stale_index_with_new_data(tmp_path: Path) -> None:
    directory = tmp_path / "c"
    old, new = addresses(4), addresses(40, seed=2)
    disk = open_disk(directory, budget=300 << 10, extent=64 << 10)
    store_pages(disk, old)
    disk.close()
    shutil.copy(directory / FILE_NAME, tmp_path / "index")
    disk = open_disk(directory, budget=300 << 10, extent=64 << 10)
    store_pages(disk, new)
    disk.close()
    for left in directory.glob(FILE_NAME + "*"):
        left.unlink()
    shutil.copy(tmp_path / "index", directory / FILE_NAME)
    found, _ = outcomes(directory, new)
    assert found.count(Outcome.OK) > 20, "extents that the index does not know are scanned"
    assert set(found) <= {Outcome.OK, Outcome.MISSING}
    assert set(outcomes(directory, old)[0]) <= {Outcome.OK, Outcome.MISSING}


def test_a_new_index_with_old_data(tmp_path: Path) -> None:
    directory = tmp_path / "c"
    old, new = addresses(4), addresses(20, seed=2)
    disk = open_disk(directory)
    store_pages(disk, old)
    disk.close()
    shutil.copytree(directory / "extents", tmp_path / "extents")
    disk = open_disk(directory)
    store_pages(disk, new)
    disk.close()
    shutil.rmtree(directory / "extents")
    shutil.copytree(tmp_path / "extents", directory / "extents")
    assert outcomes(directory, old)[0] == [Outcome.OK] * 4
    found, counters = outcomes(directory, new)
    assert found == [Outcome.MISSING] * 20
    assert "corrupt" not in counters


def test_an_extent_of_another_cache_under_a_known_number(tmp_path: Path) -> None:
    mine, theirs = addresses(4), addresses(4, seed=5)
    for name, pages in (("a", mine), ("b", theirs)):
        disk = open_disk(tmp_path / name)
        store_pages(disk, pages)
        disk.close()
    shutil.copy(extent_of(tmp_path / "b"), extent_of(tmp_path / "a"))
    assert outcomes(tmp_path / "a", theirs)[0] == [Outcome.OK] * 4, "scanned: they are whole"
    assert outcomes(tmp_path / "a", mine)[0] == [Outcome.MISSING] * 4


@pytest.mark.slow
def test_a_damaged_index_never_gives_wrong_pages(
    stored: Path, tmp_path: Path, where: list[PageAddress]
) -> None:
    size = (stored / FILE_NAME).stat().st_size
    seen: Counter[Outcome] = Counter()
    for offset, change in zip(range(0, size, 97), changed_copies(stored, tmp_path), strict=False):
        target = change(lambda _path: None)
        flip_bit(target / FILE_NAME, 8 * offset + offset % 8)
        seen.update(outcomes(target, where)[0])
    assert seen[Outcome.OK] > seen.total() // 2
    assert set(seen) <= {Outcome.OK, Outcome.MISSING, Outcome.CORRUPT}


@pytest.mark.parametrize("size", [0, 1, 100, 4096, 20000])
def test_an_index_that_is_no_database(stored: Path, where: list[PageAddress], size: int) -> None:
    (stored / FILE_NAME).write_bytes(b"\xa5" * size)
    assert outcomes(stored, where)[0] == [Outcome.OK] * PAGES


def scenario(disk: DiskTier) -> None:
    """Writes over several extents, reads, evictions; whatever fails, nothing is raised."""
    for seed in range(4):
        where = addresses(5, seed=seed)
        handles = store_pages(disk, where)
        check_fetch(disk, handles, where, FULL)


def check_after(directory: Path) -> int:
    """Reopen with a file system that works: right bytes or none, and the tier works again."""
    disk = open_disk(directory, budget=150 << 10, extent=64 << 10)
    num_ok = 0
    for seed in range(4):
        where = addresses(5, seed=seed)
        found = check_fetch(disk, disk.find([a.key for a in where]), where, FULL)
        assert set(found) <= {Outcome.OK, Outcome.MISSING, Outcome.CORRUPT}
        num_ok += found.count(Outcome.OK)
    fresh = addresses(3, seed=99)
    assert check_fetch(disk, store_pages(disk, fresh), fresh, FULL) == [Outcome.OK] * 3
    disk.close()
    return num_ok


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "then", "stride"), [(errno.EIO, 0, 1), (errno.EIO, 1000, 5), (errno.ENOSPC, 3, 3)]
)
def test_each_call_fails_in_turn(tmp_path: Path, code: int, then: int, stride: int) -> None:
    """F12: what a failed write was to store is not found, whichever call failed.

    Runs of failures begin at every `stride`-th call: neighbours fail nearly the same calls.
    """
    for fail_at in range(0, 1000, stride):
        directory = tmp_path / str(fail_at)
        files = FaultyFiles(10**9, code, KINDS, then, seed=fail_at)
        disk = open_disk(directory, budget=150 << 10, extent=64 << 10, files=files)
        files.fail_at = files.num_calls + fail_at
        scenario(disk)
        disk.close()
        check_after(directory)
        shutil.rmtree(directory)
        if not files.has_failed:
            assert fail_at > 20
            return
    raise AssertionError("the scenario never got through")


@pytest.mark.slow
def test_a_crash_at_each_call(tmp_path: Path) -> None:
    """Each page is whole or absent, wherever the program ended and whatever was half written."""
    kept = []
    for fail_at in range(1000):
        directory = tmp_path / str(fail_at)
        files = FaultyFiles(10**9, None, seed=fail_at)
        disk = open_disk(directory, budget=150 << 10, extent=64 << 10, files=files)
        files.fail_at = files.num_calls + fail_at
        opened = disk._opened
        assert opened is not None
        try:
            scenario(disk)
            disk.close()
        except Crash:
            abandon(opened)
        kept.append(check_after(directory))
        shutil.rmtree(directory)
        if not files.has_failed:
            assert kept[-1] > kept[0]
            return
    raise AssertionError("the scenario never got through")


def test_a_full_disk_degrades_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A limit on file sizes stands in for a full disk: the kernel refuses, as it would there."""
    clock = ManualClock()
    first, more = addresses(3), addresses(30, seed=1)
    disk = open_disk(tmp_path / "c", extent=64 << 10, clock=clock, retry_s=60.0)
    handles = store_pages(disk, first)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40 << 10, hard))
    try:
        with caplog.at_level(logging.WARNING):
            refused = store_pages(disk, more)
            assert NO_HANDLE in refused
            assert store_pages(disk, addresses(3, seed=2)) == [NO_HANDLE] * 3
        assert disk.status().state == "read only"
        assert len(caplog.records) == 1
        assert check_fetch(disk, handles, first, FULL) == [Outcome.OK] * 3
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store_pages(disk, more[:1]) == [NO_HANDLE], "not yet tried again"
    clock.now += 61
    assert check_fetch(disk, store_pages(disk, more), more, FULL) == [Outcome.OK] * 30
    assert disk.status().state == "online"
    disk.close()


def test_unreadable_pages_are_failures_and_then_the_tier_is_offline(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, where: list[PageAddress]
) -> None:
    clock = ManualClock()
    files = FaultyFiles(0, errno.EIO, kinds=("read",), then=10**6)
    files.fail_at = 10**9
    disk = open_disk(tmp_path / "c", clock=clock, files=files)
    handles = store_pages(disk, where)
    files.fail_at = files.num_calls
    with caplog.at_level(logging.WARNING):
        for handle, address in zip(handles, where, strict=True):
            assert check_fetch(disk, [handle], [address], FULL) == [Outcome.FAILED]
        assert disk.status().state == "offline"
        assert disk.find([a.key for a in where]) == [NO_HANDLE] * PAGES
        assert check_fetch(disk, handles, where, FULL) == [Outcome.MISSING] * PAGES
    assert len(caplog.records) == 1
    files.fail_at = 10**9
    clock.now += 61
    assert check_fetch(disk, handles, where, FULL) == [Outcome.OK] * PAGES
    assert disk.status().state == "online"
    disk.close()


class BadPlace(Files):
    """Reads that touch one page of the medium fail, as over a bad sector."""

    bad_at = 0
    num_failed = 0

    def read(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        size = sum(buffer.size for buffer in buffers)
        if offset <= self.bad_at < offset + size:
            self.num_failed += 1
            raise OSError(errno.EIO, "injected")
        return super().read(fd, buffers, offset)


@pytest.mark.parametrize("count", [2, 40])
def test_a_bad_place_costs_its_own_page_and_is_not_asked_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    """F1: a run of neighbours is one read, but not one loss, and no reason to go offline."""
    files = BadPlace()
    disk = open_disk(tmp_path / "c", files=files)
    where = addresses(count)
    handles = store_pages(disk, where)
    files.bad_at = 4096 + RECORD + 5000
    wanted = [Outcome.OK, Outcome.CORRUPT, *[Outcome.OK] * (count - 2)]
    with caplog.at_level(logging.WARNING):
        assert check_fetch(disk, handles, where, FULL) == wanted
        assert disk.status().state == "online"
        assert not caplog.records
    assert disk.status().counters["corrupt_unreadable"] == 1
    num_failed = files.num_failed
    assert check_fetch(disk, handles, where, FULL).count(Outcome.OK) == count - 1
    assert files.num_failed == num_failed, "it was dropped"
    assert NO_HANDLE not in store_pages(disk, where[1:2]), "and may be written elsewhere"
    assert check_fetch(disk, disk.find([a.key for a in where]), where, FULL) == [Outcome.OK] * count
    disk.close()


def test_a_medium_that_is_gone_is_not_asked_for_every_page(tmp_path: Path) -> None:
    files = FaultyFiles(10**9, errno.EIO, kinds=("read",), then=10**6)
    disk = open_disk(tmp_path / "c", files=files)
    where = addresses(60)
    handles = store_pages(disk, where)
    before = files.fail_at = files.num_calls
    assert check_fetch(disk, handles, where, FULL) == [Outcome.FAILED] * 60
    assert files.num_calls - before < 8
    assert disk.status().state == "offline"
    disk.close()


def test_a_vanished_directory_is_no_error(tmp_path: Path, where: list[PageAddress]) -> None:
    disk = open_disk(tmp_path / "c", extent=64 << 10)
    handles = store_pages(disk, where)
    disk.close()
    disk = open_disk(tmp_path / "c", extent=64 << 10)
    handles = disk.find([a.key for a in where])
    shutil.rmtree(tmp_path / "c")
    assert set(check_fetch(disk, handles, where, FULL)) <= {Outcome.MISSING, Outcome.FAILED}
    assert store_pages(disk, addresses(20, seed=3)) == [NO_HANDLE] * 20
    assert disk.status().state == "read only"
    disk.close()


def test_a_directory_that_others_made_anew_is_left_to_them(tmp_path: Path) -> None:
    """F20: a cache that was wiped and taken by another server while its first owner still runs."""
    clock = ManualClock()
    where, others = addresses(12), addresses(12, seed=1)
    first = open_disk(tmp_path / "c", budget=128 << 10, extent=64 << 10, clock=clock)
    store_pages(first, where)
    shutil.rmtree(tmp_path / "c")
    second = open_disk(tmp_path / "c", budget=128 << 10, extent=64 << 10)
    handles = store_pages(second, others)
    before = {path.name: path.stat().st_size for path in (tmp_path / "c" / "extents").iterdir()}
    for seed in range(2, 8):  # enough to seal, evict and delete
        assert store_pages(first, addresses(4, seed=seed)) == [NO_HANDLE] * 4
        clock.now += 61
    first.withdraw([address.key for address in where])
    assert first.collect() == 0
    first.close()
    after = {path.name: path.stat().st_size for path in (tmp_path / "c" / "extents").iterdir()}
    assert after == before
    assert check_fetch(second, handles, others, FULL) == [
        Outcome.MISSING if handle == NO_HANDLE else Outcome.OK for handle in handles
    ]
    second.close()
