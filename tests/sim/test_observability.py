"""What is counted and told about cached state, over the digest model."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from statewise.runtime.events import EVENTS, EventLog, log_to_file
from statewise.runtime.server.metrics import Metrics
from support.engine import VOCAB, Driver, make_schema

PROMPT = [3 + i * 7 % (VOCAB - 3) for i in range(75)]


def driver(shape: str = "FWF", blocks: int = 64, **args: object) -> Driver:
    schema = make_schema(shape, 8, 12)
    return Driver(schema, (blocks,) * schema.num_groups, chunked_prefill_size=32, **args)


def labelled(d: Driver, name: str) -> dict[tuple[str, ...], float]:
    data = d.core.stats()["labelled"][name]
    return {tuple(key): value for key, value in data["values"]}


# ------------------------------------------------------------------------- counters


def test_a_hit_passes_every_layer_of_the_chain() -> None:
    d = driver()
    d.serve("cold", PROMPT, 2)
    assert labelled(d, "validations") == {}, "nothing was found: no hit"
    d.serve("hit", PROMPT, 2)
    layers = ("integrity", "kernel_abi", "intersection", "alignment")
    assert labelled(d, "validations") == {(layer, "passed"): 1 for layer in layers}
    assert labelled(d, "cache_hits") == {(): 1}
    assert d.core.stats()["state_inconsistency_rate"] == 0.0


def test_stale_state_is_counted_once_however_long_the_hit_waits() -> None:
    d = driver("FW", blocks=24)
    d.serve("old", PROMPT, 2)
    d.core.update_weights()
    d.epoch += 1
    d.add("first", [90, *PROMPT[:70]], 60)
    d.step()
    d.add("second", PROMPT, 60)
    d.run()
    d.check("first", "second")
    assert labelled(d, "admissions_delayed")["blocks", "full"] == 1, "what is tested"
    assert labelled(d, "inconsistent_hits") == {(): 1}
    assert d.core.stats()["state_inconsistency_rate"] <= 1.0
    pages = sum(labelled(d, "validation_failures").values())
    assert pages <= 2 * len(PROMPT) // 8


def test_a_lost_window_is_absent_and_limits_the_reuse() -> None:
    d = driver("FWFWF")
    d.serve("cold", PROMPT, 2)
    d.lose(PROMPT, "window")
    d.serve("repaired", PROMPT, 2)
    assert labelled(d, "validations")["intersection", "absent"] == 1
    report = d.outcomes["repaired"].report
    assert report is not None
    assert report.limiting_group == "window"
    assert labelled(d, "shortfall_tokens") == {("window",): report.matched - report.reused}


def test_a_recovery_is_counted_with_its_tokens_and_time() -> None:
    d = driver("F" * 12, audit_rate=1.0)
    d.serve("cold", PROMPT, 2)
    d.worker.flip(0, 0, int(d.match(PROMPT).blocks(0)[4]), 0, 3)
    d.serve("rebuilt", PROMPT, 2)
    assert labelled(d, "recoveries")["rebuild", "completed"] == 1
    assert labelled(d, "recovery_tokens")["rebuild",] == 8
    ((key, histogram),) = d.core.stats()["histograms"]["recovery_seconds"]["values"]
    assert key == ["rebuild"]
    assert histogram["num"] == 1
    assert histogram["sum"] >= d.worker.step_s
    failures = labelled(d, "validation_failures")
    assert failures == {("integrity", "checksum", "full", "use"): 1}
    assert d.core.stats()["state_inconsistency_rate"] == 1.0


def test_a_request_aborted_amid_its_recovery_abandons_it() -> None:
    d = driver("F" * 12, audit_rate=1.0, blocks=128)
    long = [1 + i % 90 for i in range(400)]
    d.serve("cold", long, 1)
    for page in range(40):
        d.worker.flip(0, 9, int(d.match(long).blocks(0)[page]), 0, 3)
    d.add("hurt", long, 1)
    d.step()
    assert d.batches[-1].rows[0].kind.value == "replay"
    d.core.abort("hurt")
    d.run()
    assert labelled(d, "recoveries")["rebuild", "abandoned"] == 1
    assert ("rebuild", "completed") not in labelled(d, "recoveries")


def test_evictions_name_the_group_that_was_short() -> None:
    d = driver("FWF", blocks=16)
    for i in range(4):
        d.serve(f"r{i}", [1 + (i * 31 + j) % 90 for j in range(70)], 2)
    evicted = labelled(d, "evicted_blocks")
    assert evicted["full", "room"] > 0
    d.core.flush()
    assert labelled(d, "evicted_blocks")["full", "flush"] > 0
    assert d.core.stats()["pools"]["full"]["evicted"] == evicted["full", "room"] + evicted.get(
        ("full", "follows"), 0
    )


def test_who_waits_is_counted_once_by_cause_and_short_group() -> None:
    d = driver("FF", blocks=12)
    d.add("a", PROMPT[:60], 20)
    d.step()
    d.add("b", [9, *PROMPT[:60]], 20)
    for _ in range(5):
        d.step()
    d.run()
    d.check()
    delayed = labelled(d, "admissions_delayed")
    assert delayed == {("blocks", "full"): 1}


def test_refusals_are_counted_by_code() -> None:
    d = driver()
    d.add("bad", [VOCAB + 5], 1)
    d.run()
    assert labelled(d, "admissions_refused") == {("invalid_request",): 1}


def test_transitions_balance_what_is_cached() -> None:
    """Published and not gone again: what the tree holds now, in every group."""
    d = driver("FWF", blocks=20)
    for i in range(6):
        d.serve(f"r{i}", [1 + (i * 31 + j) % 90 for j in range(70)], 2)
    moved = labelled(d, "state_transitions")
    for g, group in enumerate(d.schema.groups):
        gone = sum(moved.get((group.name, cause), 0) for cause in ("evict", "drop", "flush"))
        assert moved[group.name, "publish"] - gone == len(d.cache.tree.blocks(g)), group.name


# ------------------------------------------------------------------------- events


@pytest.fixture
def events(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "deep" / "events.jsonl"
    handler = log_to_file(str(path))
    yield path
    EVENTS.removeHandler(handler)
    EVENTS.setLevel(logging.NOTSET)
    handler.close()


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_events_tell_a_recovery_from_failure_to_end(events: Path) -> None:
    d = driver("F" * 12, audit_rate=1.0)
    d.serve("cold", PROMPT, 1)
    d.worker.flip(0, 2, int(d.match(PROMPT).blocks(0)[4]), 0, 3)
    d.serve("hurt", PROMPT, 1)
    told = read(events)
    assert all(event["at"] > 1e9 for event in told)
    names = [event["event"] for event in told]
    failed = told[names.index("validation_failed")]
    assert failed["pages"] == [4]
    assert failed["layers"] == 0b100
    assert (failed["group"], failed["condition"], failed["source"]) == ("full", "checksum", "use")
    planned = told[names.index("recovery_planned")]
    assert (planned["rid"], planned["level"]) == ("hurt", "rebuild")
    assert planned["replays"] == [[32, 40, 3, 1]]
    done = told[names.index("recovery_completed")]
    assert (done["rid"], done["num_tokens"]) == ("hurt", 8)
    assert names.index("validation_failed") < names.index("recovery_completed")
    marks = [e for e in told if e["event"] == "transition" and e["cause"] == "mark"]
    assert [(m["group"], m["num_pages"]) for m in marks] == [("full", 1)]


def test_events_tell_delays_refusals_and_weights(events: Path) -> None:
    d = driver("FF", blocks=12)
    d.add("a", PROMPT[:60], 20)
    d.step()
    d.add("b", [9, *PROMPT[:60]], 20)
    d.add("bad", [VOCAB], 1)
    d.step()
    d.run()
    d.core.update_weights()
    told = {event["event"]: event for event in read(events)}
    assert (told["admission_delayed"]["rid"], told["admission_delayed"]["group"]) == ("b", "full")
    assert told["admission_refused"]["code"] == "invalid_request"
    assert told["weights_updated"]["weights_epoch"] == 1


def test_nobody_listens_by_default(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        d = driver()
        d.serve("a", PROMPT, 2)
    assert not EventLog().is_on
    assert caplog.records == []


# ------------------------------------------------------------------------- metrics


def test_every_counter_reaches_the_metrics() -> None:
    d = driver("F" * 12, audit_rate=1.0)
    d.serve("cold", PROMPT, 2)
    d.worker.flip(0, 0, int(d.match(PROMPT).blocks(0)[4]), 0, 3)
    d.serve("hurt", PROMPT, 2)
    d.cache.patrol.step(3)
    metrics = Metrics("m", with_sglang_names=True)
    metrics.engine_stats = lambda: json.loads(json.dumps(d.core.stats()))
    text = metrics.render().decode()
    for line in (
        'statewise:validations_total{layer="integrity",model_name="m",outcome="failed"} 1.0',
        'statewise:validation_failures_total{condition="checksum",group="full",layer="integrity",'
        'model_name="m",source="use"} 1.0',
        'statewise:recoveries_total{level="rebuild",model_name="m",outcome="completed"} 1.0',
        'statewise:recovery_tokens_total{level="rebuild",model_name="m"} 8.0',
        'statewise:recovery_seconds_count{level="rebuild",model_name="m"} 1.0',
        'statewise:state_transitions_total{cause="mark",group="full",model_name="m"} 1.0',
        'statewise:blocks{group="full",model_name="m",state="cached",tier="device"} 9.0',
        'statewise:patrolled_blocks_total{group="full",model_name="m"} 3.0',
        'statewise:cache_hits_total{model_name="m"} 1.0',
        'statewise:inconsistent_hits_total{model_name="m"} 1.0',
        'statewise:state_inconsistency_rate{model_name="m"} 1.0',
        'statewise:shortfall_tokens_total{group="full",model_name="m"} 8.0',
        'statewise:queue_seconds_count{model_name="m"} 2.0',
        'sglang:cache_hit_rate{model_name="m"}',
    ):
        assert line in text, line
