"""Loading from the end while computing from the front: where they meet, what may go wrong."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from statewise.radix import CostModel
from statewise.radix.cost import TierCost
from statewise.runtime.cache.lookup import Lookup
from statewise.runtime.cache.meeting import Meeting
from statewise.runtime.cache.sequence import Sequence
from statewise.runtime.messages import CacheReport
from statewise.runtime.scheduler.request import Request
from support.tier_scene import PAGE, Scene

CHUNK = 8
LONG = [1 + i * 7 % 90 for i in range(161)]
END = 160
# Shapes, and how dear loading is: where it is dearer, replays of some layers are cheaper still.
SHAPES = [("F", 1.0), ("FWF", 1.0), ("WCH", 1.0), ("FRR", 0.3), ("CR", 0.3), ("FS", 0.5)]


def scene_of(shape: str = "FW", share: float = 1.0, **more: object) -> Scene:
    """A prompt is stored; loading a page takes `share` of the time of computing it."""
    settings: dict[str, object] = {"blocks": 160, "host_pages": 160, **more}
    scene = Scene(shape, chunked_prefill_size=CHUNK, **settings)  # type: ignore[arg-type]
    scene.tiering.meetings.batch_bytes = 1
    scene.keep(LONG)
    scene.forget_device()
    believe(scene, share)
    return scene


def believe(scene: Scene, share: float = 1.0) -> None:
    groups = [g for g in scene.schema.groups if g.kind.is_history]
    rate = sum(g.block_bytes(PAGE) for g in groups) / PAGE * 100.0 / share
    model = CostModel.uniform(scene.schema.num_layers, 100.0, chunk=CHUNK)
    scene.core.use_cost(replace(model, tiers=dict.fromkeys(model.tiers, TierCost(rate))))


def request_of(scene: Scene, rid: str = "again") -> Request:
    return scene.core._requests[rid]


def meeting_of(scene: Scene) -> Meeting:
    meeting = request_of(scene).meeting
    assert meeting is not None
    return meeting


def go(scene: Scene, steps_of_io: float, rid: str = "again") -> CacheReport:
    """Run to the end with so many steps of I/O per step of the engine."""
    due = 0.0
    while scene.core.has_work():
        scene.step()
        scene.core.audit()
        due += steps_of_io
        while due >= 1.0:
            due -= 1.0
            scene.io.run_one()
    scene.check(rid)
    report = scene.outcomes[rid].report
    assert report is not None
    return report


def outcomes(scene: Scene) -> dict[str, int]:
    shown = scene.tiering.meetings.meetings.as_dict()["values"]
    return {labels[0]: count for labels, count in shown}


def end(scene: Scene) -> None:
    scene.run_io()
    assert not scene.tiering.meetings.open
    assert not scene.tiering.promotions.open
    scene.quiesce()


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "share"), SHAPES)
@pytest.mark.parametrize("steps_of_io", [0.5, 2.0, 6.0])
def test_they_meet_wherever_they_are(shape: str, share: float, steps_of_io: float) -> None:
    """Slower loads meet later; the output is a cold run's, and the report tells both parts."""
    scene = scene_of(shape, share)
    scene.add("again", LONG, 3)
    report = go(scene, steps_of_io)
    assert outcomes(scene) == {"met": 1}
    assert report.matched == END
    assert report.reused == 0
    assert report.loaded > 0
    assert report.recomputed > 0
    assert report.recomputed + report.loaded == END
    assert report.level == "load"
    met = scene.tiering.meetings.met_tokens
    assert (met.of(part="computed"), met.of(part="loaded")) == (report.recomputed, report.loaded)
    assert scene.core.counters.loaded_tokens == report.loaded, "counted once, at the end"
    assert scene.core.counters.prompt_tokens == 2 * len(LONG)
    assert scene.core.scheduler.num_preemptions == 0
    end(scene)


def test_what_has_arrived_and_turns_out_to_be_wrong_is_not_met() -> None:
    """F21: private blocks are no place in which withdrawn pages survive."""
    scene = scene_of()
    scene.add("again", LONG, 3)
    scene.step()
    meeting = meeting_of(scene)
    while meeting.ready is None:
        assert scene.io.run_one()
        scene.tiering.deliver()
    scene.tiering.withdraw(scene.match(LONG[:END]), END // PAGE - 1)
    report = go(scene, 6.0)
    assert outcomes(scene)["failed"] == 1
    assert report.loaded < END // 2, "not by the pages that had arrived"
    end(scene)


def test_who_computes_for_itself_alone_meets_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it approximates is not in the tree: others would wait for it until it has ended."""
    scene = scene_of()
    begin = scene.cache.begin

    def begin_alone(lookup: Lookup, capacity_tokens: int) -> Sequence:
        sequence = begin(lookup, capacity_tokens)
        sequence.is_private = True
        return sequence

    monkeypatch.setattr(scene.cache, "begin", begin_alone)
    scene.add("again", LONG, 30)
    scene.step()
    assert request_of(scene).sequence is not None
    assert request_of(scene).meeting is None
    assert outcomes(scene) == {"cancelled": 1}
    assert not scene.tiering.meetings.brings(scene.match(LONG), END)
    go(scene, 1.0)
    end(scene)


@pytest.mark.slow
def test_quicker_loads_leave_less_to_compute() -> None:
    computed = []
    for steps_of_io in (0.5, 1.0, 3.0, 9.0):
        scene = scene_of()
        scene.add("again", LONG, 2)
        computed.append(go(scene, steps_of_io).recomputed)
    assert computed == sorted(computed, reverse=True)
    assert computed[0] > 1.5 * computed[-1]


def test_nothing_that_is_loaded_is_computed_too() -> None:
    scene = scene_of()
    scene.add("again", LONG, 1)
    go(scene, 2.0)
    rows = [row for batch in scene.batches for row in batch.rows if row.request_id == "again"]
    spans = sorted((row.start, row.end) for row in rows)
    assert all(a[1] <= b[0] for a, b in pairwise(spans)), spans


@pytest.mark.parametrize("cause", ["never runs", "missing", "damaged"])
def test_a_load_that_fails_costs_nothing_that_was_not_due(cause: str) -> None:
    scene = scene_of()
    scene.add("again", LONG, 3)
    scene.step()
    host = scene.store()
    if cause == "missing":
        host.free(host.all_handles())
    elif cause == "damaged":
        for group in host._groups.values():  # type: ignore[attr-defined]
            group.rows[:, 3] ^= 1
    report = go(scene, 0.0 if cause == "never runs" else 1.0)
    assert report.loaded == 0
    assert scene.core.counters.loaded_tokens == 0
    assert set(outcomes(scene)) == {"passed" if cause == "never runs" else "failed"}
    end(scene)


def test_a_page_that_fails_amid_the_others_is_where_they_meet() -> None:
    scene = scene_of("F")
    scene.add("again", LONG, 3)
    scene.step()
    meeting = meeting_of(scene)
    lost = [w for batch in meeting.batches for w in batch.wanted if w[1] == 30]
    scene.store().free([handle for _, _, _, handle, _ in lost])
    report = go(scene, 6.0)
    assert outcomes(scene) == {"met": 1}
    assert report.loaded == END - 31 * PAGE
    end(scene)


def test_blocks_that_are_written_to_are_nobodys_after_an_abort() -> None:
    """F32: private blocks of copies that run come back when these have ended, not before."""
    scene = scene_of()
    scene.add("again", LONG, 3)
    scene.step()
    meeting = meeting_of(scene)
    held = {g: meeting.blocks(g).tolist() for g in range(scene.schema.num_groups)}
    running = [t for batch in meeting.batches for t in batch.waiting_for]
    assert running
    for transfer in running:
        transfer.num_running += 1  # a thread is amid one of its steps
    scene.core.abort("again")
    scene.step()
    for group, blocks in held.items():
        assert not set(blocks) & set(scene.cache.pools[group].free_blocks().tolist())
    assert any(held.values())
    scene.core.audit()
    for transfer in running:
        transfer.num_running -= 1
        scene.io._finish(transfer)
    end(scene)


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 4, 9])
def test_an_abort_leaves_nothing_behind(after: int) -> None:
    scene = scene_of("WCH")
    scene.add("again", LONG, 3)
    for _ in range(after):
        scene.step()
        scene.io.run_one()
    scene.core.abort("again")
    scene.step()
    assert outcomes(scene) == {"cancelled": 1}
    end(scene)


def test_a_preempted_request_begins_anew() -> None:
    scene = scene_of("FRR", 0.3)
    scene.add("again", LONG, 3)
    for _ in range(4):
        scene.step()
        scene.io.run_one()
    scene.core.scheduler._preempt(request_of(scene))
    assert outcomes(scene) == {"cancelled": 1}
    go(scene, 2.0)
    end(scene)


def test_other_weights_end_it() -> None:
    scene = scene_of("FW")
    scene.add("again", LONG, 3)
    for _ in range(4):
        scene.step()
        scene.io.run_one()
    scene.epoch += 1
    scene.core.update_weights()
    report = go(scene, 1.0)
    assert report.loaded == 0
    assert outcomes(scene) == {"cancelled": 1}
    end(scene)


def test_state_lost_below_them_is_no_harm() -> None:
    """What was evicted or dropped between is computed, or loaded, again."""
    scene = scene_of("FWF")
    scene.add("again", LONG, 3)
    for _ in range(12):
        scene.step()
        scene.io.run_one()
        scene.lose(LONG, "full", [3, 4])
        scene.lose(LONG, "window")
    go(scene, 2.0)
    end(scene)


def test_without_room_for_both_it_computes() -> None:
    pages = -(-len(LONG) // PAGE)
    scene = scene_of("F", blocks=pages + 3)
    believe(scene)
    scene.add("again", LONG, 3)
    report = go(scene, 3.0)
    assert report.loaded == 0 or outcomes(scene).get("met"), "all, or nothing"
    end(scene)


def test_a_running_request_that_is_short_of_blocks_comes_first() -> None:
    scene = scene_of("F", blocks=84, host_pages=160)
    scene.add("again", LONG, 2)
    scene.step()
    assert meeting_of(scene).blocks(0).size > 0
    scene.add("other", [33 + i % 9 for i in range(120)], 30)
    for _ in range(400):
        if not scene.core.has_work():
            break
        scene.step()
        scene.io.run_one()
    scene.check()
    end(scene)


def test_who_shares_the_prefix_waits_for_it() -> None:
    scene = scene_of("FW", max_running_requests=4)
    scene.add("again", LONG, 2)
    second = scene.add("second", [*LONG[:140], 5, 6], 2)
    go(scene, 2.0)
    assert outcomes(scene) == {"met": 1}, "the other loads nothing itself"
    scene.check("second")
    assert second.report is not None
    assert second.report.reused >= 128
    end(scene)


def test_a_quick_tier_is_only_loaded_from_and_a_slow_one_not_at_all() -> None:
    assert outcomes(_served(0.01)) == {}
    assert outcomes(_served(1.0)) == {"met": 1}
    slow = _served(200.0)
    assert outcomes(slow) == {}
    assert slow.core.counters.loaded_tokens == 0


def _served(share: float) -> Scene:
    scene = scene_of("F", share)
    scene.add("again", LONG, 2)
    go(scene, 2.0)
    return scene


def test_deterministic_runs_meet_at_whole_chunks() -> None:
    scene = scene_of("F", deterministic=True)
    scene.add("again", LONG, 3)
    report = go(scene, 2.0)
    assert outcomes(scene) == {"met": 1}
    assert report.recomputed % CHUNK == 0
    end(scene)


def test_what_is_loaded_before_the_request_runs_is_met_when_it_does() -> None:
    scene = scene_of("F")
    scene.add("again", LONG, 2)
    scheduler, request = scene.core.scheduler, request_of(scene)
    lookup = scheduler._lookup(request)
    assert scheduler.loading.must_wait(request, lookup, is_alone=True) is None
    for _ in range(200):  # no room in the batch, say
        scene.run_io()
        scene.tiering.meetings.advance(meeting_of(scene), 0)
    report = go(scene, 0.0)
    assert (report.loaded, report.recomputed) == (END, 0)
    assert outcomes(scene) == {"met": 1}
    end(scene)


def test_it_is_told() -> None:
    scene = scene_of("F")
    told: list[dict[str, object]] = []
    scene.tiering.told.met = lambda *args: told.append({"met": args})  # type: ignore[method-assign]
    scene.add("again", LONG, 2)
    report = go(scene, 2.0)
    assert told == [{"met": ("again", 0, report.recomputed, END)}]
    assert "computed while the rest was loaded" in report.reason


def test_what_takes_long_is_cut_into_pieces_that_a_step_can_meet() -> None:
    """The end is apart, history in pieces of a fraction of a step, however large they may be."""
    scene = scene_of()
    scene.tiering.meetings.batch_bytes = 1 << 30
    scene.add("again", LONG, 3)
    scene.step()
    batches = meeting_of(scene).batches
    assert {group for group, *_ in batches[0].wanted} == {1}, "the window alone"
    assert {group for batch in batches[1:] for group, *_ in batch.wanted} == {0}
    per_step = CHUNK // PAGE  # loading a page takes as long as computing it
    assert all(batch.end - batch.first <= max(per_step // 2, 1) for batch in batches[1:])
    assert len(batches) > 4
    go(scene, 6.0)
    assert outcomes(scene) == {"met": 1}
    end(scene)
