"""Waiting requests whose state is on its way: a load is an offer, never a condition."""

from __future__ import annotations

from pathlib import Path

import pytest

from statewise.radix import StaleMatchError, Tier
from statewise.runtime.cache.lookup import Lookup
from statewise.runtime.cache.promotion import Promotion
from statewise.runtime.errors import OutOfBlocksError
from statewise.runtime.scheduler.loading import MAX_LOADING, MAX_LOADS
from support.engine import Outcome
from support.tier_scene import PROMPT, QUICK, Scene


def stored_scene(shape: str = "F", **more: object) -> Scene:
    scene = Scene(shape, **more)  # type: ignore[arg-type]
    scene.keep()
    scene.forget_device()
    return scene


def waits_for(scene: Scene, rid: str) -> str:
    """Why a request waits; empty where it does not."""
    request = scene.core.scheduler.waiting.get(rid)
    return "" if request is None else request.blocked_reason


def loaded(outcome: Outcome) -> int:
    assert outcome.report is not None
    return outcome.report.loaded


def test_a_request_waits_while_its_state_is_copied_and_others_run() -> None:
    scene = stored_scene()
    slow = scene.add("slow", PROMPT, 3)
    scene.add("other", [80] * 9, 6)
    for _ in range(3):
        scene.step()
    assert waits_for(scene, "slow").startswith("load:")
    assert len(scene.outcomes["other"].tokens) > 0, "others decode meanwhile"
    scene.run()
    scene.check()
    assert loaded(slow) == 40


def test_a_quick_load_is_waited_for_at_once() -> None:
    scene = stored_scene(bytes_per_s=QUICK)
    quick = scene.add("quick", PROMPT, 1)
    scene.step()  # no I/O but what the load itself waits for
    scene.step()
    assert quick.tokens
    scene.check("quick")
    assert loaded(quick) == 40


def test_a_request_aborted_while_it_loads_leaves_nothing_behind() -> None:
    scene = stored_scene()
    scene.add("gone", PROMPT, 3)
    scene.step()
    assert waits_for(scene, "gone").startswith("load:")
    scene.core.abort("gone")
    scene.step()
    scene.run_io()
    assert not scene.tiering.promotions.open
    scene.quiesce()


def test_what_is_evicted_again_and_again_is_loaded_a_bounded_number_of_times() -> None:
    scene = stored_scene()
    outcome = scene.add("unlucky", PROMPT, 2)
    for _ in range(10):
        scene.step()
        scene.run_io()
        scene.tiering.promotions.give_up_leases()
        scene.forget_device()
    scene.run()
    scene.check()
    by_tier = scene.tiering.promotions.loaded_pages.of(outcome="ok")
    assert by_tier <= MAX_LOADS * 10
    assert outcome.num_finishes == 1


def test_a_request_that_finds_no_blocks_does_without_a_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing runs that could give blocks: it computes, as if nothing were stored."""
    scene = stored_scene()

    def no_blocks(_lookup: Lookup, _rid: str) -> Promotion:
        raise OutOfBlocksError("full", 10, 9)

    monkeypatch.setattr(scene.cache, "promote", no_blocks)
    outcome = scene.add("later", PROMPT, 2)
    scene.run()
    scene.check()
    assert loaded(outcome) == 0
    scene.quiesce()


def test_a_load_whose_state_has_just_changed_is_looked_up_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """F8: what the lookup saw is gone when the load would begin."""
    scene = stored_scene()
    promote, failures = scene.cache.promote, iter([True, False])

    def stale_once(lookup: Lookup, rid: str) -> Promotion:
        if next(failures):
            raise StaleMatchError("injected")
        return promote(lookup, rid)

    monkeypatch.setattr(scene.cache, "promote", stale_once)
    outcome = scene.add("later", PROMPT, 2)
    scene.run()
    scene.check()
    assert loaded(outcome) == 40


def test_two_requests_of_one_prefix_load_it_once() -> None:
    scene = stored_scene()
    first = scene.add("a", PROMPT, 2)
    second = scene.add("b", [*PROMPT[:40], 60, 61], 2)
    scene.step()
    assert {waits_for(scene, rid).split(":")[0] for rid in "ab"} == {"load", "prefix"}
    scene.run()
    scene.check("a", "b")
    assert scene.tiering.promotions.loaded_pages.of(outcome="ok") == 10
    assert loaded(first) + loaded(second) == 40
    assert first.report is not None
    assert second.report is not None
    assert first.report.reused + second.report.reused == 40


def test_a_bounded_number_of_requests_load_at_a_time() -> None:
    prompts = [[1 + (i * k) % 83 for i in range(21)] for k in range(1, 8)]
    scene = Scene("F", blocks=128, host_pages=128)
    for k, prompt in enumerate(prompts):
        scene.keep(prompt, rid=f"first{k}")
    scene.forget_device()
    for k, prompt in enumerate(prompts):
        scene.add(f"again{k}", prompt, 2)
    for _ in range(3):
        scene.step()
        assert sum(not p.is_done for p in scene.tiering.promotions.open) <= MAX_LOADING
    scene.run()
    scene.check()
    assert all(loaded(scene.outcomes[f"again{k}"]) == 20 for k in range(len(prompts)))


def test_what_queued_requests_want_is_fetched_ahead(tmp_path: Path) -> None:
    scene = Scene("F", disk=tmp_path, blocks=24, max_running_requests=1)
    scene.keep()
    scene.forget_device()
    scene.store().free(scene.store().all_handles())
    scene.add("running", [33] * 30, 12)
    scene.step()
    queued = scene.add("queued", PROMPT, 2)
    for _ in range(4):
        scene.step()
        scene.run_io()
    assert scene.core.scheduler.waiting
    assert scene.num_stored("full") >= 10, (scene.tiering.status(), scene.io.counters.as_dict())
    scene.run()
    scene.check()
    assert queued.report is not None
    assert loaded(queued) == 40


def test_a_load_that_fails_costs_computing() -> None:
    """Every page is gone when the load runs: the request is answered as if it were cold."""
    scene = stored_scene()
    outcome = scene.add("a", PROMPT, 2)
    scene.step()
    scene.store(Tier.HOST).free(scene.store(Tier.HOST).all_handles())
    scene.run()
    scene.check()
    assert loaded(outcome) == 0
    scene.quiesce()
