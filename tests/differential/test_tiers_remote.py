"""A remote store through the serving engine: one server writes, others find, whatever it does.

Against runs without any cache. The store is a real S3 server on this machine, or a shared folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from statewise.radix import CostModel
from statewise.runtime.cache import probe
from statewise.runtime.engine.core import EngineCore
from statewise.runtime.tiers import remote
from support.model_scenarios import VOCAB, Case, run
from support.object_server import CREDENTIALS, ObjectServer
from support.tier_engine import forget_device, settle, tiered_core

pytest.importorskip("obstore")
pytest.importorskip("moto.server")
PROMPT = [(11 * i) % VOCAB for i in range(100)]
OTHER = [(7 * i + 3) % VOCAB for i in range(100)]


@cache
def case(arch: str, root: str) -> Case:
    return Case(arch, Path(root) / arch)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def started() -> Iterator[ObjectServer]:
    server = ObjectServer()
    yield server
    server.close()


@pytest.fixture
def server(started: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(f"AWS_{name.upper()}", value)
    started.behave()
    started.count()
    be_patient(monkeypatch, 30.0)  # whatever else this machine does
    yield started
    started.behave()


def be_patient(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Wait so long for answers."""
    monkeypatch.setattr(probe, "PATIENCE_S", seconds)
    monkeypatch.setattr(probe, "MAX_ASKING_S", seconds)
    monkeypatch.setattr(remote, "SLOW_S", seconds)


def core_of(one: Case, url: str, **args: Any) -> EngineCore:
    return tiered_core(one, remote_cache=url, max_total_tokens=480, **args)


def write(one: Case, url: str, prompt: list[int] = PROMPT) -> None:
    """A server that computes a prompt and leaves its state in the store."""
    core = core_of(one, url)
    assert run(core, {"a": (prompt, 6)})["a"] == one.expected(prompt, 6)
    settle(core)
    core.close()


def remote_status(core: EngineCore) -> dict[str, Any]:
    tiers: list[dict[str, Any]] = core.stats()["tiers"]
    return next(tier for tier in tiers if tier["tier"] == "remote")


def outcomes(core: EngineCore) -> dict[str, int]:
    """What came of questions, by outcome."""
    shown = core.stats()["labelled"]["probes"]["values"]
    return {labels[0]: count for labels, count in shown}


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["llama", "gemma3", "deepseek-v4", "qwen3-next"])
@pytest.mark.parametrize("store", ["folder", "s3"])
def test_a_second_server_finds_what_the_first_left(
    arch: str, store: str, root: str, tmp_path: Path, server: ObjectServer
) -> None:
    one = case(arch, root)
    url = server.url(f"second/{arch}") if store == "s3" else (tmp_path / "shared").as_uri()
    write(one, url)
    server.count()
    core = core_of(one, url)
    assert run(core, {"b": (PROMPT, 6)})["b"] == one.expected(PROMPT, 6)
    assert core.counters.loaded_tokens == 96
    assert core.counters.levels["load"] == 1
    counters = remote_status(core)["counters"]
    assert counters["requests_probe"] <= (29 if arch == "deepseek-v4" else 12), counters
    assert counters["requests_read"] == counters["pages_read"], "nothing was presumed in vain"
    if store == "s3":
        settle(core)
        requests = [counters.get(f"requests_{kind}", 0) for kind in ("probe", "read")]
        assert server.count()["GET"] == sum(requests), "every request is counted"
    core.close()


@pytest.mark.slow
def test_a_cold_prompt_costs_one_question_for_a_while(root: str, server: ObjectServer) -> None:
    one = case("gemma3", root)
    write(one, server.url("cold"))
    core = core_of(one, server.url("cold"))
    server.count()
    for rid in ("a", "b", "c"):
        assert run(core, {rid: (OTHER, 6)})[rid] == one.expected(OTHER, 6)
        forget_device(core)
    assert server.count()["GET"] == 1
    assert outcomes(core) == {"absent": 1}
    core.close()


@pytest.mark.slow
def test_a_shared_stem_is_found_to_its_end(root: str, server: ObjectServer) -> None:
    """The end of the run of pages lies inside the prompt: found by bisection."""
    one = case("llama", root)
    write(one, server.url("stem"))
    for length in (9, 40, 71):
        prompt = [*PROMPT[:length], *OTHER[: 96 - length]]
        core = core_of(one, server.url("stem"))
        assert run(core, {"b": (prompt, 4)})["b"] == one.expected(prompt, 4)
        assert core.counters.loaded_tokens == length // 8 * 8
        core.close()


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gemma3", "qwen3-next"])
def test_trailing_state_below_the_depth_is_found(
    arch: str, root: str, server: ObjectServer
) -> None:
    """History goes on, the window or snapshot that was kept stands further back."""
    one = case(arch, root)
    write(one, server.url(f"below/{arch}"), PROMPT[:58])
    write(one, server.url(f"below/{arch}"), PROMPT)
    prompt = [*PROMPT[:75], *OTHER[:21]]
    core = core_of(one, server.url(f"below/{arch}"))
    assert run(core, {"b": (prompt, 4)})["b"] == one.expected(prompt, 4)
    assert core.counters.loaded_tokens >= 56
    core.close()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["gone", "deny", "garbage", "truncated", "empty", "slow"])
@pytest.mark.parametrize("moment", ["question", "load"])
def test_a_store_that_fails_costs_no_request(
    mode: str, moment: str, root: str, server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, url = case("gemma3", root), server.url(f"fails/{mode}/{moment}")
    write(one, url)
    core = core_of(one, url)
    if mode == "slow":  # patience is what computing would take
        core.use_cost(CostModel.uniform(3, 250.0, chunk=64))
        if moment == "question":
            be_patient(monkeypatch, 0.2)
    tiering = core.cache.tiering
    assert tiering is not None
    if moment == "load":
        real = tiering.promote

        def promote(*args: Any) -> Any:
            server.behave(mode, 0.7)
            return real(*args)

        tiering.promote = promote  # type: ignore[method-assign]
    else:
        server.behave(mode, 0.7)
    assert run(core, {"b": (PROMPT, 6)})["b"] == one.expected(PROMPT, 6)
    assert core.counters.loaded_tokens == 0
    counters = remote_status(core)["counters"]
    if mode in ("garbage", "truncated", "empty"):
        assert counters["corrupt"] > 0, counters
    else:
        assert counters.get("read_errors", 0) + counters.get("unanswered", 0) > 0, counters
    server.behave()
    be_patient(monkeypatch, 30.0)
    settle(core)
    core.audit()
    core.close()
    again = core_of(one, url)
    assert run(again, {"c": (PROMPT, 6)})["c"] == one.expected(PROMPT, 6)
    assert again.counters.loaded_tokens == 96, "the store is well again"
    again.close()


@pytest.mark.slow
def test_a_store_that_stays_away_is_left_alone(root: str, server: ObjectServer) -> None:
    one = case("llama", root)
    core = core_of(one, server.url("away"))
    server.behave("gone")
    for i in range(6):
        prompt = [i, *PROMPT]
        assert run(core, {f"r{i}": (prompt, 2)})[f"r{i}"] == one.expected(prompt, 2)
        settle(core)
    assert remote_status(core)["state"] == "offline"
    server.count()
    assert run(core, {"last": ([9, *PROMPT], 2)})["last"] == one.expected([9, *PROMPT], 2)
    assert not server.count()
    core.close()


@pytest.mark.slow
def test_an_abort_calls_the_questions_off(root: str, server: ObjectServer) -> None:
    from support.model_scenarios import request

    one = case("llama", root)
    write(one, server.url("abort"))
    core = core_of(one, server.url("abort"))
    server.behave("slow", 0.3)
    core.add_request(request("x", PROMPT, 4))
    core.step()
    core.abort("x")
    core.step()
    assert outcomes(core) == {"cancelled": 1}
    settle(core)
    core.audit()
    server.behave()
    assert run(core, {"y": (PROMPT, 4)})["y"] == one.expected(PROMPT, 4)
    assert core.counters.loaded_tokens == 96
    core.close()
