"""Streaming, asynchronous programs, and reading while a program runs."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import statewise as sw
from support.fake_service import FakeService


@sw.function
def two(s: Any) -> str:
    s += "a" + sw.gen("x")
    s += " and " + sw.gen("y")
    return "returned"


@sw.function
async def two_async(s: Any) -> str:
    s += "a" + sw.gen("x")
    assert await s.async_get("x") == "bcd"
    s += " and " + sw.gen("y")
    await s.async_sync()
    return "returned"


@pytest.fixture
def scripted(service: FakeService) -> FakeService:
    service.script |= {"a": "bcd", " and ": "efg"}
    return service


def test_text_arrives_in_pieces(scripted: FakeService) -> None:
    pieces = list(two.run(stream=True).text_iter())
    assert pieces == ["a", "b", "c", "d", " and ", "e", "f", "g"]
    assert all(body["stream"] for body in scripted.bodies())


def test_one_variable_arrives_in_pieces(scripted: FakeService) -> None:
    state = two.run(stream=True)
    assert "".join(state.text_iter("y")) == "efg"
    assert "".join(state.text_iter("x")) == "bcd"
    assert state["x"] == "bcd"
    assert state.text() == "abcd and efg"
    assert state.ret_value == "returned"


def test_several_readers_see_the_same(scripted: FakeService) -> None:
    state = two.run(stream=True)
    assert "".join(state.text_iter()) == "".join(state.text_iter()) == "abcd and efg"


def test_a_run_that_does_not_stream_gives_one_piece(scripted: FakeService) -> None:
    state = two.run()
    assert list(state.text_iter()) == ["abcd and efg"]
    assert list(state.text_iter("y")) == ["efg"]


def test_a_variable_that_never_comes_is_a_key_error(scripted: FakeService) -> None:
    with pytest.raises(KeyError):
        list(two.run(stream=True).text_iter("z"))


def test_reading_does_not_wait_for_later_text(service: FakeService) -> None:
    service.script["a"] = "bcd"
    service.barrier = threading.Barrier(2)
    first = two.run(stream=True)
    service_two = two.run(stream=True)  # lets the first generation of both pass
    assert first["x"] == service_two["x"] == "bcd"
    assert "".join(first.text_iter("x")) == "bcd"
    first.sync()
    service_two.sync()


def test_branches_stream_too(scripted: FakeService) -> None:
    texts: list[str] = []

    @sw.function
    def program(s: Any) -> None:
        s += "a"
        forks = s.fork(2)
        forks += sw.gen("x")
        for fork in forks:
            texts.append("".join(fork.text_iter("x")))
        forks.join()

    assert program.run(stream=True)["x"] == ["bcd", "bcd"]
    assert texts == ["bcd", "bcd"]


def test_asynchronous_iteration(scripted: FakeService) -> None:
    async def main() -> None:
        state = two.run(stream=True)
        pieces = [piece async for piece in state.text_async_iter()]
        assert "".join(pieces) == "abcd and efg"
        pairs = [
            pair async for pair in two.run(stream=True).text_async_iter("y", return_meta_data=True)
        ]
        assert "".join(text for text, _ in pairs) == "efg"
        assert pairs[-1][1]["completion_tokens"] == 3

    asyncio.run(main())


def test_iterating_many_states_in_one_loop(scripted: FakeService) -> None:
    async def read() -> str:
        return "".join([p async for p in two.run(stream=True).text_async_iter()])

    async def main() -> list[str]:
        return await asyncio.gather(*(read() for _ in range(8)))

    assert asyncio.run(main()) == ["abcd and efg"] * 8


def test_asynchronous_programs(scripted: FakeService) -> None:
    for stream in (False, True):
        state = two_async.run(stream=stream)
        assert state["y"] == "efg"
        assert state.ret_value == "returned"
        assert state.text() == "abcd and efg"


def test_programs_in_the_callers_loop(scripted: FakeService) -> None:
    async def main() -> None:
        for program in (two, two_async):
            state = await program.arun()
            assert state.text() == "abcd and efg"
            assert state.ret_value == "returned"
        states = await asyncio.gather(*(two_async.arun(stream=True) for _ in range(4)))
        assert [state["y"] for state in states] == ["efg"] * 4

    asyncio.run(main())


def test_failures_of_asynchronous_programs(scripted: FakeService) -> None:
    @sw.function
    async def body_fails(s: Any) -> None:
        s += "a"
        raise LookupError("mine")

    @sw.function
    async def call_fails(s: Any) -> None:
        s += "a" + sw.gen("x")

    with pytest.raises(sw.ProgramError, match="mine"):
        body_fails.run().sync()

    async def main() -> None:
        with pytest.raises(LookupError, match="mine"):
            await body_fails.arun()
        scripted.failures.append(("/generate", 400, {}, {"error": {"message": "no"}}))
        with pytest.raises(sw.ProgramError, match="no"):
            await call_fails.arun()
        scripted.failures.append(("/generate", 400, {}, {"error": {"message": "no"}}))
        with pytest.raises(sw.ProgramError, match="no"):
            async for _ in call_fails.run(stream=True).text_async_iter("x"):
                pass

    asyncio.run(main())


def test_waiting_for_meta_info_times_out(service: FakeService) -> None:
    service.barrier = threading.Barrier(2)
    state = two.run()
    with pytest.raises(TimeoutError):
        state.get_meta_info("x", timeout=0.05)
    service.barrier.abort()
    service.barrier = None
    assert state.error() is not None  # the service broke off


def test_context_variables_reach_the_worker(service: FakeService) -> None:
    import contextvars

    marker: contextvars.ContextVar[str] = contextvars.ContextVar("marker", default="unset")
    seen: list[str] = []

    def rule(**figures: Any) -> Any:
        seen.append(marker.get())
        return sw.token_length_normalized(**figures)

    rule.requires_unconditional_logprobs = False  # type: ignore[attr-defined]

    @sw.function
    def program(s: Any) -> None:
        s += "a" + sw.select("x", ["b", "c"], choices_method=rule)  # type: ignore[arg-type]

    marker.set("mine")
    program.run().sync()
    program.run(stream=True).sync()
    assert seen == ["mine", "mine"]
