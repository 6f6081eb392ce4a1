"""Bounded replay: off unless asked for; close to exact, reported as such, and never shared."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from statewise.radix.bounded import can_be_bounded
from statewise.radix.plan import Level
from statewise.runtime.models.tiny import TinySize, make_tiny_model
from support.model_recovery import Scene
from support.published import GPT_OSS_20B, QWEN3_NEXT_80B, V4_FLASH, schema_of

RNG = random.Random(3)
PROMPT = [RNG.randrange(256) for _ in range(325)]
PAGE, LENGTH, FIELD = 16, 320, 8 * 15  # layers x (window - 1)
TRAILING = {"deepseek-v4": ("swa", "csa_tail", "hca_tail"), "gemma3": ("window",)}


@pytest.fixture(scope="module", params=list(TRAILING))
def arch(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def model(arch: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(arch, tmp_path_factory.mktemp("m") / arch, size=TinySize(layers=8))


def scene_of(model: Path, bounded: int) -> Scene:
    return Scene(
        model_path=str(model), page_size=PAGE, max_total_tokens=2048, audit=True,
        chunked_prefill_size=64, checkpoint_policy="ends", bounded_replay=bounded,
    )  # fmt: skip


def lose_trailing(scene: Scene, arch: str) -> None:
    for group in TRAILING[arch]:
        scene.lose(PROMPT, group)


def test_it_is_off_unless_asked_for(model: Path, arch: str) -> None:
    scene = scene_of(model, 0)
    scene.serve(PROMPT, 1)
    lose_trailing(scene, arch)
    assert scene.plan(PROMPT).level is not Level.BOUNDED
    assert scene.plan(PROMPT).is_exact


def test_it_replays_what_was_asked_for_and_shares_nothing(model: Path, arch: str) -> None:
    scene = scene_of(model, 20)
    whole = scene.serve(PROMPT, 24)
    for _ in range(2):  # nothing was healed by the first time
        lose_trailing(scene, arch)
        cached = {g: len(scene.core.cache.tree.blocks(g)) for g in range(scene.schema.num_groups)}
        served = scene.serve(PROMPT, 24)
        assert served.report.level == "bounded"
        assert served.report.reason.startswith("approximate")
        assert (served.replayed, served.prefilled) == (32, 5)  # 20 tokens, rounded up to pages
        after = {g: len(scene.core.cache.tree.blocks(g)) for g in range(scene.schema.num_groups)}
        assert after == cached
        # Close, and not equal: a cut-off window was read.
        assert served.logprobs[0] != whole.logprobs[0]
    scene.core.flush()
    assert scene.serve(PROMPT, 24).tokens == whole.tokens
    scene.core.flush()
    assert all(p.num_free == p.num_blocks for p in scene.core.cache.pools)


@pytest.mark.parametrize(
    ("config", "allowed"), [(V4_FLASH, True), (GPT_OSS_20B, True), (QWEN3_NEXT_80B, False)]
)
def test_recurrent_state_cannot_be_bounded(config: dict[str, Any], allowed: bool) -> None:
    assert can_be_bounded(schema_of(config)) is allowed


def test_who_insists_on_exact_state_gets_an_exact_replay(model: Path, arch: str) -> None:
    scene = scene_of(model, 20)
    whole = scene.serve(PROMPT, 8)
    lose_trailing(scene, arch)
    served = scene.serve(PROMPT, 8, exact=True)
    assert served.report.level in ("repair", "recompute")
    assert served.tokens == whole.tokens


def test_where_exact_is_no_dearer_it_stays_exact(model: Path, arch: str) -> None:
    scene = scene_of(model, FIELD + PAGE)
    whole = scene.serve(PROMPT, 8)
    lose_trailing(scene, arch)
    served = scene.serve(PROMPT, 8)
    assert served.report.level in ("repair", "recompute")
    assert served.tokens == whole.tokens
