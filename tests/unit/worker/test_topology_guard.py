"""A step never runs over pools other than those its fixed parts were made for."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from statewise.runtime.scheduler.batch import ScheduledBatch
from statewise.runtime.worker.topology_guard import TopologyChangedError, TopologyGuard
from support.runner import Driver
from support.toy_model import ToyModel


def tensors() -> dict[str, torch.Tensor]:
    return {"a": torch.zeros(4, 6), "b": torch.zeros(3, dtype=torch.int32)}


def test_contents_may_change() -> None:
    held = tensors()
    guard = TopologyGuard.capture(held)
    held["a"].fill_(float("nan"))
    held["b"][1] = 7
    guard.check(held)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t | {"a": t["a"].clone()}, "a: another address"),
        (lambda t: t | {"a": t["a"].view(6, 4)}, "a: another shape, strides"),
        (lambda t: t | {"a": t["a"].view(torch.int32)}, "a: another dtype"),
        (lambda t: t | {"a": t["a"][:2]}, "a: another shape"),
        (lambda t: {"a": t["a"]}, "b is gone"),
        (lambda t: t | {"c": torch.zeros(1)}, "c is new"),
    ],
)
def test_moved_memory_is_named(change: object, named: str) -> None:
    held = tensors()
    guard = TopologyGuard.capture(held)
    with pytest.raises(TopologyChangedError, match=named):
        guard.check(change(held))  # type: ignore[operator]


def test_a_tensor_of_equal_shape_and_other_strides_is_noticed() -> None:
    base = torch.zeros(4, 4)
    guard = TopologyGuard.capture({"a": base})
    with pytest.raises(TopologyChangedError, match="strides"):
        guard.check({"a": base.t()})


def test_a_runner_refuses_a_step_over_moved_pools() -> None:
    driver = Driver(ToyModel())
    driver.runner.execute(ScheduledBatch(1, ()))
    pool = driver.store.groups[0]
    moved = dataclasses.replace(pool, layers=tuple(t.clone() for t in pool.layers))
    driver.store.groups = (moved, *driver.store.groups[1:])
    with pytest.raises(TopologyChangedError, match="another address"):
        driver.runner.execute(ScheduledBatch(2, ()))
    driver.runner.recapture()
    driver.runner.execute(ScheduledBatch(3, ()))
