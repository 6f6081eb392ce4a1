"""State on its way back: leased, private until confirmed, and never worth a request's failure."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from statewise.radix import Cause, Namespace, StaleMatchError, Tier, TokenKey
from statewise.runtime.cache.promotion import Promotion
from statewise.runtime.errors import OutOfBlocksError
from statewise.runtime.messages import CacheOptions
from statewise.runtime.tiers.host import HostTier
from support.tier_scene import PROMPT, Scene

PAGES = 10


def promote(scene: Scene, prompt: list[int] = PROMPT) -> Promotion:
    """Start what slower tiers offer."""
    tokens = np.array(prompt, dtype=np.int32)
    lookup = scene.cache.lookup(CacheOptions(), tokens, len(prompt) - 1)
    assert lookup.offer is not None
    return scene.cache.promote(lookup)


def stored_scene(shape: str = "F", **more: object) -> Scene:
    """A scene that has the prompt in host memory, and nothing on the device."""
    scene = Scene(shape, **more)  # type: ignore[arg-type]
    scene.keep()
    scene.forget_device()
    return scene


def rows_of(scene: Scene, group: str = "full") -> np.ndarray:
    """[slots, row bytes] of the host tier's memory."""
    store = scene.store()
    assert isinstance(store, HostTier)
    rows: np.ndarray = store._groups[group].rows
    return rows


@pytest.mark.parametrize("lossy", [False, True])
def test_a_queue_is_estimated_in_the_bytes_that_costs_are_in(lossy: bool) -> None:
    """Lossy copies are half as large in their tier as what they become."""
    scene = stored_scene(lossy=lossy)
    waits: list[tuple[Tier, float]] = []
    observer = scene.cache.cost
    observer.observe_queue = lambda *args: waits.append(args)  # type: ignore[method-assign]
    promotion = promote(scene)
    (transfer,) = promotion.waiting_for
    device_bytes = PAGES * scene.schema.groups[0].block_bytes(4)
    assert transfer.size_bytes == device_bytes // (2 if lossy else 1)
    rate = observer.model.tiers[Tier.HOST].bytes_per_s
    assert waits == [(Tier.HOST, device_bytes / rate)]
    scene.run_io()
    assert promotion.is_done
    assert len(waits) == 1, "and nothing is queued any more"
    scene.tiering.promotions.release(promotion)
    scene.quiesce()


def test_nothing_can_be_found_before_its_copy_was_confirmed() -> None:
    scene = stored_scene()
    promotion = promote(scene)
    assert not promotion.is_done
    assert scene.match(PROMPT).logical_pages == 0
    assert len(promotion.blocks(0)) == PAGES
    scene.core.audit()
    scene.run_io()
    assert promotion.is_done
    match = scene.match(PROMPT)
    assert match.resident(0).tolist() == [True] * PAGES
    assert scene.cache.tree.ledger.total(0, Cause.LOAD) == PAGES
    assert scene.tiering.mirror.has(0, match.blocks(0)).all(), "it has a copy already"
    assert promotion.loaded == dict.fromkeys(range(PAGES), Tier.HOST)
    scene.core.audit()
    scene.tiering.promotions.release(promotion)
    scene.core.audit()
    scene.quiesce()


def test_what_came_back_stays_leased_until_it_is_released() -> None:
    scene = stored_scene()
    promotion = promote(scene)
    scene.run_io()
    scene.cache.free_all()
    assert scene.match(PROMPT).logical_pages == PAGES
    assert scene.tiering.promotions.give_up_leases()
    assert not scene.tiering.promotions.give_up_leases()
    scene.cache.free_all()
    assert scene.match(PROMPT).logical_pages == 0
    scene.tiering.promotions.release(promotion)  # again: nothing happens
    scene.quiesce()


def test_the_prefix_that_a_load_continues_stays_meanwhile() -> None:
    """F8: eviction while copies are under way."""
    scene = Scene("F")
    scene.keep()
    scene.free(scene.cache.tree.evict(0, 5))
    left = scene.match(PROMPT).logical_pages
    assert 0 < left < PAGES
    promotion = promote(scene)
    scene.cache.free_all()
    assert scene.match(PROMPT).logical_pages == left
    scene.run_io()
    assert scene.match(PROMPT).resident(0).tolist() == [True] * PAGES
    assert sorted(promotion.loaded) == list(range(left, PAGES))
    scene.tiering.promotions.release(promotion)
    scene.core.audit()
    again = scene.serve("again", PROMPT)
    assert again.report is not None
    assert again.report.reused == 40


def test_a_damaged_page_is_not_used_and_leaves_its_tier() -> None:
    """F22: completion is confirmed by digests where the page landed."""
    scene = stored_scene()
    rows_of(scene)[:, 5] ^= 4  # one byte of every page
    promotion = promote(scene)
    scene.run_io()
    assert scene.match(PROMPT).logical_pages == 0
    assert promotion.loaded == {}
    assert len(promotion.blocks(0)) == 0
    assert scene.store().status().counters["corrupt"] == PAGES
    assert scene.offer() is None, "damaged pages are gone"
    scene.core.audit()
    scene.serve("again", PROMPT)
    scene.quiesce()


@pytest.mark.parametrize("bad", [0, 4, 9])
def test_what_arrived_before_a_damaged_page_is_used(bad: int) -> None:
    scene = stored_scene()
    store = scene.store()
    match = scene.match(PROMPT)
    names = scene.tiering.stored.names(match.namespace, match.key)
    (handle,) = store.find([scene.tiering.stored.page_address(names, 0, bad).key])
    (fetched,) = store.fetch([handle])
    assert fetched.row is not None
    fetched.row.data[0] ^= 1
    store.release([fetched])
    again = scene.serve("again", PROMPT)
    assert again.report is not None
    assert again.report.loaded >= 4 * bad
    assert again.report.loaded + again.report.reused < 4 * PAGES
    assert store.status().counters["corrupt"] == 1
    scene.settle()
    scene.forget_device()
    third = scene.serve("third", PROMPT)
    assert third.report is not None
    assert third.report.loaded == 4 * PAGES, "computed again, it was stored again"


def test_a_page_that_went_meanwhile_is_missing_and_nothing_else() -> None:
    scene = stored_scene()
    promotion = promote(scene)
    scene.store().free(scene.store().all_handles())
    scene.run_io()
    assert promotion.is_done
    assert scene.match(PROMPT).logical_pages == 0
    scene.tiering.promotions.release(promotion)
    scene.quiesce()


def test_a_load_called_off_keeps_its_blocks_until_no_thread_writes_them() -> None:
    """F32: one that has begun ends when its step does; what has not begun ends at once."""
    scene = stored_scene(step_bytes=4 * 32)
    promotion = promote(scene)
    assert scene.io.run_one()
    scene.tiering.promotions.release(promotion)
    scene.core.audit()
    scene.run_io()
    assert scene.match(PROMPT).logical_pages == 0, "nobody wanted it any more"
    (pool,) = scene.cache.pools
    assert pool.num_free == pool.num_blocks
    assert not scene.tiering.promotions.open


def test_without_blocks_nothing_is_held() -> None:
    """F34: blocks went between the lookup and the load; nothing was taken by halves."""
    scene = stored_scene("FF", blocks=16)
    pool, *_ = scene.cache.pools
    tokens = np.array(PROMPT, dtype=np.int32)
    lookup = scene.cache.lookup(CacheOptions(), tokens, len(PROMPT) - 1)
    taken = pool.allocate(10)
    with pytest.raises(OutOfBlocksError, match="full"):
        scene.cache.promote(lookup)
    assert pool.num_free == 6
    assert not scene.tiering.promotions.open
    pool.free(taken)
    scene.core.audit()
    assert scene.offer() is not None


def test_a_lookup_that_is_out_of_date_loads_nothing() -> None:
    """F8: eviction between lookup and load."""
    scene = Scene("F")
    scene.keep()
    scene.free(scene.cache.tree.evict(0, 4))
    tokens = np.array(PROMPT, dtype=np.int32)
    lookup = scene.cache.lookup(CacheOptions(), tokens, len(PROMPT) - 1)
    assert lookup.offer is not None
    scene.forget_device()
    with pytest.raises(StaleMatchError):
        scene.cache.promote(lookup)
    assert not scene.tiering.promotions.open
    scene.core.audit()


def test_what_another_request_computed_meanwhile_is_kept_once() -> None:
    scene = stored_scene()
    promotion = promote(scene)
    scene.believe(1e-3)  # the other one does not load
    scene.add("other", PROMPT, 2)
    while scene.core.has_work():
        scene.step()  # no I/O
    scene.check("other")
    assert scene.match(PROMPT).logical_pages == PAGES
    scene.run_io()
    assert promotion.is_done
    scene.core.audit()
    scene.tiering.promotions.release(promotion)
    scene.quiesce()


def test_state_of_old_weights_that_arrives_after_an_update_is_not_used() -> None:
    scene = stored_scene()
    promotion = promote(scene)
    scene.epoch += 1
    scene.core.update_weights("other")
    scene.run_io()
    assert promotion.is_done
    assert scene.match(PROMPT).logical_pages == 0
    scene.serve("again", PROMPT)
    scene.quiesce()


def test_a_snapshot_comes_back_only_with_the_history_below_it() -> None:
    """F14: state of one group alone is no state to resume from."""
    scene = stored_scene("FR")
    rows_of(scene)[:, 3] ^= 1  # every page of the history
    promotion = promote(scene)
    scene.run_io()
    scene.tiering.promotions.release(promotion)
    assert scene.match(PROMPT).snapshots == ()
    scene.core.audit()
    scene.serve("again", PROMPT)
    scene.quiesce()


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["FW", "FR", "C", "HFC", "KFK"])
def test_every_group_comes_back_where_it_was(shape: str, tmp_path: Path) -> None:
    scene = Scene(shape, host_pages=0, disk=tmp_path)
    scene.keep()
    scene.forget_device()
    again = scene.serve("again", PROMPT)
    assert again.report is not None
    assert again.report.loaded_from == {"disk": again.report.loaded}
    assert again.report.loaded > 0
    scene.quiesce()


def test_the_same_prefix_is_loaded_once() -> None:
    scene = stored_scene()
    promotion = promote(scene)
    promotions = scene.tiering.promotions

    def loading(prompt: list[int], position: int, salt: str = "") -> bool:
        tokens = np.array(prompt, dtype=np.int32)
        match = scene.cache.tree.match(Namespace(salt), TokenKey(tokens))
        return promotions.is_loading(match, position)

    assert loading(PROMPT[:-1], 40)
    assert loading([*PROMPT[:24], 9, 9, 9, 9], 24)
    assert not loading([*PROMPT[:24], 9, 9, 9, 9], 28), "it shares less than it wants"
    assert not loading(PROMPT[:-1], 40, "another tenant's")
    scene.run_io()
    assert not loading(PROMPT[:-1], 40)
    scene.tiering.promotions.release(promotion)


def test_loads_are_counted_by_tier_and_outcome() -> None:
    scene = stored_scene()
    rows_of(scene)[:2, 5] ^= 4
    scene.serve("again", PROMPT)
    counts = {tuple(labels): n for labels, n in _counts(scene)}
    assert counts["host", "full", "ok"] + counts["host", "full", "corrupt"] >= PAGES
    assert counts["host", "full", "corrupt"] > 0


def _counts(scene: Scene) -> list[tuple[list[str], int]]:
    counter = scene.tiering.promotions.loaded_pages.as_dict()
    return [(labels, value) for labels, value in counter["values"]]
