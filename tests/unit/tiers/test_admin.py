"""`statewise cache`: what an operator sees and can do."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from statewise.frontend.cli import main
from statewise.runtime.tiers.body import Bodies, Keys
from statewise.runtime.tiers.store import Outcome
from support.tier_faults import flip_bit
from support.tier_pages import FULL, WINDOW, addresses, check_fetch, open_disk, store_pages


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    disk = open_disk(tmp_path / "c")
    store_pages(disk, addresses(6))
    store_pages(disk, addresses(2, WINDOW), WINDOW)
    disk.close()
    return tmp_path / "c"


def damage(directory: Path, page: int) -> None:
    (path,) = (directory / "extents").iterdir()
    flip_bit(path, 8 * (4096 + page * 8192 + 4096 + 5))


def test_ls_shows_groups_beside_a_running_server(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = open_disk(cache)
    assert main(["cache", "ls", str(cache)]) == 0
    out = capsys.readouterr().out
    assert [line.split()[:2] for line in out.splitlines()[1:3]] == [["full", "6"], ["window", "2"]]
    assert "8 pages" in out
    disk.close()


def test_verify_finds_and_drops_damage(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "verify", str(cache)]) == 0
    assert "8 pages are whole" in capsys.readouterr().out
    damage(cache, 2)
    assert main(["cache", "verify", str(cache)]) == 1
    shown = capsys.readouterr()
    assert "1 damaged (body)" in shown.out
    assert "100%" in shown.err
    assert main(["cache", "verify", str(cache)]) == 0
    assert "7 pages are whole" in capsys.readouterr().out


def test_gc_drops_old_pages(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "gc", str(cache)]) == 0
    shown = capsys.readouterr()
    assert "0.0 MiB given back" in shown.out
    assert "100%" in shown.err
    assert main(["cache", "gc", str(cache), "--ttl-hours", "1"]) == 0
    assert "0.1 MiB given back" in capsys.readouterr().out
    assert main(["cache", "ls", str(cache)]) == 0
    assert "0 pages" in capsys.readouterr().out


@pytest.mark.parametrize("keys", [None, Keys(bytes(32))])
def test_what_is_exported_can_be_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], keys: Keys | None
) -> None:
    bodies = Bodies("none", keys)
    where = addresses(6, secret=bodies.secret)
    disk = open_disk(tmp_path / "c", bodies=bodies)
    store_pages(disk, where, secret=bodies.secret)
    disk.close()
    file = tmp_path / "pages.swx"
    assert main(["cache", "export", str(tmp_path / "c"), str(file)]) == 0
    assert "6 pages in" in capsys.readouterr().out
    assert file.stat().st_mode & 0o777 == 0o600
    assert main(["cache", "import", str(tmp_path / "d"), str(file)]) == 0
    assert "6 pages are new, 0 were known, 0 damaged" in capsys.readouterr().out
    disk = open_disk(tmp_path / "d", bodies=bodies)
    handles = disk.find([a.key for a in where])
    assert check_fetch(disk, handles, where, FULL) == [Outcome.OK] * 6
    disk.close()
    assert main(["cache", "import", str(tmp_path / "d"), str(file)]) == 0
    assert "0 pages are new, 6 were known" in capsys.readouterr().out


def test_damaged_pages_are_not_imported(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "pages.swx"
    assert main(["cache", "export", str(cache), str(file)]) == 0
    flip_bit(file, 8 * (4096 + 8192 + 4096 + 9))
    assert main(["cache", "import", str(tmp_path / "d"), str(file)]) == 1
    assert "7 pages are new, 0 were known, 1 damaged" in capsys.readouterr().out


@pytest.mark.parametrize(("change", "num_pages"), [("cut", 6), ("header", 7)])
def test_an_export_that_lost_pages_is_told(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str, num_pages: int
) -> None:
    """What has no header any more is no damaged page, but must not go unsaid."""
    file = tmp_path / "pages.swx"
    assert main(["cache", "export", str(cache), str(file)]) == 0
    if change == "cut":
        os.truncate(file, 4096 + 6 * 8192 + 5000)
    else:
        flip_bit(file, 8 * (4096 + 8192 + 100))
    assert main(["cache", "import", str(tmp_path / "d"), str(file)]) == 1
    out = capsys.readouterr().out
    assert f"{num_pages} pages are new, 0 were known, 0 damaged" in out
    assert f"{5000 if change == 'cut' else 8192:,} bytes of {file} are no pages" in out


def test_an_import_that_does_not_fit_fails(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "pages.swx"
    assert main(["cache", "export", str(cache), str(file)]) == 0
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        assert main(["cache", "import", str(tmp_path / "d"), str(file)]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "took 0 pages and then no more; make room there" in capsys.readouterr().err
    assert main(["cache", "import", str(tmp_path / "d"), str(file)]) == 0
    assert "8 pages are new" in capsys.readouterr().out


def test_ls_of_a_lost_index_names_what_mends_it(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (cache / "index.sqlite").unlink()
    assert main(["cache", "ls", str(cache)]) == 2
    assert "`statewise cache verify` makes it anew" in capsys.readouterr().err
    assert main(["cache", "verify", str(cache)]) == 0
    assert main(["cache", "ls", str(cache)]) == 0
    assert "8 pages" in capsys.readouterr().out


@pytest.mark.parametrize("hours", ["-1", "nan", "inf", "x"])
def test_gc_refuses_hours_that_are_none(cache: Path, hours: str) -> None:
    with pytest.raises(SystemExit):
        main(["cache", "gc", str(cache), "--ttl-hours", hours])


def test_what_cannot_be_done_is_said(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").write_text("text")
    exported = tmp_path / "exported"
    assert main(["cache", "export", str(cache), str(exported)]) == 0
    for words, why in [
        (["ls", str(tmp_path / "nowhere")], "holds no disk cache"),
        (["verify", str(tmp_path / "empty")], "holds no disk cache"),
        (["export", str(cache), str(tmp_path / "other")], "exists"),
        (["import", str(tmp_path / "new"), str(tmp_path / "other")], "no exported cache"),
        (["import", str(tmp_path / "other"), str(exported)], "cache directory"),
    ]:
        assert main(["cache", *words]) == 2
        assert why in capsys.readouterr().err
    disk = open_disk(cache)
    assert main(["cache", "verify", str(cache)]) == 2
    assert "in use by process" in capsys.readouterr().err
    disk.close()


@contextmanager
def without_writing(directory: Path) -> Iterator[None]:
    """The directory is read-only for this process, be it root's or not."""
    paths = [directory, *directory.rglob("*")]
    modes = [path.stat().st_mode for path in paths]
    user = os.geteuid()
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
        for path, mode in zip(paths, modes, strict=True):
            path.chmod(mode)


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that another user may enter."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


@pytest.mark.parametrize("index", ["there", "gone"])
def test_a_read_only_directory_can_be_read_through(
    index: str, public: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a read-only medium, or another user's: no lock is needed, and nothing is written."""
    cache, out = public / "c", public / "out"
    out.mkdir()
    out.chmod(0o777)
    disk = open_disk(cache)
    store_pages(disk, addresses(6))
    disk.close()
    damage(cache, 2)
    (cache / "lock").unlink()
    if index == "gone":
        (cache / "index.sqlite").unlink()
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    with without_writing(cache):
        with pytest.raises(OSError, match="denied"):
            (cache / "lock").touch()
        assert main(["cache", "verify", str(cache)]) == 1
        shown = capsys.readouterr().out
        assert "5 pages are whole" in shown
        assert "1 damaged (body), kept: the directory cannot be written" in shown
        assert main(["cache", "export", str(cache), str(out / "pages.swx")]) == 0
        assert "5 pages in" in capsys.readouterr().out
        if index == "there":
            assert main(["cache", "ls", str(cache)]) == 0
            assert "6 pages" in capsys.readouterr().out
        assert main(["cache", "gc", str(cache)]) == 2, "that one writes"
        assert "ermission denied" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before
    assert main(["cache", "import", str(public / "d"), str(out / "pages.swx")]) == 0
    assert "5 pages are new" in capsys.readouterr().out


def test_a_read_only_directory_that_a_server_has_is_refused(
    public: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = open_disk(public / "c")
    store_pages(disk, addresses(2))
    with without_writing(public / "c"):
        assert main(["cache", "verify", str(public / "c")]) == 2
    assert f"in use by process {os.getpid()}" in capsys.readouterr().err
    disk.close()
