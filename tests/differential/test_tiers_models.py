"""The exactness law over slower tiers: tiny device pools, so that state leaves and returns.

Against runs without any cache; host and disk, alone and together. Loading is made to look cheap, so
that whatever was stored is loaded.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from support.model_scenarios import VOCAB, Case, run
from support.tier_engine import forget_device, settle, tier_scenario, tiered_core

HYBRID = ("deepseek-v4", "qwen3-next")
PROMPT = [(11 * i) % VOCAB for i in range(100)]
HOST_GB = {"gemma3": 4e-5, "deepseek-v4": 1e-4}  # a few pages of each group


@cache
def case(arch: str, root: str) -> Case:
    return Case(arch, Path(root) / arch)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("models"))


def test_a_few_scenarios(root: str, tmp_path: Path) -> None:
    loaded: Counter[str] = Counter()
    for seed in range(4):
        loaded.update(tier_scenario(case("gemma3", root), seed, tmp_path / str(seed)))
    assert sum(loaded.values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["llama", "gemma3", *HYBRID])
def test_random_scenarios(arch: str, root: str, tmp_path: Path) -> None:
    loaded: Counter[str] = Counter()
    for seed in range(10, 18):
        loaded.update(tier_scenario(case(arch, root), seed, tmp_path / str(seed)))
    assert set(loaded) == {"host", "disk", "both"}
    # How much of it had a copy in time is the machine's affair: copies give way to requests.
    assert sum(loaded.values()) > 0, loaded


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gemma3", "deepseek-v4"])
def test_a_restart_finds_the_disk(arch: str, root: str, tmp_path: Path) -> None:
    one = case(arch, root)
    expected = one.expected(PROMPT, 6)
    first = tiered_core(one, directory=tmp_path / "c", max_total_tokens=480)
    assert run(first, {"a": (PROMPT, 6)})["a"] == expected
    settle(first)
    first.close()
    second = tiered_core(one, directory=tmp_path / "c", max_total_tokens=480)
    assert run(second, {"a": (PROMPT, 6)})["a"] == expected
    assert second.counters.loaded_tokens == 96
    assert second.counters.effective_reuse_tokens == 0
    assert second.counters.levels["load"] == 1
    second.close()


@pytest.mark.parametrize("arch", ["gemma3", "deepseek-v4"])
def test_a_host_of_a_few_pages_in_front_of_a_disk(arch: str, root: str, tmp_path: Path) -> None:
    """Real threads: what does not fit the host at once is on disk all the same."""
    one = case(arch, root)
    expected = one.expected(PROMPT, 6)
    small = {"max_total_tokens": 480, "host_cache_gb": HOST_GB[arch]}
    first = tiered_core(one, directory=tmp_path / "c", **small)
    assert run(first, {"a": (PROMPT, 6)})["a"] == expected
    settle(first)
    tiering = first.cache.tiering
    assert tiering is not None
    host = tiering.status()[0]
    assert host["pages_by_group"], host
    first.close()
    second = tiered_core(one, directory=tmp_path / "c", **small)
    assert run(second, {"a": (PROMPT, 6)})["a"] == expected
    assert second.counters.loaded_tokens == 96
    second.close()


@pytest.mark.parametrize("drain_s", [5.0, 0.0])
def test_an_end_passes_copies_on_or_drops_them(drain_s: float, root: str, tmp_path: Path) -> None:
    """Two tiers, stopped right after an answer: the slower one has its state too, if given time."""
    one = case("gemma3", root)
    (tmp_path / "r").mkdir()
    remote = {"remote_cache": f"file://{tmp_path / 'r'}"}
    core = tiered_core(one, directory=tmp_path / "d", max_total_tokens=480, **remote)
    run(core, {"a": (PROMPT, 6)})
    core.idle()
    core.close(drain_s)
    objects = sum(path.is_file() for path in (tmp_path / "r").rglob("*"))
    assert objects > 0 or not drain_s


@pytest.mark.slow
def test_an_end_between_steps_copies_what_is_due_first(root: str, tmp_path: Path) -> None:
    """A server that is stopped right after an answer: that prompt's state is on disk as well."""
    one = case("gemma3", root)
    expected = one.expected(PROMPT, 6)
    loaded = []
    for number, between_steps in enumerate((False, True)):
        directory = tmp_path / str(number)
        first = tiered_core(one, directory=directory, max_total_tokens=480)
        assert run(first, {"a": (PROMPT, 6)})["a"] == expected
        first.abandon(5.0, between_steps=between_steps)
        second = tiered_core(one, directory=directory, max_total_tokens=480)
        assert run(second, {"a": (PROMPT, 6)})["a"] == expected
        loaded.append(second.counters.loaded_tokens)
        second.close()
    assert loaded == [0, 96]


def test_other_weights_find_nothing_and_the_old_ones_everything(root: str, tmp_path: Path) -> None:
    """An update renames all state: neither device, host nor disk answers for the old weights."""
    one, other = case("gemma3", root), Case("gemma3", tmp_path / "other", seed=7)
    core = tiered_core(one, directory=tmp_path / "c", host_cache_gb=0.01, max_total_tokens=480)
    assert run(core, {"a": (PROMPT, 6)})["a"] == one.expected(PROMPT, 6)
    settle(core)
    core.update_weights(str(other.path))
    assert run(core, {"b": (PROMPT, 6)})["b"] == other.expected(PROMPT, 6)
    assert core.counters.loaded_tokens == 0
    core.update_weights(str(one.path))
    assert run(core, {"c": (PROMPT, 6)})["c"] == one.expected(PROMPT, 6)
    assert core.counters.loaded_tokens == 96, "the disk still knows the first ones"
    core.close()


@pytest.mark.parametrize("where", ["host", "disk"])
def test_f20_damaged_copies_are_counted_and_computed_again(
    where: str, root: str, tmp_path: Path
) -> None:
    """Whatever happens to stored bytes, the output is a cold run's."""
    one, rng = case("gemma3", root), random.Random(3)
    directory = tmp_path / "c" if where == "disk" else None
    core = tiered_core(
        one, directory=directory, host_cache_gb=0.01 if where == "host" else 0.0,
        max_total_tokens=480,
    )  # fmt: skip
    assert run(core, {"a": (PROMPT, 6)})["a"] == one.expected(PROMPT, 6)
    settle(core)
    if directory is None:
        store = core.cache.tiering.tiers.stores  # type: ignore[union-attr]
        for group in next(iter(store.values()))._groups.values():  # type: ignore[attr-defined]
            group.rows[:, rng.randrange(64)] ^= 4
    else:
        for extent in (directory / "extents").iterdir():
            with extent.open("r+b") as file:
                for at in range(4096, extent.stat().st_size, 4096):
                    file.seek(at + 3000)
                    file.write(bytes([rng.randrange(256)]))
    forget_device(core)
    assert run(core, {"b": (PROMPT, 6)})["b"] == one.expected(PROMPT, 6)
    (status,) = core.stats()["tiers"]
    assert status["counters"]["corrupt"] > 0
    settle(core)
    forget_device(core)
    assert run(core, {"c": (PROMPT, 6)})["c"] == one.expected(PROMPT, 6)
    assert core.counters.loaded_tokens > 0, "what was computed again was stored again"
    core.close()


@pytest.mark.slow
@pytest.mark.parametrize("code", ["ENOSPC", "EROFS", "vanished"])
def test_f21_a_disk_that_fails_is_no_disk(code: str, root: str, tmp_path: Path) -> None:
    """No request fails for it; the tier says what it is."""
    import errno
    import shutil

    one = case("llama", root)
    core = tiered_core(one, directory=tmp_path / "c", max_total_tokens=480)
    tiering = core.cache.tiering
    assert tiering is not None
    if code == "vanished":
        assert run(core, {"a": (PROMPT, 6)})["a"] == one.expected(PROMPT, 6)
        settle(core)
        shutil.rmtree(tmp_path / "c")
    else:
        disk = next(iter(tiering.tiers.stores.values()))

        def fails(*_args: object) -> None:
            raise OSError(getattr(errno, code), "injected")

        disk._extents.append = fails  # type: ignore[attr-defined]
        disk._extents.create = fails  # type: ignore[attr-defined]
    for i in range(3):
        prompt = [*PROMPT[: 90 - i], i]
        assert run(core, {f"b{i}": (prompt, 6)})[f"b{i}"] == one.expected(prompt, 6)
        settle(core)
        forget_device(core)
    (status,) = core.stats()["tiers"]
    if code != "vanished":
        assert status["state"] == "read only"
        assert core.counters.loaded_tokens == 0
    core.close()
