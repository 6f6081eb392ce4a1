"""The exactness law over slower tiers on real weights: bit-equal output, whatever came back.

All state leaves the device after each request; host memory holds a part, the disk the rest. As
served: bfloat16, native kernels. Compared are tokens and their log probabilities with those under
salts of their own, which share nothing with anybody.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from statewise.radix import CostModel, Tier
from statewise.runtime.errors import ModelLoadError
from statewise.runtime.models.locate import locate_model
from support.model_recovery import Scene, Served
from support.tier_engine import SLOW_TOKENS_PER_S, forget_device, settle

pytestmark = pytest.mark.slow

PAGE = 16
NEW = 8


def require(name: str) -> None:
    try:
        locate_model(name)
    except ModelLoadError as error:
        pytest.skip(str(error))


def tiered(name: str, directory: Path, host_mb: float, tokens: int) -> Scene:
    """An engine to which computing is dear, with hardly any room on the device."""
    scene = Scene(
        model_path=name, dtype="bfloat16", page_size=PAGE, audit=True, max_total_tokens=tokens,
        max_window_tokens=1088, host_cache_gb=host_mb / 1e3, disk_cache_dir=str(directory),
        disk_cache_gb=0.2,
    )  # fmt: skip
    known = scene.core.cache.cost.model
    slow = CostModel.uniform(known.num_layers, SLOW_TOKENS_PER_S, chunk=known.chunk)
    scene.core.use_cost(replace(slow, tiers=known.tiers))
    return scene


def prompts_of(lengths: tuple[int, ...]) -> list[list[int]]:
    """Prompts that continue one another, as turns of a chat do."""
    rng = random.Random(5)
    whole = [rng.randrange(10, 40000) for _ in range(max(lengths))]
    return [whole[:length] for length in lengths]


def lose_half_of_host_memory(scene: Scene) -> None:
    """Every second page: what comes back is from host and disk in turns."""
    assert scene.core.cache.tiering is not None
    host = scene.core.cache.tiering.tiers.stores[Tier.HOST]
    host.free(host.all_handles()[::2])


# Gemma's windows are 512 tokens: prompts are longer, so that windows are left behind.
CASES = {
    "gemma3-270m": ((560, 600, 560), 40.0, 800),
    "smollm2-135m": ((250, 300, 250), 20.0, 400),
}


@pytest.mark.parametrize("name", list(CASES))
def test_real_models_are_exact_over_host_and_disk(name: str, tmp_path: Path) -> None:
    require(name)
    lengths, host_mb, tokens = CASES[name]
    prompts = prompts_of(lengths)
    scene = tiered(name, tmp_path, host_mb, tokens)
    wanted = [scene.serve(p, NEW, salt=f"cold {i}") for i, p in enumerate(prompts)]
    assert all(one.report.matched == 0 for one in wanted)
    scene.core.flush()
    froms: set[str] = set()
    served: list[Served] = []
    for prompt in prompts:
        served.append(scene.serve(prompt, NEW))
        froms |= set(served[-1].report.loaded_from)
        settle(scene.core)
        forget_device(scene.core)
        lose_half_of_host_memory(scene)
    assert [one.tokens for one in served] == [one.tokens for one in wanted]
    assert [one.logprobs for one in served] == [one.logprobs for one in wanted]
    assert all(one.report.loaded > 0 for one in served[1:]), [s.report.reason for s in served]
    assert froms == {"host", "disk"}, "both gave something"
    scene.core.close()


def test_a_restart_on_real_weights_finds_the_disk(tmp_path: Path) -> None:
    require("smollm2-135m")
    (prompt,) = prompts_of((300,))
    first = tiered("smollm2-135m", tmp_path, 0.0, 400)
    wanted = first.serve(prompt, NEW)
    settle(first.core)
    first.core.close()
    second = tiered("smollm2-135m", tmp_path, 0.0, 400)
    again = second.serve(prompt, NEW)
    assert (again.tokens, again.logprobs) == (wanted.tokens, wanted.logprobs)
    assert again.report.loaded_from == {"disk": 288}
    second.core.close()
