"""Places of slower tiers that cannot work are errors of the first second, saying what to change."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from statewise.runtime.config import ServerArgs, checked
from statewise.runtime.engine import build
from statewise.runtime.errors import InvalidRequestError
from statewise.runtime.server.launch import Server
from statewise.runtime.server.supervisor import MODULES
from statewise.runtime.tiers.files import DirectoryLock
from statewise.runtime.tiers.places import check_places
from statewise.runtime.tiers.store import TierError
from statewise.runtime.tiers.tiers import TierSettings, open_tiers
from statewise.runtime.tiers.url import check_url
from support.tier_blocks import ArrayBlocks
from support.tier_pages import SHAPES, ManualClock


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket",
        "s3://bucket/a/b?endpoint=http://127.0.0.1:9000&region=eu",
        "file:///srv/cache",
        "gs://bucket/x",
        "https://store.example:8443/x",
        "memory:///",
    ],
)
def test_urls_that_can_be(url: str) -> None:
    check_url(url)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("bucket/prefix", "no URL"),
        ("/srv/cache", "no URL"),
        ("ftp://host/x", "unknown kind 'ftp'"),
        ("s3:///prefix", "no bucket"),
        ("file://srv/cache", "no absolute directory"),
        ("file:///", "no absolute directory"),
        ("https:///x", "no server"),
        ("https://host:port/x", "Port"),
        ("s3://bucket/x?endpont=http://a", "unknown setting 'endpont'"),
        ("s3://bucket/x?endpoint=", "'endpoint' is empty"),
        ("s3://bucket/x#y", "what is 'y'"),
    ],
)
def test_urls_that_cannot_be_say_why(url: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_url(url)
    with pytest.raises(InvalidRequestError, match=says):
        checked({"model_path": "m", "remote_cache": url})
    with pytest.raises(TierError, match=says):
        check_places(url=url)


def test_a_free_directory_is_left_as_it_was(tmp_path: Path) -> None:
    check_places(str(tmp_path / "new" / "deep"))
    assert list(tmp_path.iterdir()) == []
    check_places(str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "lock").write_text("12345")
    check_places(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["lock"], "it was there"


def test_a_directory_of_somebody_else_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    settings = TierSettings(disk_directory=str(tmp_path), disk_bytes=1 << 20)
    for look in (
        lambda: check_places(str(tmp_path)),
        lambda: open_tiers(SHAPES, ArrayBlocks(SHAPES, 2), settings, ManualClock()),
    ):
        with pytest.raises(TierError, match=r"letter\.txt"):
            look()
        assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_a_lock_whose_file_was_removed_just_before_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening and locking: who locks a file that is nowhere has locked nothing."""
    first = DirectoryLock(tmp_path)
    real, removed = fcntl.flock, []

    def flock(fd: int, operation: int) -> None:
        if not removed:
            removed.append(True)
            first.withdraw()
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    second = DirectoryLock(tmp_path)
    with pytest.raises(TierError, match="in use"):
        DirectoryLock(tmp_path)
    second.release()


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    used = tmp_path / "used"
    used.mkdir()
    lock = DirectoryLock(used)
    with pytest.raises(TierError, match="in use by process"):
        check_places(str(used))
    lock.release()
    (used / "letter.txt").write_text("dear")
    with pytest.raises(TierError, match=r"letter\.txt"):
        check_places(str(used))
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(TierError, match="file"):
        check_places(str(file))
    with pytest.raises(TierError, match="nowhere"):
        check_places(key_file=str(tmp_path / "nowhere"))


def test_nothing_is_loaded_before_the_places_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights take minutes: a directory in use is found before them, in every way to start."""

    def never(*_args: object) -> None:
        raise AssertionError("the model was looked at first")

    monkeypatch.setattr(build, "inspect_model", never)
    lock = DirectoryLock(tmp_path)
    args = ServerArgs(model_path="nothing", disk_cache_dir=str(tmp_path), disk_cache_gb=1.0, port=0)
    with pytest.raises(TierError, match="in use by process"):
        build.build_runtime(args)
    with pytest.raises(TierError, match="in use by process"):
        Server(args, MODULES)
    lock.release()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"disk_cache_gb": 1.0}, "'disk_cache_gb' is about a disk cache"),
        ({"cache_ttl_hours": 2.0}, "'cache_ttl_hours' is about a disk cache"),
        ({"disk_cache_codec": "zstd"}, "'disk_cache_codec' is about a disk cache"),
        ({"cache_ttl_hours": 2.0, "host_cache_gb": 1.0}, "'cache_ttl_hours'"),
        ({"remote_cache_codec": "zstd"}, "'remote_cache_codec' is for a 'remote_cache'"),
        ({"disk_cache_dir": "d"}, "say with 'disk_cache_gb'"),
        ({"disk_cache_dir": "d", "disk_cache_gb": 0.0001}, "holds no prompt"),
        ({"host_cache_gb": float("inf")}, "'host_cache_gb' must be a finite number"),
        ({"cache_key_file": "k"}, "'cache_key_file' encrypts"),
    ],
)
def test_settings_that_say_nothing_are_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        checked({"model_path": "m", **settings})


def test_a_disk_too_small_for_the_model_says_how_much_it_needs(tmp_path: Path) -> None:
    def opened(size: int) -> None:
        settings = TierSettings(disk_directory=str(tmp_path / "d"), disk_bytes=size)
        open_tiers(SHAPES, ArrayBlocks(SHAPES, 2), settings, ManualClock()).close()

    with pytest.raises(TierError, match=r"--disk-cache-gb to at least 0\.0003"):
        opened(100_000)
    opened(300_000)
