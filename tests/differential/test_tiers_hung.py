"""A remote store that answers nothing, or much too late, while somebody waits for everything.

A flush, other weights and the end must not wait for it; what is under way keeps its blocks until
its thread comes back, and whatever it then brings is handed to nobody. The store is a real server
on this machine; outputs are compared with runs without any cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from statewise.radix import Namespace, TokenKey
from statewise.runtime.engine.core import EngineCore
from statewise.runtime.tiers import lanes
from statewise.runtime.tiers.transfer import Transfer
from support.model_scenarios import VOCAB, Case, collect, request, run
from support.object_server import CREDENTIALS, ObjectServer
from support.silent_server import SilentServer
from support.tier_engine import settle, tiered_core

pytestmark = pytest.mark.slow
pytest.importorskip("obstore")
pytest.importorskip("moto.server")
PROMPT = [(11 * i) % VOCAB for i in range(100)]
OTHER = [(7 * i + 3) % VOCAB for i in range(100)]


@cache
def case(root: str) -> Case:
    return Case("gemma3", Path(root) / "gemma3")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(f"AWS_{name.upper()}", value)
    monkeypatch.setattr(lanes, "HANG_S", 0.2)


@pytest.fixture
def silent() -> Iterator[SilentServer]:
    server = SilentServer()
    yield server
    server.hang_up()


@pytest.fixture(scope="module")
def door() -> Iterator[ObjectServer]:
    server = ObjectServer()
    yield server
    server.close()


def core_of(root: str, url: str, **args: Any) -> EngineCore:
    return tiered_core(case(root), remote_cache=url, max_total_tokens=480, **args)


def until(is_so: Callable[[], bool]) -> None:
    for _ in range(3000):
        if is_so():
            return
        time.sleep(0.01)
    raise AssertionError("it never came")


def under_way(core: EngineCore) -> list[Transfer]:
    """Transfers whose thread has not come back."""
    assert core.cache.tiering is not None
    return [t for t in core.cache.tiering.tiers.engine.open_transfers() if t.num_running]


def come_back(core: EngineCore, hung: list[Transfer]) -> None:
    """Wait for the threads and deliver what they bring."""
    until(lambda: all(transfer.is_done for transfer in hung))
    assert core.cache.tiering is not None
    core.cache.tiering.deliver()
    core.audit()


def finish(core: EngineCore) -> dict[str, list[int]]:
    """Run what is open to its end; outputs by request."""
    out: dict[str, list[int]] = {"late": []}
    done: set[str] = set()
    while core.has_work():
        collect(core.step(), out, done)
    assert done == {"late"}
    return out


def flush(core: EngineCore) -> None:
    core.flush()


def update(core: EngineCore) -> None:
    core.update_weights()


@pytest.mark.parametrize("host_cache_gb", [0.0, 0.01])
@pytest.mark.parametrize("ending", [flush, update])
def test_a_silent_store_does_not_hold_up_what_waits_for_all_copies(
    ending: Callable[[EngineCore], None], host_cache_gb: float, root: str, silent: SilentServer
) -> None:
    core = core_of(root, silent.url("x"), host_cache_gb=host_cache_gb)
    expected = case(root).expected(PROMPT, 6)
    assert run(core, {"a": (PROMPT, 6)})["a"] == expected
    core.idle()
    if host_cache_gb:
        until(lambda: core.idle() and silent.num_waiting > 0)
    until(lambda: silent.num_waiting > 0 and bool(under_way(core)))
    ending(core)
    hung = under_way(core)
    assert hung, "it did not wait for the store"
    core.audit()
    assert run(core, {"b": (PROMPT, 6)})["b"] == expected
    assert run(core, {"c": (OTHER, 6)})["c"] == case(root).expected(OTHER, 6)
    silent.hang_up()
    come_back(core, hung)
    core.close()
    core.flush()
    assert all(pool.num_free == pool.num_blocks for pool in core.cache.pools)


@pytest.mark.parametrize("drain_s", [0.0, 0.3])
def test_an_end_does_not_wait_for_a_silent_store(
    drain_s: float, root: str, silent: SilentServer
) -> None:
    core = core_of(root, silent.url("x"))
    run(core, {"a": (PROMPT, 6)})
    core.idle()
    until(lambda: silent.num_waiting > 0 and bool(under_way(core)))
    hung = under_way(core)
    core.close(drain_s)
    assert not any(transfer.is_done for transfer in hung)
    core.close(drain_s)
    silent.hang_up()
    until(lambda: all(transfer.is_done for transfer in hung))


@pytest.mark.parametrize("ending", [flush, update])
def test_what_comes_back_too_late_is_handed_to_nobody(
    ending: Callable[[EngineCore], None], root: str, door: ObjectServer
) -> None:
    """The answers are right, and come when nobody waits any more."""
    url, expected = door.url(f"late/{ending.__name__}"), case(root).expected(PROMPT, 6)
    first = core_of(root, url)
    run(first, {"a": (PROMPT, 6)})
    settle(first)
    first.close()
    core = core_of(root, url)
    assert core.cache.tiering is not None
    tiering, real = core.cache.tiering, core.cache.tiering.promote

    def promote(*args: Any) -> Any:
        door.behave("hold")
        tiering.promote = real  # type: ignore[method-assign]
        return real(*args)

    tiering.promote = promote  # type: ignore[method-assign]
    core.add_request(request("late", PROMPT, 6))
    until(lambda: not core.step() and any(t.kind == "load" for t in under_way(core)))
    ending(core)
    hung = under_way(core)
    assert [transfer.kind for transfer in hung] == ["load"]
    held = sum(p.num_owned for p in core.cache.pools)
    assert held > 0, "the blocks that it may yet write to are nobody's"
    door.behave()
    come_back(core, hung)
    assert hung[0].num_ok > 0, "it did bring something"
    key = TokenKey(np.array(PROMPT, dtype=np.int32))
    assert core.cache.tree.match(Namespace(), key).logical_pages == 0
    assert finish(core) == {"late": expected}
    assert run(core, {"b": (OTHER, 6)})["b"] == case(root).expected(OTHER, 6)
    settle(core)
    core.close()
    core.flush()
    assert all(pool.num_free == pool.num_blocks for pool in core.cache.pools)


def test_a_late_prefetch_leaves_nothing_in_the_host(root: str, door: ObjectServer) -> None:
    url = door.url("prefetch")
    first = core_of(root, url)
    run(first, {"a": (PROMPT, 6)})
    settle(first)
    first.close()
    core = core_of(root, url, host_cache_gb=0.01)
    tiering = core.cache.tiering
    assert tiering is not None
    core.add_request(request("late", PROMPT, 6))
    real = tiering.promote

    def prefetch_instead(match: Any, offer: Any, *args: Any) -> Any:
        door.behave("hold")
        tiering.promote = real  # type: ignore[method-assign]
        tiering.prefetch(offer)
        return real(match, offer, *args)

    tiering.promote = prefetch_instead  # type: ignore[method-assign]
    until(lambda: not core.step() and any(t.kind == "prefetch" for t in under_way(core)))
    core.flush()
    hung = [t for t in under_way(core) if t.kind == "prefetch"]
    assert hung
    door.behave()
    come_back(core, hung)
    assert tiering.status()[0]["pages"] == 0
    assert finish(core) == {"late": case(root).expected(PROMPT, 6)}
    core.close()
