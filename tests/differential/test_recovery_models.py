"""Recovery on real layers: state lost or damaged on purpose, output that of a cold run.

Tokens replayed equal the plan's, the report names level and limiting group, and what was rebuilt
is reused as it stands by the next request. F21: any flipped bit of any layer is found.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from statewise.radix.plan import Level
from statewise.radix.validation import Condition
from statewise.runtime.models.tiny import TinySize, make_tiny_model
from support.model_recovery import Scene, Served

PAGE, WINDOW, LENGTH = 8, 16, 320
RNG = random.Random(11)
PROMPT = [RNG.randrange(256) for _ in range(LENGTH + 5)]
PAGES = LENGTH // PAGE
SETTINGS = {"page_size": PAGE, "max_total_tokens": 2048, "chunked_prefill_size": 64}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Windows in layers 0, 1, 3, 4, 6, 7; full attention in 2, 5, 8."""
    path = tmp_path_factory.mktemp("models") / "gemma3"
    make_tiny_model("gemma3", path, size=TinySize(layers=9, window=WINDOW))
    return path


@pytest.fixture(scope="module")
def cold(gemma: Path) -> Served:
    return Scene(model_path=str(gemma), disable_radix_cache=True, **SETTINGS).serve(PROMPT)


@pytest.fixture
def scene(gemma: Path) -> Scene:
    """An engine that has served `PROMPT` once."""
    scene = Scene(model_path=str(gemma), audit=True, checkpoint_interval=4096, **SETTINGS)
    scene.serve(PROMPT)
    return scene


def check(scene: Scene, cold: Served, level: Level, limiting: str) -> Served:
    """Serve `PROMPT` once more: as planned, as cold, and healed afterwards."""
    plan = scene.plan(PROMPT)
    served = scene.serve(PROMPT)
    assert served.tokens == cold.tokens
    np.testing.assert_allclose(served.logprobs, cold.logprobs, atol=2e-4)
    assert plan.level is level
    assert served.report.level == level.value
    assert served.report.limiting_group == limiting
    assert served.replayed == plan.replayed_tokens
    assert served.prefilled == len(PROMPT) - plan.position
    again = scene.serve(PROMPT)
    assert again.tokens == cold.tokens
    assert again.report.level == "direct"
    scene.core.flush()
    assert all(p.num_free == p.num_blocks for p in scene.core.cache.pools)
    return served


def test_nothing_lost_is_direct(scene: Scene, cold: Served) -> None:
    served = check(scene, cold, Level.DIRECT, "")
    assert served.replayed == 0
    assert served.report.reused == LENGTH


def test_lost_windows_are_repaired(scene: Scene, cold: Served) -> None:
    scene.lose(PROMPT, "window")
    served = check(scene, cold, Level.REPAIR, "window")
    assert 0 < served.replayed < LENGTH
    assert served.report.recomputed == 0


def test_a_lost_window_is_repaired_from_the_nearest_checkpoint(gemma: Path, cold: Served) -> None:
    scene = Scene(model_path=str(gemma), audit=True, checkpoint_interval=4096, **SETTINGS)
    near = LENGTH - 2 * PAGE
    scene.serve(PROMPT[:near], 1)
    scene.serve(PROMPT)
    scene.lose(PROMPT, "window", range(near // PAGE, PAGES))
    served = check(scene, cold, Level.REPAIR, "window")
    assert served.replayed == 2 * PAGE


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_one_layers_segments_are_rebuilt_no_deeper_than_they_are(
    scene: Scene, cold: Served, layer: int
) -> None:
    scene.spoil(PROMPT, "full", 1 << layer, range(10, 20))
    model_layer = scene.schema.groups[scene.schema.index_of("full")].layers[layer]
    served = check(scene, cold, Level.REBUILD, "full")
    assert max(served.depths) == model_layer + 1
    full = 1 << scene.schema.index_of("full")
    deepest = [r for r in served.rows if r.num_layers == model_layer + 1]
    assert all(r.write_groups & full for r in deepest)


def test_whole_pages_of_history_are_computed_again(scene: Scene, cold: Served) -> None:
    scene.lose(PROMPT, "full", range(20, PAGES))
    plan = scene.plan(PROMPT)
    assert plan.level in (Level.REBUILD, Level.RECOMPUTE)
    check(scene, cold, plan.level, "full")


def test_windows_and_a_layer_lost_at_once(scene: Scene, cold: Served) -> None:
    scene.spoil(PROMPT, "full", 0b010, range(30, 36))
    scene.lose(PROMPT, "window", range(25, PAGES))
    check(scene, cold, Level.REBUILD, scene_limit(scene))


def scene_limit(scene: Scene) -> str:
    limiting = scene.plan(PROMPT).limiting_group
    assert limiting is not None
    return scene.schema.groups[limiting].name


def test_everything_lost_is_a_cold_run(scene: Scene, cold: Served) -> None:
    scene.core.flush()
    served = scene.serve(PROMPT)
    assert served.tokens == cold.tokens
    assert served.report.matched == 0


@pytest.mark.slow
def test_f21_any_flipped_bit_of_any_layer_is_found_and_rebuilt(gemma: Path, cold: Served) -> None:
    rng = random.Random(21)
    scene = Scene(model_path=str(gemma), audit=True, audit_rate=1.0, **SETTINGS)
    scene.serve(PROMPT)
    places = [("full", layer, rng.randrange(PAGES)) for layer in range(3)]
    places += [("window", layer, PAGES - 1 - rng.randrange(2)) for layer in range(6)]
    for place in places:
        before = scene.core.cache.counters.failures(Condition.CHECKSUM)
        block = scene.flip(PROMPT, place, rng.randrange(1 << 30))
        served = scene.serve(PROMPT)
        assert scene.core.cache.counters.failures(Condition.CHECKSUM) == before + 1, place
        assert served.tokens == cold.tokens, place
        np.testing.assert_allclose(served.logprobs, cold.logprobs, atol=2e-4)
        # A window's last pages may be as cheaply computed with the rest of the prompt.
        levels = ("rebuild",) if place[0] == "full" else ("repair", "recompute")
        assert served.report.level in levels, place
        assert served.report.limiting_group == place[0]
        assert served.report.verdicts
        index = scene.schema.index_of(place[0])
        assert scene.match(PROMPT).blocks(index)[place[2]] != block, "the bad copy is replaced"
        assert scene.serve(PROMPT).report.level == "direct"


def test_a_rebuild_that_would_not_fit_beside_the_history_is_not_planned(
    gemma: Path, cold: Served
) -> None:
    """A pool of one prompt and a little more: what is broken is computed anew in its own place."""
    tight = SETTINGS | {"max_total_tokens": LENGTH + 48}
    scene = Scene(model_path=str(gemma), audit=True, checkpoint_interval=4096, **tight)
    scene.serve(PROMPT)
    scene.spoil(PROMPT, "full", 0b001, range(10, PAGES))
    plan = scene.plan(PROMPT)
    assert plan.level is Level.RECOMPUTE
    served = scene.serve(PROMPT)
    assert served.tokens == cold.tokens
    assert served.report.level == "recompute"
    assert served.report.recomputed == LENGTH - plan.position


# ------------------------------------------------------------------------- a real model

LONG = 8192


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_gemma_3_270m_with_a_prefix_of_8k_tokens() -> None:
    from statewise.runtime.errors import ModelLoadError

    settings: dict[str, object] = {
        "model_path": "gemma3-270m", "page_size": 16, "max_total_tokens": 2 * LONG + 512,
        "chunked_prefill_size": 512, "checkpoint_interval": 4096, "num_threads": 0,
    }  # fmt: skip
    rng = random.Random(8)
    prompt = [rng.randrange(1000, 200_000) for _ in range(LONG + 9)]
    try:
        scene = Scene(**settings)
    except ModelLoadError as error:
        pytest.skip(f"the checkpoint is not installed: {error}")
    first = scene.serve(prompt, 4)
    pages = LONG // 16

    def recovered(level: str, limiting: str) -> Served:
        plan = scene.plan(prompt)
        served = scene.serve(prompt, 4)
        assert served.tokens == first.tokens
        np.testing.assert_allclose(served.logprobs, first.logprobs, atol=2e-2)
        assert (served.report.level, served.report.limiting_group) == (level, limiting)
        assert served.replayed == plan.replayed_tokens
        return served

    recovered("direct", "")
    scene.lose(prompt, "window", range(pages - 16, pages))
    recovered("repair", "window")
    scene.spoil(prompt, "full", 1, range(100, pages))
    rebuilt = recovered("rebuild", "full")
    assert max(rebuilt.depths) == 6
    scene.spoil(prompt, "full", 0b10, range(200, 220))
    recovered("rebuild", "full")
    recovered("direct", "")
