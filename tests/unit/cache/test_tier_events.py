"""Why a page was, or was not, loaded can be read: in events, and in the request's own report."""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from statewise.radix import Tier
from statewise.runtime.events import EVENTS, log_to_file
from statewise.runtime.tiers.disk import DiskTier
from statewise.runtime.tiers.files import Files
from statewise.runtime.tiers.store import NO_HANDLE
from support.tier_faults import FaultyFiles
from support.tier_scene import PROMPT, Scene

PAGES = 10


@pytest.fixture
def events(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "events.jsonl"
    handler = log_to_file(str(path))
    yield path
    EVENTS.removeHandler(handler)
    EVENTS.setLevel(logging.NOTSET)
    handler.close()


def read(path: Path, event: str = "") -> list[dict[str, Any]]:
    every = [json.loads(line) for line in path.read_text().splitlines()]
    return [one for one in every if event in ("", one["event"])]


def stored_scene(shape: str = "F", **more: object) -> Scene:
    scene = Scene(shape, **more)  # type: ignore[arg-type]
    scene.keep()
    scene.forget_device()
    return scene


def reason(scene: Scene, rid: str) -> str:
    report = scene.outcomes[rid].report
    assert report is not None
    return report.reason


def damage(scene: Scene, page: int) -> None:
    """Flip a bit of one page in the host's memory."""
    store, match = scene.store(), scene.match(PROMPT)
    names = scene.tiering.stored.names(match.namespace, match.key)
    fetched = store.fetch(store.find([scene.tiering.stored.page_address(names, 0, page).key]))
    assert fetched[0].row is not None
    fetched[0].row.data[3] ^= 8
    store.release(fetched)


def test_a_load_is_told_from_plan_to_end(events: Path) -> None:
    scene = stored_scene("FR")
    scene.serve("again", PROMPT)
    (begun,) = read(events, "load_begun")
    assert (begun["rid"], begun["position"]) == ("again", 40)
    assert {"tier": "host", "group": "full", "pages": [0, PAGES]} in begun["loads"]
    assert {"tier": "host", "group": "state", "pages": [10, 11]} in begun["loads"]
    (ended,) = read(events, "load_ended")
    assert (ended["rid"], ended["tier"], ended["num_pages"]) == ("again", "host", PAGES + 1)
    assert (ended["num_failed"], ended["failed"]) == (0, [])
    loads = [one for one in read(events, "transfer_ended") if one["kind"] == "load"]
    assert [one["outcomes"] for one in loads] == [{"ok": PAGES + 1}]
    transitions = [one for one in read(events, "transition") if one["cause"] == "load"]
    assert sum(one["num_pages"] for one in transitions) == PAGES + 1


def test_damage_found_while_loading_is_told_by_page_and_reported(events: Path) -> None:
    scene = stored_scene()
    damage(scene, 4)
    again = scene.serve("again", PROMPT)
    failed = [one for ended in read(events, "load_ended") for one in ended["failed"]]
    assert [(one["group"], one["page"], one["outcome"]) for one in failed] == [
        ("full", 4, "corrupt")
    ]
    assert failed[0]["reason"] == "digests differ"
    assert failed[0]["layers"] == 1
    dropped = read(events, "pages_dropped")
    fields = ("tier", "cause", "num_pages", "num_elsewhere")
    assert [tuple(one[name] for name in fields) for one in dropped] == [("host", "damaged", 1, 0)]
    counted = scene.core.stats()["labelled"]["dropped_pages"]
    assert counted["values"] == [[["host", "damaged"], 1]]
    assert len(dropped[0]["names"][0]) == 32
    text = "host: 1 page of 'full' from page 4 on: damaged (digests differ)"
    assert text in reason(scene, "again")
    assert again.report is not None
    assert text in again.report.verdicts


def test_damage_on_the_device_is_in_the_reason_too() -> None:
    scene = Scene("FF", audit_rate=1.0)
    scene.serve("first", PROMPT)
    scene.worker.flip(0, 0, int(scene.match(PROMPT).blocks(0)[4]), 1, 3)
    scene.serve("again", PROMPT)
    assert "damaged on the device: 1 page of 'full'" in reason(scene, "again")


def test_why_nothing_was_loaded_is_told(events: Path) -> None:
    scene = stored_scene()
    scene.believe(1e-3)
    scene.serve("again", PROMPT)
    assert read(events, "load_begun") == []
    (declined,) = read(events, "load_declined")
    assert declined["rid"] == "again"
    text = "slower tiers have state up to token 40: computing is estimated to be quicker"
    assert declined["why"].startswith(text)
    assert text in reason(scene, "again")
    scene.serve("cold", [70] * 20)
    assert len(read(events, "load_declined")) == 1, "nobody has anything of it"
    assert "slower tiers" not in reason(scene, "cold")


def test_windows_that_are_missing_are_named_where_history_was_not_loaded(events: Path) -> None:
    scene = stored_scene("FW")
    store, match = scene.store(), scene.match(PROMPT)
    names = scene.tiering.stored.names(match.namespace, match.key)
    (window,) = [g for g, spec in enumerate(scene.schema.groups) if spec.kind.is_window]
    keys = [scene.tiering.stored.page_address(names, window, page).key for page in range(10)]
    store.free([handle for handle in store.find(keys) if handle != NO_HANDLE])
    scene.believe(1e-3)
    scene.serve("again", PROMPT)
    (declined,) = read(events, "load_declined")
    text = "slower tiers have state up to token 40, without what a resume there needs of 'window'"
    assert declined["why"].startswith(text)


def test_copies_out_are_told_and_so_is_who_refuses_them(events: Path) -> None:
    scene = Scene("F", blocks=128, max_queued_bytes=64)
    scene.add("a", PROMPT, 4)
    scene.add("b", [9, *PROMPT], 4)
    while scene.core.has_work():
        scene.step()
    scene.core.idle()
    (refused,) = read(events, "demotion_refused")
    assert refused["tier"] == "host"
    assert refused["cause"] == "queue"
    assert refused["num_pages"] >= PAGES
    scene.settle()
    outcomes = [o["outcomes"] for o in read(events, "transfer_ended") if o["kind"] == "demote"]
    assert sum(one.get("ok", 0) for one in outcomes) == scene.num_stored("full")
    mirrored = [one for one in read(events, "transition") if one["cause"] == "mirror"]
    assert sum(one["num_pages"] for one in mirrored) == scene.num_stored("full")


def test_copies_between_tiers_are_told(events: Path, tmp_path: Path) -> None:
    scene = Scene("F", disk=tmp_path / "cache")
    scene.keep()
    spilled = [one for one in read(events, "transfer_ended") if one["kind"] == "spill"]
    assert {one["tier"] for one in spilled} == {"disk"}
    assert sum(one["num_pages"] for one in spilled) == PAGES + 1


def test_a_medium_that_fails_is_told_once(events: Path, tmp_path: Path) -> None:
    scene = Scene("F", host_pages=0, disk=tmp_path / "cache")
    disk = scene.store(Tier.DISK)
    assert isinstance(disk, DiskTier)
    files: Files = FaultyFiles(0, errno.ENOSPC, ("write", "create"), then=1000)
    disk._extents._files = files  # type: ignore[attr-defined]
    scene.keep()
    (state,) = read(events, "tier_state")
    assert (state["before"], state["after"]) == ("online", "read only")
    assert "injected" in state["why"]
    assert str(tmp_path) in state["medium"]


def test_the_dump_says_what_has_copies_and_where_they_were_made() -> None:
    scene = Scene("FW")
    scene.keep()
    blocks = scene.match(PROMPT).blocks(0).tolist()
    dump = scene.core.cache_dump()
    assert [tier["tier"] for tier in dump["tiers"]] == ["host"]
    copies = {one["block"]: one for one in dump["copies"]["full"]}
    assert set(blocks) <= set(copies)
    assert all(copies[block]["on_device"] for block in blocks)
    scene.forget_device()
    copies = {one["block"]: one for one in scene.core.cache_dump()["copies"]["full"]}
    assert not any(copies[block]["on_device"] for block in blocks)
    json.dumps(scene.core.cache_dump())
