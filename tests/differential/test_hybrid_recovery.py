"""Hybrid models resumed through the engine, at every page boundary, with any group's state lost.

What a cold run says is the model's own logits over the whole prompt, computed once by a driver that
has no cache. The engine has served the prompt; it is then asked for prefixes of it, which resume at
their last page boundary.

    whole            everything is there: resumed as it stands
    one group lost   the planner repairs, rebuilds or recomputes: the same logits
    one group blank  zeros under valid marks: visibly other logits (the test that proves the tests)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from statewise.radix.validation import Condition
from statewise.runtime.models import deepseek_v4
from statewise.runtime.models.tiny import TinySize, make_tiny_model
from support.hybrid_driver import HybridDriver
from support.model_recovery import Scene, Served
from support.oracle import token_ids
from support.tiny import load_tiny

TOLERANCE = 2e-4  # of a log probability
TAIL = 5  # tokens behind the boundary


@dataclass(frozen=True)
class Shape:
    """One tiny model and its prompt."""

    arch: str
    layers: int
    page_size: int
    length: int


SHAPES = {
    "deepseek-v4": Shape("deepseek-v4", 8, 16, 1500),
    "deepseek-v32": Shape("deepseek-v32", 3, 16, 500),
    "qwen3-next": Shape("qwen3-next", 4, 16, 500),
    "gpt-oss": Shape("gpt-oss", 4, 16, 500),
}


class Subject:
    """A model, a prompt, and what it says after every prefix."""

    def __init__(self, shape: Shape, path: Path) -> None:
        self.shape, self.path = shape, path
        make_tiny_model(shape.arch, path, size=TinySize(layers=shape.layers))
        self.ids = token_ids(shape.length, seed=12)
        self.prompt: list[int] = self.ids.tolist()

    @cached_property
    def logprobs(self) -> torch.Tensor:
        """[length, V] log probabilities of the token behind each prefix."""
        model = load_tiny(self.path, page_size=self.shape.page_size)
        driver = HybridDriver(model, max_len=self.shape.length, num_sequences=1)
        return driver.run(driver.new(), self.ids).log_softmax(-1)

    def scene(self, **settings: Any) -> Scene:
        """An engine that has served the prompt, with a checkpoint at every page."""
        shape = self.shape
        scene = Scene(**{
            "model_path": str(self.path), "page_size": shape.page_size, "max_total_tokens": 4096,
            "max_window_tokens": 4096, "checkpoint_interval": shape.page_size,
            "chunked_prefill_size": 128, "max_running_requests": 256, **settings,
        })  # fmt: skip
        scene.serve(self.prompt, 1)
        return scene

    def boundaries(self) -> range:
        """Every page boundary that has tokens behind it."""
        page = self.shape.page_size
        return range(page, self.shape.length - TAIL, page)

    def is_right(self, served: Served, num_tokens: int) -> bool:
        """Whether the engine's token is a cold run's, with its log probability."""
        cold = self.logprobs[num_tokens - 1]
        token = served.tokens[0]
        same = abs(served.logprobs[0] - float(cold[token])) < TOLERANCE
        return same and token == int(cold.argmax())


@pytest.fixture(scope="module", params=list(SHAPES))
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Subject(SHAPES[request.param], tmp_path_factory.mktemp("models") / request.param)


@pytest.mark.slow
def test_every_page_boundary_resumes_whole_and_with_any_group_lost(subject: Subject) -> None:
    """At each boundary as it stands, then with a group's last page lost; the groups take turns.

    From the last boundary to the first: a served prefix leaves a snapshot at its end, which lies
    on all deeper prefixes.
    """
    scene = subject.scene(audit=True)
    names = [spec.name for spec in scene.schema.groups]
    recovered: set[str] = set()
    for i, boundary in enumerate(reversed(subject.boundaries())):
        num_tokens, group = boundary + TAIL, names[i % len(names)]
        prefix = subject.prompt[:num_tokens]
        page = boundary // subject.shape.page_size
        served = scene.serve(prefix, 1)
        assert (served.report.level, served.report.reused) == ("direct", boundary)
        assert served.prefilled == TAIL
        assert subject.is_right(served, num_tokens), boundary
        scene.lose(prefix, group, range(page - 1, page))
        plan = scene.plan(prefix)
        served = scene.serve(prefix, 1)
        assert subject.is_right(served, num_tokens), (boundary, group)
        assert served.replayed == plan.replayed_tokens
        if group == "hca_tail":  # nothing is open at a page boundary: no state to lose
            assert served.report.level == "direct"
        else:
            assert served.report.level in ("repair", "rebuild", "recompute"), (boundary, group)
            assert served.report.limiting_group == group
            recovered.add(group)
    assert recovered == set(names) - {"hca_tail"}


@pytest.mark.slow
def test_blank_state_of_one_group_is_visible(subject: Subject) -> None:
    """Within 16 tokens: an entry that was made of blank state must first be chosen."""
    scene = subject.scene()
    boundary = subject.boundaries()[10]
    prefix = subject.prompt[: boundary + TAIL]
    whole = scene.serve(prefix, 16)
    assert subject.is_right(whole, len(prefix))
    for spec in scene.schema.groups:
        if spec.name == "hca_tail":
            continue  # holds nothing at a page boundary
        scene.core.flush()
        scene.serve(prefix[:-1], 1)
        scene.blank(prefix, spec.name)
        blank = scene.serve(prefix, 16)
        assert blank.report.level == "direct"
        assert blank.tokens != whole.tokens or not np.allclose(
            blank.logprobs, whole.logprobs, atol=0.01
        ), spec.name


V4 = SHAPES["deepseek-v4"]
PREFIX = 21 * 16 + TAIL


@pytest.fixture(scope="module")
def v4(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """The model of all five kinds of state, and a prompt of 500 tokens."""
    shape = replace(V4, length=500)
    return Subject(shape, tmp_path_factory.mktemp("models") / "v4")


@pytest.mark.slow
def test_lost_windows_are_replayed_in_steps_of_growing_depth(v4: Subject) -> None:
    """History kept, windows and tails dropped: the receptive field, and of it a trapezoid."""
    scene = v4.scene(audit=True)
    prefix, page = v4.prompt[:PREFIX], v4.shape.page_size
    for group in ("swa", "csa_tail", "hca_tail"):
        scene.lose(prefix, group)
    plan = scene.plan(prefix)
    served = scene.serve(prefix, 1)
    assert served.report.level == "repair"
    assert v4.is_right(served, PREFIX)
    # Layer l computes (layers - l) * (window - 1) tokens, rounded up to pages.
    fields = [-(-depth * 15 // page) * page for depth in range(1, 9)]
    assert plan.replayed_tokens == served.replayed == max(fields)
    computed = sum(replay.num_tokens * replay.num_layers for replay in plan.replays)
    assert sum(fields) <= computed < 8 * max(fields)


@pytest.mark.slow
@pytest.mark.parametrize("group", ["swa", "csa", "idx", "hca"])
def test_f21_a_flipped_bit_of_any_kind_of_state_is_found(v4: Subject, group: str) -> None:
    scene = v4.scene(audit=True, audit_rate=1.0)
    prefix, index = v4.prompt[:PREFIX], scene.schema.index_of(group)
    for layer in range(len(scene.schema.groups[index].layers)):
        before = scene.core.cache.counters.failures(Condition.CHECKSUM)
        scene.flip(prefix, (group, layer, 20), 12345 * (layer + 1))
        served = scene.serve(prefix, 1)
        assert scene.core.cache.counters.failures(Condition.CHECKSUM) == before + 1
        assert served.report.limiting_group == group
        assert served.report.level in ("repair", "rebuild", "recompute")
        assert v4.is_right(served, PREFIX), layer


@pytest.mark.slow
def test_entries_of_another_compression_are_computed_anew(
    v4: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = v4.scene(audit=True)
    prefix = v4.prompt[:PREFIX]
    assert scene.serve(prefix, 1).report.level == "direct"
    monkeypatch.setattr(deepseek_v4, "COMPRESSION", 2)
    other = load_tiny(v4.path, page_size=v4.shape.page_size).schema
    changed = {
        a.name
        for a, b in zip(scene.schema.groups, other.groups, strict=True)
        if a.version != b.version
    }
    assert changed == {"csa", "idx", "csa_tail", "hca", "hca_tail"}
    scene.core.cache.expect(other, scene.core.weights_epoch)
    served = scene.serve(prefix, 1)
    assert served.report.reused == 0
    assert served.report.level in ("none", "rebuild", "recompute")
    assert v4.is_right(served, PREFIX)
    assert scene.serve(prefix, 1).report.level == "direct"
