"""What is copied out, when, from which bytes; and that nobody waits for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from statewise.radix import Cause, Tier
from statewise.runtime.cache import demotion
from statewise.runtime.tiers.store import NO_HANDLE, Outcome
from statewise.runtime.tiers.transfer import PageResult, Priority, Step, Transfer
from support.tier_scene import PROMPT, Scene

FULL_PAGES = len(PROMPT) // 4


def test_history_is_copied_and_only_those_window_pages_somebody_would_resume_from() -> None:
    scene = Scene("FW")
    scene.keep()
    assert scene.num_stored("full") == FULL_PAGES + 1, "four generated tokens fill one more"
    assert 0 < scene.num_stored("window") <= 2 * 3, "a window of 6 tokens covers at most 3 pages"
    scene.forget_device()
    again = scene.serve("again", PROMPT)
    assert again.report is not None
    assert again.report.loaded == 4 * FULL_PAGES


@pytest.mark.parametrize("shape", ["F", "FW", "FR", "C", "HFC"])
def test_everything_that_was_copied_is_right(shape: str, tmp_path: Path) -> None:
    """Host and disk; the device is poisoned in between, and every output is a cold run's."""
    scene = Scene(shape, disk=tmp_path)
    scene.keep()
    scene.forget_device()
    scene.keep([*PROMPT[:30], 5, 6, 7], rid="other")
    scene.forget_device()
    last = scene.serve("last", PROMPT)
    assert last.report is not None
    assert last.report.loaded > 0
    assert scene.num_stored("full" if "F" in shape else "entries", Tier.DISK) > 0


def test_a_block_evicted_while_it_is_copied_is_not_given_away() -> None:
    """F32: both ends of a copy stay until it has ended."""
    scene = Scene("F")
    scene.serve("first", PROMPT)
    scene.core.idle()
    assert scene.io.num_open == 1
    scene.cache.free_all()
    (pool,) = scene.cache.pools
    assert pool.num_parked == FULL_PAGES + 1
    scene.worker.poison(0, pool.free_blocks().copy())
    free = set(pool.free_blocks().tolist())
    assert not free & set(pool.parked_blocks().tolist())
    scene.core.audit()
    scene.run_io()
    assert pool.num_parked == 0
    assert pool.num_free == pool.num_blocks
    scene.worker.poison(0, pool.free_blocks().copy())
    again = scene.serve("again", PROMPT)
    assert again.report is not None
    assert again.report.loaded == 4 * FULL_PAGES, "what was evicted meanwhile has a copy"


def test_a_block_that_was_given_away_during_its_copy_has_no_copy() -> None:
    """F12: what lies in it next is copied for itself."""
    scene = Scene("F", blocks=14)
    scene.serve("first", PROMPT)
    scene.core.idle()
    copied = scene.match(PROMPT).blocks(0)
    scene.cache.free_all()
    scene.run_io()
    assert not scene.tiering.mirror.has(0, copied).any()
    other = [50 + i % 31 for i in range(41)]
    scene.keep(other, rid="second")
    scene.forget_device()
    assert scene.offer(other) is not None
    again = scene.serve("again", other)
    assert again.report is not None
    assert again.report.loaded == 4 * FULL_PAGES


def test_a_long_path_is_copied_in_parts_under_the_right_names() -> None:
    """F15: a page that was stored under another's name would answer another prompt."""
    long = [1 + (i * i) % 90 for i in range(4 * 150 + 1)]
    scene = Scene("FW", blocks=200, host_pages=200)
    scene.keep(long)
    assert scene.num_stored("full") == 151
    scene.forget_device()
    again = scene.serve("again", long)
    assert again.report is not None
    assert again.report.loaded == 600


def test_what_decodes_does_not_wait_for_copies_to_be_queued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Copies keep to a small share then: what is queued beyond a few of them only waits, pinned."""
    scene = Scene("F", blocks=200, host_pages=200)
    page = scene.tiering.tiers.shapes[0].block_bytes
    monkeypatch.setattr(demotion, "QUEUED_BESIDE_ROWS", 20 * page)
    scene.serve("first", LONG)
    scene.tiering.set_decoding(True)
    for _ in range(20):
        scene.tiering.poll()
    queued = scene.tiering.tiers.engine.queued_bytes(Priority.DEMOTE)
    assert queued == 32 * page, "two ticks of sixteen pages"
    scene.run_io()
    scene.tiering.poll()
    assert scene.num_stored("full") == 32, "and goes on when these have ended"
    assert scene.tiering.tiers.engine.queued_bytes(Priority.DEMOTE) == 16 * page
    scene.tiering.set_decoding(False)
    while scene.tiering.is_busy:
        scene.tiering.poll()
        scene.run_io()
    assert scene.num_stored("full") == 101


LONG = [1 + (i * i) % 90 for i in range(4 * 100 + 1)]


@pytest.mark.parametrize("host_pages", [1, 4])
@pytest.mark.parametrize("shape", ["FW", "FR", "HFC"])
def test_a_host_smaller_than_one_prompt_pushes_nothing_out_before_it_is_on_disk(
    shape: str, host_pages: int, tmp_path: Path
) -> None:
    """Pages were pushed out of the host by later ones of their own prompt, copied nowhere."""
    scene = Scene(shape, blocks=200, host_pages=host_pages, disk=tmp_path)
    scene.keep(LONG)
    history = [spec.name for spec in scene.schema.groups if spec.kind.is_history]
    assert {name: scene.num_stored(name, Tier.DISK) for name in history} == dict.fromkeys(
        history, 101
    )
    assert all(scene.num_stored(name) for name in history), "the host has its part"
    scene.forget_device()
    again = scene.serve("again", LONG)
    assert again.report is not None
    assert again.report.loaded == 400
    scene.quiesce()


def test_what_a_disk_refuses_goes_through_the_host_again(tmp_path: Path) -> None:
    """A disk that takes nothing: the host keeps what it can of the end."""
    scene = Scene("F", blocks=200, host_pages=8, disk=tmp_path)
    scene.store(Tier.DISK).stage = lambda group, count: []  # type: ignore[method-assign]
    scene.store(Tier.DISK).commit = (  # type: ignore[method-assign]
        lambda pages: [NO_HANDLE] * len(pages)
    )
    scene.keep(LONG)
    assert scene.num_stored("full", Tier.DISK) == 0
    assert scene.num_stored("full") == 8
    scene.keep(PROMPT, rid="other")
    scene.quiesce()


def test_what_is_stored_already_is_not_copied_again() -> None:
    scene = Scene("F")
    scene.keep()
    written = scene.store().status().counters["pages_written"]
    mirrored = scene.cache.tree.ledger.total(0, Cause.MIRROR)
    scene.serve("again", PROMPT, 1)
    scene.settle()
    assert scene.store().status().counters["pages_written"] == written
    scene.believe(1e-3)  # loading is dear: the same state is computed again
    scene.forget_device()
    scene.serve("third", PROMPT, 1)
    scene.settle()
    assert scene.store().status().counters["pages_written"] == written
    assert scene.cache.tree.ledger.total(0, Cause.MIRROR) == mirrored
    match = scene.match(PROMPT)
    assert scene.tiering.mirror.has(0, match.blocks(0)).all(), "it is known to have a copy"


def test_a_page_that_its_tier_dropped_is_copied_again() -> None:
    scene = Scene("F")
    scene.keep()
    store = scene.store()
    (handle,) = store.find([_key_of_page(scene, 3)])
    store.report_corrupt(handle)
    scene.tiering.deliver()
    blocks = scene.match(PROMPT).blocks(0)
    has = scene.tiering.mirror.has(0, blocks)
    assert has.tolist() == [page != 3 for page in range(len(blocks))]
    scene.serve("again", PROMPT, 1)
    scene.settle()
    assert scene.num_stored("full") == FULL_PAGES + 1
    assert scene.tiering.mirror.has(0, blocks).all()


def _key_of_page(scene: Scene, page: int) -> bytes:
    match = scene.match(PROMPT)
    names = scene.tiering.stored.names(match.namespace, match.key)
    return scene.tiering.stored.page_address(names, 0, page).key


def test_a_full_write_behind_refuses_and_is_asked_again_later() -> None:
    scene = Scene("F", blocks=128, max_queued_bytes=64)
    other = [1 + i % 7 for i in range(41)]
    scene.add("a", PROMPT, 4)
    scene.add("b", other, 4)
    while scene.core.has_work():
        scene.step()  # no I/O happens
    scene.check()
    scene.core.idle()
    assert scene.io.counters["demotions_refused"] > 0
    scene.settle()
    assert scene.num_stored("full") > FULL_PAGES + 1
    scene.forget_device()
    scene.serve("c", other)
    scene.serve("d", PROMPT)


def test_what_was_refused_is_not_prepared_anew_before_a_copy_has_ended() -> None:
    scene = Scene("F", blocks=128, max_queued_bytes=64)
    scene.add("a", PROMPT, 4)
    scene.add("b", [1 + i % 7 for i in range(41)], 4)
    while scene.core.has_work():
        scene.step()  # no I/O happens
    scene.core.idle()
    refused = scene.io.counters["demotions_refused"]
    assert refused > 0
    assert scene.io.num_open > 0
    for _ in range(5):
        scene.core.idle()
    assert scene.io.counters["demotions_refused"] == refused
    scene.settle()
    assert scene.num_stored("full") > FULL_PAGES + 1


def test_a_request_short_of_blocks_calls_copies_off() -> None:
    scene = Scene("F", blocks=14)
    scene.serve("first", PROMPT)
    scene.core.idle()
    assert scene.io.num_open == 1
    assert scene.tiering.demotion.yield_blocks()
    scene.tiering.deliver()
    assert scene.io.num_open == 0
    assert scene.num_stored("full") == 0, "nothing had begun"
    assert not scene.tiering.is_busy, "and nothing begins at once"
    scene.cache.free_all()
    assert scene.cache.pools[0].num_parked == 0
    assert not scene.tiering.demotion.yield_blocks()


def test_running_requests_never_wait_for_copies() -> None:
    """No I/O ever happens: pools are small, copies are queued, requests end all the same."""
    scene = Scene("FW", blocks=16)
    prompts = [[1 + (i * k) % 89 for i in range(37)] for k in range(1, 6)]
    for k, prompt in enumerate(prompts):
        scene.add(f"r{k}", prompt, 6)
    for _ in range(400):
        if not scene.core.has_work():
            break
        scene.step()  # and no I/O
    scene.check()


def test_copies_hold_a_bounded_share_of_a_pool() -> None:
    scene = Scene("F", blocks=64, step_bytes=32)
    for k in range(4):
        scene.serve(f"r{k}", [1 + (i * (k + 2)) % 89 for i in range(41)])
    for _ in range(20):
        scene.core.idle()  # nothing ends
    pinned = sum(t.num_pages for t in scene.io.open_transfers())
    assert 0 < pinned <= 16, "a quarter of 64 blocks"
    scene.settle()
    assert scene.num_stored("full") == 4 * (FULL_PAGES + 1)


def test_a_damaged_block_is_not_copied_out_where_checksums_are_kept() -> None:
    """F21: damage stays where it is, and does not pass for good state elsewhere."""
    scene = Scene("F", audit_rate=1.0, patrol_blocks=0)
    scene.serve("first", PROMPT)
    block = int(scene.match(PROMPT).blocks(0)[4])
    scene.worker.flip(0, 0, block, 1, 17)
    scene.settle()
    assert scene.num_stored("full") == FULL_PAGES, "all but one"
    scene.forget_device()
    again = scene.serve("again", PROMPT)
    assert again.report is not None
    assert again.report.loaded == 4 * 4, "up to the damaged page"


def test_when_free_blocks_get_few_what_would_go_first_is_copied_early() -> None:
    """Paths that were given up for want of room are found again by their place in the order."""
    scene = Scene("F", blocks=16)
    scene.serve("first", PROMPT)
    scene.tiering.demotion.forget_paths()
    assert scene.num_stored("full") == 0
    scene.core.idle()  # five of sixteen blocks are free: enough
    assert scene.io.num_open == 0
    scene.add("second", [50] * 9, 8)
    scene.step()
    scene.step()
    scene.core.idle()
    scene.run()
    scene.settle()
    assert scene.num_stored("full") >= FULL_PAGES


def test_state_of_weights_that_are_gone_is_not_copied() -> None:
    scene = Scene("F")
    scene.serve("first", PROMPT)
    scene.epoch += 1
    scene.core.update_weights("other")
    scene.settle()
    assert scene.num_stored("full") == 0
    np.testing.assert_array_equal(scene.store().find([_key_of_page(scene, 0)]), [-1])


@pytest.mark.parametrize("shape", ["FW", "FR", "HFC"])
def test_what_a_resume_needs_beside_history_is_copied_first(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is evicted first, and history that came down without it was worth nothing."""
    for name in ("PAGES_PER_TICK", "PAGES_BESIDE_ROWS"):
        monkeypatch.setattr(demotion, name, 4)
    scene = Scene(shape, blocks=300, host_pages=300)
    for rid, prompt in (("first", LONG), ("second", [7, *LONG])):
        scene.serve(rid, prompt)
    for _ in range(6):
        scene.tiering.poll()
        scene.run_io()
    groups = scene.schema.groups
    trailing = [spec.name for spec in groups if not spec.kind.is_history]
    history = [spec.name for spec in groups if spec.kind.is_history]
    early = {name: scene.num_stored(name) for name in trailing}
    assert all(scene.num_stored(name) < 100 for name in history), "most of it is still to come"
    scene.settle()
    assert all(scene.num_stored(name) > 200 for name in history)
    assert early == {name: scene.num_stored(name) for name in trailing}
    assert any(early.values())


@pytest.mark.parametrize("shape", ["F", "FW", "FR"])
def test_copies_that_were_called_off_get_their_turn_again(shape: str) -> None:
    """Blocks that a request was short of cost a prompt parts of its history for good."""
    scene = Scene(shape, step_bytes=1)
    scene.serve("first", PROMPT)
    scene.core.idle()
    assert scene.io.run_one()
    assert scene.cache.tiering is not None
    assert scene.tiering.demotion.yield_blocks()
    scene.run_io()
    assert scene.num_stored("full") <= 1
    assert scene.core.idle(), "there is more to do, soon"
    scene.clock.pass_time(1.1)
    scene.settle()
    assert scene.num_stored("full") == FULL_PAGES + 1
    scene.forget_device()
    again = scene.serve("again", PROMPT)
    assert again.report is not None
    assert again.report.loaded == 4 * FULL_PAGES


def test_the_end_of_a_path_is_copied_before_it_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path is evicted from its end: copied from its front, it lost the rest to the next one."""
    for name in ("PAGES_PER_TICK", "PAGES_BESIDE_ROWS"):
        monkeypatch.setattr(demotion, name, 4)
    scene = Scene("FW", blocks=112, host_pages=300)
    scene.serve("first", LONG)
    for _ in range(3):
        scene.tiering.poll()
        scene.run_io()
    assert scene.num_stored("full") < 50
    scene.keep([90 - i % 80 for i in range(61)], rid="second")
    assert scene.num_stored("full") == 101 + 16
    scene.forget_device()
    again = scene.serve("again", LONG)
    assert again.report is not None
    assert again.report.loaded == 400


def test_a_queue_that_others_had_filled_is_asked_again_when_it_is_empty() -> None:
    """Copies between tiers fill it as well: none of this tree's own ends then."""
    scene = Scene("F", max_queued_bytes=64)
    step = Step(0, 1, 64, lambda: [PageResult(Outcome.OK)])
    assert scene.io.submit(Transfer("move", Tier.DISK, Priority.DEMOTE, [step]))
    scene.add("first", PROMPT, 4)
    while scene.core.has_work():
        scene.step()  # no I/O happens
    scene.core.idle()
    assert scene.io.counters["demotions_refused"] > 0
    assert scene.io.num_open == 1, "the other one"
    scene.run_io()
    scene.settle()
    assert scene.num_stored("full") == FULL_PAGES + 1
