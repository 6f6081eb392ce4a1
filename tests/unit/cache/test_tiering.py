"""Slower tiers as the cache uses them: offers, prefetches, updates, the end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from statewise.radix import Tier
from statewise.radix.plan import Level
from statewise.runtime.messages import CacheOptions
from support.tier_scene import NO_PLAN, PROMPT, QUICK, Scene

PAGES = 10


def stored_scene(shape: str = "F", **more: object) -> Scene:
    scene = Scene(shape, **more)  # type: ignore[arg-type]
    scene.keep()
    scene.forget_device()
    return scene


def test_an_offer_is_made_only_where_loading_is_quicker() -> None:
    scene = stored_scene()
    offer = scene.offer()
    assert offer is not None
    assert (offer.plan.level, offer.plan.position) == (Level.LOAD, 40)
    assert len(list(offer.pages())) == PAGES
    scene.believe(1e-3)
    assert scene.offer() is None, "a load of days"
    scene.believe(1e12, tokens_per_s=1e12)
    scene.serve("again", PROMPT)


def test_nothing_is_offered_where_the_device_has_it_all() -> None:
    scene = Scene("F")
    scene.keep()
    assert scene.offer() is None
    assert scene.offer_by(NO_PLAN) is None, "even if its plan were slow"


def test_a_load_that_is_quick_is_waited_for() -> None:
    scene = stored_scene(bytes_per_s=QUICK)
    offer = scene.offer()
    assert offer is not None
    assert not offer.plan.asynchronous
    match = scene.match(PROMPT[:-1])
    promotion = scene.tiering.promote(match, offer)
    assert promotion.is_done
    assert scene.match(PROMPT).logical_pages == PAGES
    scene.tiering.promotions.release(promotion)
    scene.quiesce()


def test_queued_prefixes_go_from_disk_to_host(tmp_path: Path) -> None:
    scene = Scene("F", disk=tmp_path)
    scene.keep()
    scene.forget_device()
    scene.store().free(scene.store().all_handles())
    offer = scene.offer()
    assert offer is not None
    assert {tier for _, _, tier, _, _ in offer.pages()} == {Tier.DISK}
    assert scene.tiering.prefetch(offer)
    scene.run_io()
    told = (scene.tiering.status(), scene.io.counters.as_dict())
    assert scene.num_stored("full") == PAGES, told
    offer = scene.offer()
    assert offer is not None
    assert {tier for _, _, tier, _, _ in offer.pages()} == {Tier.HOST}
    assert scene.tiering.prefetch(offer)
    assert scene.io.num_open == 0, "it is there already"


def test_a_prefetch_does_not_push_out_what_it_has_just_brought(tmp_path: Path) -> None:
    scene = Scene("F", host_pages=6, disk=tmp_path)
    scene.keep()
    scene.forget_device()
    scene.store().free(scene.store().all_handles())
    offer = scene.offer()
    assert offer is not None
    assert scene.tiering.prefetch(offer)
    scene.run_io()
    assert scene.num_stored("full") == 3
    assert scene.store().status().counters.get("evicted", 0) == 0


def test_without_a_host_tier_nothing_is_prefetched(tmp_path: Path) -> None:
    scene = stored_scene(host_pages=0, disk=tmp_path)
    offer = scene.offer()
    assert offer is not None
    assert not scene.tiering.prefetch(offer)


def test_without_a_remote_store_nothing_is_asked() -> None:
    scene = Scene("F")
    tokens = np.array(PROMPT, dtype=np.int32)
    lookup = scene.cache.lookup(CacheOptions(), tokens, len(PROMPT) - 1)
    assert scene.tiering.ask(lookup, 1, scene.cache.cost) is None


@pytest.mark.parametrize("shape", ["FW", "FR"])
def test_other_weights_find_nothing_and_mark_nothing(shape: str) -> None:
    """F23: no flush of the device is needed, and no block counts as copied any more."""
    scene = Scene(shape)
    scene.keep()
    blocks = scene.match(PROMPT).blocks(0)
    assert scene.tiering.mirror.has(0, blocks).all()
    scene.epoch += 1
    scene.core.update_weights("other")
    assert not scene.tiering.mirror.has(0, blocks).any()
    assert scene.offer() is None
    again = scene.serve("again", PROMPT)
    assert again.report is not None
    assert again.report.loaded == 0
    scene.settle()
    scene.forget_device()
    third = scene.serve("third", PROMPT)
    assert third.report is not None
    assert third.report.loaded == 40, "what the new weights computed was stored under their names"


def test_a_flush_forgets_every_copy_and_every_mark(tmp_path: Path) -> None:
    scene = Scene("F", disk=tmp_path)
    scene.keep()
    scene.add("second", [40] * 30, 2)
    scene.step()
    scene.tiering.clear()
    assert scene.num_stored("full") == scene.num_stored("full", Tier.DISK) == 0
    assert not scene.tiering.mirror.has(0, scene.match(PROMPT).blocks(0)).any()
    scene.run()
    scene.forget_device()
    scene.believe(QUICK)
    scene.serve("again", PROMPT)


@pytest.mark.parametrize("ending", ["flush", "update"])
def test_no_copy_follows_a_flush_or_an_update(ending: str, tmp_path: Path) -> None:
    """What has just arrived on the host is not passed on any more: it would be there afterwards."""
    scene = Scene("F", disk=tmp_path)
    scene.serve("first", PROMPT)
    scene.core.idle()
    while scene.io.run_one():
        pass
    assert scene.num_stored("full"), "copied to the host, and the control plane does not know yet"
    if ending == "flush":
        scene.tiering.clear()
    else:
        scene.epoch += 1
        scene.core.update_weights("other")
    assert scene.io.num_open == 0
    scene.run_io()
    assert scene.num_stored("full") == scene.num_stored("full", Tier.DISK) == 0
    scene.quiesce()


def test_a_page_dropped_from_one_tier_keeps_its_mark_while_another_has_it(tmp_path: Path) -> None:
    scene = Scene("F", disk=tmp_path)
    scene.keep()
    blocks = scene.match(PROMPT).blocks(0)
    host, disk = scene.store(), scene.store(Tier.DISK)
    for handle in host.all_handles():
        host.report_corrupt(handle)
    scene.tiering.deliver()
    assert scene.tiering.mirror.has(0, blocks).all()
    for handle in disk.all_handles():
        disk.report_corrupt(handle)
    scene.tiering.deliver()
    assert not scene.tiering.mirror.has(0, blocks).any()


def test_what_is_due_is_copied_before_the_end(tmp_path: Path) -> None:
    scene = Scene("F", host_pages=0, disk=tmp_path)
    scene.serve("first", PROMPT)
    scene.core.close(5.0)
    second = Scene("F", host_pages=0, disk=tmp_path)
    again = second.serve("again", PROMPT)
    assert again.report is not None
    assert again.report.loaded_from == {"disk": 40}
    second.core.close()
    second.core.close()


def test_figures_of_every_tier(tmp_path: Path) -> None:
    scene = Scene("F", disk=tmp_path)
    scene.keep()
    host, disk = scene.tiering.status()
    assert (host["tier"], disk["tier"]) == ("host", "disk")
    assert host["pages"] == disk["pages"] == PAGES + 1
    assert host["used_bytes"] <= host["budget_bytes"]
    assert host["pages_by_group"] == {"full": PAGES + 1}
