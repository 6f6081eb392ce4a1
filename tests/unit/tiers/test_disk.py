"""The disk tier: what was stored is found again, by the same model only, within its budget."""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from statewise.runtime.tiers import extents as extents_module
from statewise.runtime.tiers.body import Bodies, Keys
from statewise.runtime.tiers.disk_index import FILE_NAME, DiskIndex
from statewise.runtime.tiers.page import GroupShape
from statewise.runtime.tiers.store import NO_HANDLE, Loss, Outcome, TierError
from support.tier_pages import (
    FULL,
    SHAPES,
    WINDOW,
    ManualClock,
    addresses,
    check_fetch,
    open_disk,
    store_pages,
)

OK = Outcome.OK


def test_a_restart_finds_every_page(tmp_path: Path) -> None:
    full, window = addresses(30), addresses(10, WINDOW)
    disk = open_disk(tmp_path / "c")
    store_pages(disk, full)
    store_pages(disk, window, WINDOW)
    disk.close()
    disk = open_disk(tmp_path / "c")
    handles = disk.find([a.key for a in full])
    assert check_fetch(disk, handles, full, FULL) == [OK] * 30
    handles = disk.find([a.key for a in window])
    assert check_fetch(disk, handles, window, WINDOW) == [OK] * 10
    assert disk.status().pages_by_group == {"full": 30, "window": 10}
    disk.close()


@pytest.mark.parametrize(
    "change",
    [
        {"stamp": replace(FULL.stamp, model_fingerprint="other weights")},
        {"stamp": replace(FULL.stamp, layout_id="other layout")},
        {"stamp": replace(FULL.stamp, weights_epoch=1)},
        {"layer_bytes": 2000},
        {"num_layers": 6},
        {"page_size": 8},
    ],
)
def test_another_model_finds_nothing_and_reads_nothing_wrong(
    tmp_path: Path, change: dict[str, object]
) -> None:
    """F13, F35: after a restart with one thing changed every page is a clean miss."""
    other: GroupShape = replace(FULL, **change)  # type: ignore[arg-type]
    disk = open_disk(tmp_path / "c")
    mine = addresses(4)
    store_pages(disk, mine)
    disk.close()
    disk = open_disk(tmp_path / "c", shapes=(other,))
    theirs = addresses(4, other)
    assert disk.find([a.key for a in theirs]) == [NO_HANDLE] * 4
    handles = store_pages(disk, theirs, other)
    assert check_fetch(disk, handles, theirs, other) == [OK] * 4
    assert "corrupt" not in disk.status().counters
    disk.close()
    disk = open_disk(tmp_path / "c")
    assert check_fetch(disk, disk.find([a.key for a in mine]), mine, FULL) == [OK] * 4
    disk.close()


def test_salts_are_separate(tmp_path: Path) -> None:
    """F15: the same tokens under another salt are another page."""
    disk = open_disk(tmp_path / "c")
    store_pages(disk, addresses(4, salt="a"))
    assert disk.find([a.key for a in addresses(4, salt="b")]) == [NO_HANDLE] * 4
    disk.close()


def test_files_are_private(tmp_path: Path) -> None:
    disk = open_disk(tmp_path / "c")
    store_pages(disk, addresses(2))
    for path in [tmp_path / "c", *(tmp_path / "c").rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
    disk.close()


def test_a_second_opener_is_told_who_has_it(tmp_path: Path) -> None:
    """F20: two processes never share a directory."""
    disk = open_disk(tmp_path / "c")
    with pytest.raises(TierError, match=f"in use by process {os.getpid()}"):
        open_disk(tmp_path / "c")
    disk.close()
    disk.close()
    open_disk(tmp_path / "c").close()


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.doc").write_text("years of work")
    with pytest.raises(TierError, match="holds other files"):
        open_disk(tmp_path)
    (tmp_path / "format").write_text('{"format": "something"}')
    with pytest.raises(TierError, match="not of a disk cache"):
        open_disk(tmp_path)
    assert (tmp_path / "thesis.doc").read_text() == "years of work"
    assert not (tmp_path / "extents").exists()


def test_a_place_that_cannot_be_a_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(TierError, match="disk cache directory"):
        open_disk(tmp_path / "file")


def test_the_budget_holds_and_the_oldest_go_first(tmp_path: Path) -> None:
    """F27: no workload makes the files larger than the budget."""
    clock = ManualClock()
    disk = open_disk(tmp_path / "c", budget=400 << 10, extent=64 << 10, clock=clock)
    files = tmp_path / "c" / "extents"
    for seed in range(20):
        clock.now += 1
        where = addresses(9, seed=seed)
        handles = store_pages(disk, where)
        assert check_fetch(disk, handles, where, FULL) == [OK] * 9
        size = sum(path.stat().st_size for path in files.iterdir())
        assert size <= disk.status().used_bytes <= 400 << 10
    latest = disk.find([a.key for a in addresses(9, seed=19)])
    oldest = disk.find([a.key for a in addresses(9, seed=0)])
    assert NO_HANDLE not in latest
    assert oldest == [NO_HANDLE] * 9
    dropped = disk.pop_dropped()
    assert len(dropped) == disk.status().counters["evicted"]
    assert {why for *_, why in dropped} == {Loss.ROOM}
    assert disk.status().num_pages + len(dropped) == 180
    disk.close()


def test_hot_pages_survive_the_eviction_of_their_extent(tmp_path: Path) -> None:
    clock = ManualClock()
    disk = open_disk(tmp_path / "c", budget=400 << 10, extent=64 << 10, clock=clock)
    hot = addresses(1, seed=500)
    (handle,) = store_pages(disk, hot)
    for seed in range(20):
        clock.now += 1
        store_pages(disk, addresses(8, seed=seed))
        disk.touch([handle])
    assert disk.find([hot[0].key]) == [handle], "moved, and still the same handle"
    assert check_fetch(disk, [handle], hot, FULL) == [OK]
    assert disk.status().counters["compacted"] > 0
    disk.close()
    disk = open_disk(tmp_path / "c", budget=400 << 10, extent=64 << 10, clock=clock)
    assert check_fetch(disk, disk.find([hot[0].key]), hot, FULL) == [OK]
    disk.close()


def test_a_page_larger_than_the_budget_is_refused(tmp_path: Path) -> None:
    disk = open_disk(tmp_path / "c", budget=8192)
    assert store_pages(disk, addresses(2)) == [NO_HANDLE] * 2
    assert disk.status().counters["refused"] == 2
    disk.close()


def test_old_pages_are_not_found_and_collected(tmp_path: Path) -> None:
    clock = ManualClock()
    disk = open_disk(tmp_path / "c", clock=clock, ttl_s=100.0)
    where = addresses(5)
    handles = store_pages(disk, where)
    clock.now += 101
    assert disk.find([a.key for a in where]) == [NO_HANDLE] * 5
    assert disk.fetch(handles)[0].outcome is Outcome.MISSING
    fresh = addresses(3, seed=9)
    store_pages(disk, fresh, created_s=clock.now)
    disk.close()
    disk = open_disk(tmp_path / "c", clock=clock, ttl_s=100.0)
    assert disk.collect() > 0
    assert disk.status().counters["expired"] == 5
    assert [why for *_, why in disk.pop_dropped()] == [Loss.AGE] * 5
    assert disk.status().num_pages == 3
    handles = disk.find([a.key for a in fresh])
    assert check_fetch(disk, handles, fresh, FULL) == [OK] * 3
    disk.close()


def test_a_directory_that_was_not_made_to_its_end_is_made_anew(tmp_path: Path) -> None:
    """After a power failure the file that says whose it is may be there and empty."""
    where = addresses(3)
    directory = tmp_path / "c"
    disk = open_disk(directory)
    store_pages(disk, where)
    disk.close()
    (directory / "format").write_text("")
    disk = open_disk(directory)
    assert check_fetch(disk, disk.find([a.key for a in where]), where, FULL) == [OK] * 3
    disk.close()
    assert "statewise" in (directory / "format").read_text()
    other = tmp_path / "other"
    other.mkdir()
    (other / "format").touch()
    (other / "thesis.txt").touch()
    with pytest.raises(TierError, match=r"holds other files \(thesis\.txt"):
        open_disk(other)


def test_pages_that_are_too_old_already_are_not_written(tmp_path: Path) -> None:
    """A host tier's pages do not age: passed on, they would be written again and again."""
    clock = ManualClock()
    disk = open_disk(tmp_path / "c", clock=clock, ttl_s=100.0)
    clock.now += 101
    assert store_pages(disk, addresses(5)) == [NO_HANDLE] * 5
    fresh = addresses(2, seed=9)
    assert NO_HANDLE not in store_pages(disk, fresh, created_s=clock.now)
    status = disk.status()
    assert (status.num_pages, status.counters["pages_written"]) == (2, 2)
    assert status.counters["too_old"] == 5
    disk.close()


def test_freed_pages_are_gone_and_their_room_comes_back(tmp_path: Path) -> None:
    disk = open_disk(tmp_path / "c", extent=64 << 10)
    where = addresses(32)
    handles = store_pages(disk, where)
    disk.free(handles[::2] + handles[1:24:2])
    assert disk.pop_dropped() == []
    disk.close()
    disk = open_disk(tmp_path / "c", extent=64 << 10)
    assert disk.collect() > 0
    left = where[25::2]
    assert disk.status().num_pages == len(left)
    assert check_fetch(disk, disk.find([a.key for a in left]), left, FULL) == [OK] * len(left)
    disk.close()


def test_a_known_key_is_written_once(tmp_path: Path) -> None:
    disk = open_disk(tmp_path / "c")
    where = addresses(3)
    assert store_pages(disk, where) == store_pages(disk, where)
    assert store_pages(disk, where[:1] * 3) == disk.find([where[0].key]) * 3
    assert disk.status().counters["pages_written"] == 3
    disk.close()


def test_rows_come_back_to_their_arena(tmp_path: Path) -> None:
    disk = open_disk(tmp_path / "c", budget=8192)
    rows = disk.stage("full", 3)
    disk.discard(rows)
    store_pages(disk, addresses(3))
    assert check_fetch(disk, [5, 6], addresses(2), FULL) == [Outcome.MISSING] * 2
    assert all(arena.num_in_use == 0 for arena in disk._arenas.values())
    disk.close()


@pytest.mark.parametrize("direct_io", [True, False])
@pytest.mark.parametrize("codec", ["none", "shuffle-zstd"])
@pytest.mark.parametrize("keys", [None, Keys(bytes(32))])
def test_every_way_of_storing(
    tmp_path: Path, direct_io: bool, codec: str, keys: Keys | None
) -> None:
    bodies = Bodies(codec, keys)
    where = addresses(10, secret=bodies.secret)
    disk = open_disk(tmp_path / "c", bodies=bodies, direct_io=direct_io)
    handles = store_pages(disk, where, secret=bodies.secret)
    assert check_fetch(disk, handles, where, FULL) == [OK] * 10
    disk.close()
    disk = open_disk(tmp_path / "c", bodies=bodies, direct_io=direct_io)
    handles = disk.find([a.key for a in where])
    assert check_fetch(disk, handles, where, FULL) == [OK] * 10
    disk.close()


def test_sealed_pages_are_nothing_to_who_has_no_key(tmp_path: Path) -> None:
    bodies = Bodies("none", Keys(bytes(32)))
    where = addresses(4, secret=bodies.secret)
    disk = open_disk(tmp_path / "c", bodies=bodies)
    store_pages(disk, where, secret=bodies.secret)
    disk.close()
    disk = open_disk(tmp_path / "c")
    assert disk.status().counters == {"undecodable": 4}
    assert disk.find([a.key for a in addresses(4)]) == [NO_HANDLE] * 4
    assert disk.find([a.key for a in where]) == [NO_HANDLE] * 4
    disk.close()


def test_an_index_of_another_format_is_made_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    where = addresses(6)
    disk = open_disk(tmp_path / "c")
    store_pages(disk, where)
    disk.close()
    db = sqlite3.connect(tmp_path / "c" / FILE_NAME)
    db.execute("PRAGMA user_version = 99")
    db.close()
    with caplog.at_level(logging.WARNING):
        disk = open_disk(tmp_path / "c")
    assert caplog.text.count("made anew") == 1
    assert check_fetch(disk, disk.find([a.key for a in where]), where, FULL) == [OK] * 6
    assert disk.status().counters["pages_recovered"] == 6
    disk.close()


def test_extents_of_another_format_are_removed(tmp_path: Path) -> None:
    disk = open_disk(tmp_path / "c")
    store_pages(disk, addresses(3))
    disk.close()
    folder = tmp_path / "c" / "extents"
    (path,) = folder.iterdir()
    data = bytearray(path.read_bytes())
    import struct

    import xxhash

    data[16:18] = (2).to_bytes(2, "little")
    struct.pack_into("<Q", data, 8, xxhash.xxh3_64_intdigest(bytes(data[16:4096])))
    path.write_bytes(data)
    (folder / "readme.txt").write_text("not ours")
    disk = open_disk(tmp_path / "c")
    assert disk.status().counters["extents_foreign"] == 1
    assert disk.status().num_pages == 0
    assert [p.name for p in folder.iterdir()] == ["readme.txt"]
    disk.close()


def test_the_index_keeps_unsigned_numbers(tmp_path: Path) -> None:
    disk = open_disk(tmp_path / "c")
    where = addresses(40)
    handles = store_pages(disk, where)
    contents = [disk.content(a.key) for a in where]
    assert max(contents) > 1 << 63
    disk.close()
    index = DiskIndex(tmp_path / "c" / FILE_NAME, read_only=True)
    rows = {row.key: row for row in index.pages()}
    assert [rows[a.key].content for a in where] == contents
    assert [rows[a.key].position for a in where] == [a.position for a in where]
    index.close()
    assert len(handles) == 40


def test_recency_survives_a_restart(tmp_path: Path) -> None:
    clock = ManualClock()
    disk = open_disk(tmp_path / "c", clock=clock)
    handles = store_pages(disk, addresses(2))
    clock.now += 50
    disk.touch(handles[:1])
    disk.close()
    index = DiskIndex(tmp_path / "c" / FILE_NAME, read_only=True)
    used = {row.key: row.used_s for row in index.pages()}
    index.close()
    assert [used[a.key] for a in addresses(2)] == [1050.0, 1000.0]


def test_both_groups_share_extents(tmp_path: Path) -> None:
    disk = open_disk(tmp_path / "c", shapes=SHAPES)
    store_pages(disk, addresses(3))
    store_pages(disk, addresses(3, WINDOW), WINDOW)
    assert len(list((tmp_path / "c" / "extents").iterdir())) == 1
    disk.close()


def test_a_file_that_was_just_opened_is_not_closed_for_want_of_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All other files are being read: more stay open than are kept otherwise."""
    disk = open_disk(tmp_path / "c", extent=32 << 10)
    store_pages(disk, addresses(12))
    disk.close()
    monkeypatch.setattr(extents_module, "MAX_OPEN", 2)
    disk = open_disk(tmp_path / "c", extent=32 << 10)
    extents = disk._extents
    numbers = [extent.id for extent in extents.all()][:4]
    leased = [extents.lease(number) for number in numbers]
    assert len(leased) == 4
    assert all(extent.fd >= 0 for extent in leased)
    for extent in leased:
        extents.release(extent)
    extents.release(extents.lease(numbers[0]))
    assert sum(extent.fd >= 0 for extent in extents.all()) == 2
    disk.close()
