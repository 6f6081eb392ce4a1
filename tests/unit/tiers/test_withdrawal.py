"""Withdrawn pages, whole and wrong: nobody finds them again, after a restart or elsewhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from statewise.radix import Namespace, Tier, TokenKey
from statewise.runtime.messages import CacheOptions
from statewise.runtime.tiers.disk_index import remove_index
from statewise.runtime.tiers.host import HostTier
from statewise.runtime.tiers.page import PageAddress
from statewise.runtime.tiers.remote import RemoteTier, open_url
from statewise.runtime.tiers.store import NO_HANDLE, Outcome
from support.tier_pages import SHAPES, ManualClock, addresses, open_disk, store_pages
from support.tier_scene import PROMPT, Scene

WHERE = addresses(8)
BAD, GOOD = WHERE[2:5], WHERE[:2] + WHERE[5:]


def keys(pages: list[PageAddress]) -> list[bytes]:
    return [page.key for page in pages]


def test_the_host_forgets_withdrawn_pages() -> None:
    host = HostTier(SHAPES, [16, 16])
    store_pages(host, WHERE)
    host.withdraw(keys(BAD))
    assert host.find(keys(BAD)) == [NO_HANDLE] * 3
    assert NO_HANDLE not in host.find(keys(GOOD))


@pytest.mark.parametrize("index", ["kept", "lost"])
def test_withdrawn_pages_are_not_found_after_a_restart(tmp_path: Path, index: str) -> None:
    disk = open_disk(tmp_path)
    store_pages(disk, WHERE)
    disk.withdraw(keys([*BAD, *addresses(2, seed=9)]))
    assert disk.find(keys(BAD)) == [NO_HANDLE] * 3
    disk.close()
    if index == "lost":
        remove_index(tmp_path)
    again = open_disk(tmp_path)
    assert again.find(keys(BAD)) == [NO_HANDLE] * 3
    found = again.find(keys(GOOD))
    assert [one.outcome for one in again.fetch(found)] == [Outcome.OK] * len(GOOD)
    again.close()


def test_withdrawn_objects_are_gone_for_every_server(tmp_path: Path) -> None:
    url = (tmp_path / "shared").as_uri()
    one, other = (RemoteTier(open_url(url), SHAPES, ManualClock()) for _ in range(2))
    store_pages(one, WHERE)
    assert other.probe(WHERE[:3]) == [Outcome.OK] * 3
    one.withdraw(keys(BAD))
    assert one.probe(WHERE) == [Outcome.MISSING if page in BAD else Outcome.OK for page in WHERE]
    assert [f.outcome for f in other.fetch(other.find(keys(WHERE[2:3])))] == [Outcome.MISSING]
    third = RemoteTier(open_url(url), SHAPES, ManualClock())
    assert third.probe(BAD) == [Outcome.MISSING] * 3
    for store in (one, other, third):
        store.close()


LONG = [1 + (7 * i) % 90 for i in range(24)]


@pytest.mark.parametrize("shape", ["F", "FW", "FT", "FR"])
@pytest.mark.parametrize("copied", ["before", "under way"])
def test_what_was_computed_from_damaged_state_is_found_in_no_tier(
    tmp_path: Path, shape: str, copied: str
) -> None:
    """F21: copies of it are made under right names, with digests that hold."""
    scene = Scene(shape, blocks=96, disk=tmp_path, audit_rate=1.0)
    scene.serve("first", PROMPT)
    prompt = PROMPT[:40] + LONG
    scene.add("misled", prompt, 40)
    while not (request := scene.core.scheduler.running):
        scene.step()
    block = int(scene.match(PROMPT[:-1]).blocks(0)[3])
    scene.worker.flip(0, 0, block, 0, 1)
    for _ in range(20):
        scene.step()
    (request,) = scene.core.scheduler.running
    tokens = request.tokens[: request.sequence.num_published * 4]
    assert len(tokens) > 64, "computed from the flipped bit, and published"
    scene.tiering.demotion.note(Namespace(), TokenKey(tokens), len(tokens))
    scene.tiering.demotion.tick()
    if copied == "before":
        while scene.tiering.is_busy:
            scene.run_io()
            scene.tiering.demotion.tick()
        assert scene.tiering.mirror.has(0, scene.match(tokens.tolist()).blocks(0)[11:12]).all()
    scene.serve("finds it", PROMPT, 2)
    scene.run()
    scene.check("finds it")
    scene.settle()
    scene.forget_device()
    scene.serve("again", [*tokens.tolist(), 5], 3)
    scene.check("again")
    assert scene.tiering.tiers.counters["withdrawn"]


def test_a_page_that_arrived_before_its_withdrawal_is_not_handed_over(tmp_path: Path) -> None:
    """One tier has delivered, the other not yet: the pages wait in private blocks meanwhile."""
    scene = Scene("F", disk=tmp_path)
    scene.keep(PROMPT)
    scene.forget_device()
    host = scene.store(Tier.HOST)
    host.free(host.all_handles()[:5])
    lookup = scene.cache.lookup(CacheOptions(), np.array(PROMPT, dtype=np.int32), 40)
    promotion = scene.cache.promote(lookup)
    assert len(promotion.waiting_for) == 2
    while len(promotion.waiting_for) == 2:
        assert scene.io.run_one()
        scene.tiering.deliver()
    scene.tiering.withdraw(scene.match(PROMPT[:40]), 0)
    scene.run_io()
    assert promotion.is_done
    assert not scene.match(PROMPT[:40]).logical_pages
    scene.tiering.promotions.release(promotion)
    scene.quiesce()


def test_what_is_being_destroyed_is_found_by_nobody() -> None:
    """The order to destroy waits for a thread; names are withdrawn from that moment on."""
    scene = Scene("F")
    scene.keep(PROMPT)
    match = scene.match(PROMPT[:40])
    names = scene.tiering.stored.names(match.namespace, match.key)
    where = [scene.tiering.stored.page_address(names, 0, page) for page in range(10)]
    assert None not in scene.tiering.tiers.find(where)
    scene.tiering.withdraw(match, 4)
    assert scene.store().find([where[4].key]) != [NO_HANDLE], "it still lies there"
    found = scene.tiering.tiers.find(where)
    assert [location is None for location in found] == [page >= 4 for page in range(10)]
    scene.run_io()
    assert scene.store().find([where[4].key]) == [NO_HANDLE]
