"""Bounded replay: off unless asked for; close to exact, reported as such, and never shared."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from statewise.radix import Tier
from statewise.radix.bounded import can_be_bounded
from statewise.radix.plan import Level
from statewise.runtime.models.tiny import TinySize, make_tiny_model
from support.model_recovery import Scene
from support.published import GPT_OSS_20B, QWEN3_NEXT_80B, V4_FLASH, schema_of
from support.tier_engine import forget_device, settle

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


@pytest.mark.slow
def test_it_is_off_unless_asked_for(model: Path, arch: str) -> None:
    scene = scene_of(model, 0)
    scene.serve(PROMPT, 1)
    lose_trailing(scene, arch)
    assert scene.plan(PROMPT).level is not Level.BOUNDED
    assert scene.plan(PROMPT).is_exact


@pytest.mark.slow
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


@pytest.mark.slow
def test_nothing_approximate_leaves_the_device_or_is_found_elsewhere(
    model: Path, arch: str, tmp_path: Path
) -> None:
    """With slower tiers: what a bounded replay computed is neither copied out nor loaded.

    The tiers hold history, and no window: a bounded replay over loaded pages. A server without
    bounded replays on the same directory is exact afterwards.
    """
    settings: dict[str, object] = {
        "model_path": str(model), "page_size": PAGE, "max_total_tokens": 2048, "audit": True,
        "chunked_prefill_size": 64, "checkpoint_policy": "ends", "host_cache_gb": 0.05,
        "disk_cache_dir": str(tmp_path / "cache"), "disk_cache_gb": 0.1,
    }  # fmt: skip
    scene = Scene(bounded_replay=20, **settings)
    exact = scene.serve(PROMPT, 24)
    settle(scene.core)
    lose_trailing(scene, arch)
    lose_stored(scene, TRAILING[arch])
    stored = stored_names(scene)
    for _ in range(2):
        served = scene.serve(PROMPT, 24)
        assert served.report.level == "bounded", served.report
        assert served.logprobs[0] != exact.logprobs[0]
        settle(scene.core)
        assert stored_names(scene) == stored
        forget_device(scene.core)
        scene.serve([*PROMPT[:LENGTH], 1], 1)  # loads the history, and is approximate as well
        settle(scene.core)
        lose_trailing(scene, arch)
    scene.core.close()
    other = Scene(**settings)
    again = other.serve(PROMPT, 24)
    assert (again.tokens, again.logprobs) == (exact.tokens, exact.logprobs)
    other.core.close()


def stored_names(scene: Scene) -> dict[Tier, set[bytes]]:
    """Names of everything in every tier."""
    tiering = scene.core.cache.tiering
    assert tiering is not None
    return {
        tier: {store.key_of(handle) for handle in store.all_handles()}
        for tier, store in tiering.tiers.stores.items()
    }


def lose_stored(scene: Scene, groups: tuple[str, ...]) -> None:
    """Take groups' state of the prompt out of every tier."""
    tiering = scene.core.cache.tiering
    assert tiering is not None
    match, stored = scene.match(PROMPT), tiering.stored
    names = stored.names(match.namespace, match.key)
    for name in groups:
        group = scene.schema.index_of(name)
        is_snapshot = scene.schema.groups[group].kind.is_snapshot
        address = stored.snapshot_address if is_snapshot else stored.page_address
        pages = range(is_snapshot, match.logical_pages + is_snapshot)
        keys = [address(names, group, page).key for page in pages]
        for store in tiering.tiers.stores.values():
            store.free([handle for handle in store.find(keys) if handle >= 0])


@pytest.mark.parametrize(
    ("config", "allowed"), [(V4_FLASH, True), (GPT_OSS_20B, True), (QWEN3_NEXT_80B, False)]
)
def test_recurrent_state_cannot_be_bounded(config: dict[str, Any], allowed: bool) -> None:
    assert can_be_bounded(schema_of(config)) is allowed


@pytest.mark.slow
def test_who_insists_on_exact_state_gets_an_exact_replay(model: Path, arch: str) -> None:
    scene = scene_of(model, 20)
    whole = scene.serve(PROMPT, 8)
    lose_trailing(scene, arch)
    served = scene.serve(PROMPT, 8, exact=True)
    assert served.report.level in ("repair", "recompute")
    assert served.tokens == whole.tokens


@pytest.mark.slow
def test_where_exact_is_no_dearer_it_stays_exact(model: Path, arch: str) -> None:
    scene = scene_of(model, FIELD + PAGE)
    whole = scene.serve(PROMPT, 8)
    lose_trailing(scene, arch)
    served = scene.serve(PROMPT, 8)
    assert served.report.level in ("repair", "recompute")
    assert served.tokens == whole.tokens
