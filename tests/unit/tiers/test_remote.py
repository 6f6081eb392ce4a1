"""The remote tier, against a folder and against a real S3 server on this machine."""

from __future__ import annotations

import logging
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from statewise.radix.segment import Tier
from statewise.runtime.clock import SystemClock
from statewise.runtime.tiers.body import Bodies, Keys
from statewise.runtime.tiers.copies import Copier
from statewise.runtime.tiers.remote import RemoteTier, object_name, open_url
from statewise.runtime.tiers.store import NO_HANDLE, Loss, Outcome, TierError
from statewise.runtime.tiers.tiers import Tiers
from statewise.runtime.tiers.transfer import EngineOptions, TransferEngine
from support.tier_blocks import ArrayBlocks
from support.tier_pages import (
    FULL,
    SHAPES,
    WINDOW,
    ManualClock,
    addresses,
    check_fetch,
    store_pages,
)

pytest.importorskip("obstore")
CREDENTIALS = {"access_key_id": "test", "secret_access_key": "test"}


@pytest.fixture(scope="module")
def s3_url() -> Iterator[str]:
    """A bucket on a server of this process."""
    server_module = pytest.importorskip("moto.server")
    log = logging.getLogger("werkzeug")
    log.setLevel(logging.ERROR)
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket", method="PUT")).close()
    yield f"s3://bucket/cache?endpoint={endpoint}&region=us-east-1"
    server.stop()


@pytest.fixture(params=["folder", "s3"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "folder":
        return open_url((tmp_path / "shared").as_uri())
    url: str = request.getfixturevalue("s3_url")
    plain, _, settings = url.partition("?")
    return open_url(f"{plain}/{tmp_path.name}?{settings}", CREDENTIALS)


def remote_of(objects: Any, **more: Any) -> RemoteTier:
    return RemoteTier(objects, SHAPES, more.pop("clock", ManualClock()), **more)


def test_pages_come_back_here_and_to_other_servers(objects: Any) -> None:
    remote = remote_of(objects)
    full, window = addresses(6), addresses(3, WINDOW)
    handles = store_pages(remote, full)
    store_pages(remote, window, WINDOW)
    assert check_fetch(remote, handles, full, FULL) == [Outcome.OK] * 6
    assert remote.status().pages_by_group == {"full": 6, "window": 3}
    remote.close()
    other = remote_of(objects)
    unknown = addresses(2, seed=9)
    assert other.find([a.key for a in full]) == [NO_HANDLE] * 6
    assert other.probe([*full, *unknown]) == [Outcome.OK] * 6 + [Outcome.MISSING] * 2
    found = other.find([a.key for a in full])
    assert check_fetch(other, found, full, FULL) == [Outcome.OK] * 6
    assert [other.content(a.key) for a in full] == [remote.content(a.key) for a in full]
    other.close()


def test_damaged_objects_are_not_believed_until_they_are_written_anew(objects: Any) -> None:
    import obstore

    remote = remote_of(objects)
    where = addresses(4)
    handles = store_pages(remote, where)
    names = [object_name(a.key) for a in where]
    data = [bytearray(bytes(obstore.get(objects, name).bytes())) for name in names]
    data[0][100] ^= 1
    data[1][4096 + 1000] ^= 1
    obstore.put(objects, names[0], bytes(data[0]))
    obstore.put(objects, names[1], bytes(data[1]))
    obstore.put(objects, names[2], bytes(data[2][:5000]))
    obstore.put(objects, names[3], bytes(data[2]))
    assert check_fetch(remote, handles, where, FULL) == [Outcome.CORRUPT] * 4
    assert remote.status().counters["corrupt"] == 4
    assert remote.probe(where) == [Outcome.MISSING] * 4
    handles = store_pages(remote, where)
    assert check_fetch(remote, handles, where, FULL) == [Outcome.OK] * 4
    remote.close()


def test_deleted_objects_are_a_miss(objects: Any) -> None:
    import obstore

    remote = remote_of(objects)
    where = addresses(2)
    handles = store_pages(remote, where)
    obstore.delete(objects, object_name(where[0].key))
    assert check_fetch(remote, handles, where, FULL) == [Outcome.MISSING, Outcome.OK]
    assert remote.pop_dropped() == [(handles[0], where[0].key, Loss.GONE)]
    remote.close()


def test_sealed_and_packed_objects(objects: Any) -> None:
    bodies = Bodies("shuffle-zstd", Keys(bytes(32)))
    remote = remote_of(objects, bodies=bodies)
    where = addresses(3, secret=bodies.secret)
    handles = store_pages(remote, where, secret=bodies.secret)
    assert check_fetch(remote, handles, where, FULL) == [Outcome.OK] * 3
    remote.close()
    assert remote_of(objects).probe(where) == [Outcome.MISSING] * 3


def test_old_objects_are_collected(objects: Any) -> None:
    remote = remote_of(objects, clock=SystemClock())
    where = addresses(3)
    store_pages(remote, where)
    assert remote.collect(ttl_s=3600) == 0
    assert remote.collect(ttl_s=-3600) == 3
    assert remote_of(objects).probe(where) == [Outcome.MISSING] * 3
    remote.close()


def test_a_dead_server_is_a_miss_with_one_warning(
    s3_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    dead = "s3://bucket/x?endpoint=http://127.0.0.1:9&region=us-east-1"
    remote = remote_of(open_url(dead, CREDENTIALS), clock=clock)
    where = addresses(6)
    with caplog.at_level(logging.WARNING):
        assert store_pages(remote, where[:1]) == [NO_HANDLE]
        assert set(remote.probe(where)) <= {Outcome.FAILED, Outcome.MISSING}
        assert store_pages(remote, where) == [NO_HANDLE] * 6
    assert remote.status().state != "online"
    warnings = [r for r in caplog.records if r.name.startswith("statewise")]
    assert 1 <= len(warnings) <= 2, "one for each change of state"
    assert "test" not in caplog.text.replace("test_", ""), "no credentials in the log"
    remote.close()


def test_urls_that_cannot_be_used_say_why() -> None:
    for url, why in [
        ("s3://b/p?colour=red", "unknown setting 'colour'"),
        ("gopher://b/p", "remote cache gopher://b/p"),
    ]:
        with pytest.raises(TierError, match=why):
            open_url(url)


def test_probes_are_transfers(objects: Any) -> None:
    writer = remote_of(objects)
    where = addresses(70)
    store_pages(writer, where[:65])
    remote = remote_of(objects)
    engine = TransferEngine(EngineOptions(num_threads=0), ManualClock())
    tiers = Tiers([remote], Copier(SHAPES, ArrayBlocks(SHAPES, 4), ManualClock()), engine)
    transfer = tiers.probe(where)
    assert tiers.find(where) == [None] * 70
    engine.wait(transfer)
    found = tiers.find(where)
    assert [place is not None for place in found] == [True] * 65 + [False] * 5
    assert found[0] is not None
    assert found[0].tier is Tier.REMOTE
    tiers.close()
    writer.close()


@pytest.mark.parametrize("was_there", ["nothing", "folder", "all"])
def test_a_shared_folder_is_its_owners_alone_unless_it_was_made_otherwise(
    tmp_path: Path, was_there: str
) -> None:
    """Prompts can be read out of state: no other user of the machine may look at it."""
    folder = tmp_path / "shared folder"
    if was_there != "nothing":
        (folder / "v1" if was_there == "all" else folder).mkdir(parents=True)
        folder.chmod(0o755)
    if was_there == "all":
        (folder / "v1").chmod(0o770)
    remote = remote_of(open_url(folder.as_uri()))
    where = addresses(2)
    assert check_fetch(remote, store_pages(remote, where), where, FULL) == [Outcome.OK] * 2
    remote.close()
    assert (folder / object_name(where[0].key)).is_file()
    modes = [path.stat().st_mode & 0o777 for path in (folder, folder / "v1")]
    assert modes == {
        "nothing": [0o700, 0o700], "folder": [0o755, 0o700], "all": [0o755, 0o770],
    }[was_there]  # fmt: skip
