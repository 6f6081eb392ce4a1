"""What the machine module reads is plausible, and a cgroup's limit counts."""

from __future__ import annotations

import gc
import os

import psutil

from statewise.runtime import machine


def test_memory_is_within_the_machine():
    free = machine.available_memory_bytes()
    assert 0 < free <= psutil.virtual_memory().total


def test_a_cgroup_limit_below_the_free_memory_wins(tmp_path, monkeypatch):
    limit, used = tmp_path / "memory.max", tmp_path / "memory.current"
    monkeypatch.setattr(machine, "_CGROUP_FILES", ((str(limit), str(used)),))
    for written, expected in (("3000000", 2_000_000), ("500", 0)):
        limit.write_text(written)
        used.write_text("1000000")
        assert machine.available_memory_bytes() == expected
    limit.write_text("max")
    assert machine.available_memory_bytes() > 2_000_000


def test_cores_are_those_this_process_may_use():
    allowed = len(os.sched_getaffinity(0))
    assert 1 <= machine.num_physical_cores() <= allowed
    assert isinstance(machine.has_fast_bfloat16(), bool)


def test_passive_waiting_does_not_overrule_the_environment(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    machine.wait_passively()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    machine.wait_passively()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"


def test_freed_memory_goes_back_to_the_system():
    def resident() -> int:
        return psutil.Process().memory_info().rss

    kept = [bytearray(1000) for _ in range(100_000)]  # too small for mappings of their own
    last, full = bytearray(1000), resident()
    del kept
    try:
        machine.settle_memory()
        assert gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()
    assert resident() < full - (50 << 20)
    assert len(last) == 1000
