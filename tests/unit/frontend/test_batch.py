"""Batches: order, concurrency, failures, progress; traces and the common prefix; pins."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import statewise as sw
from statewise.frontend.batch import run_all, thread_count
from support.fake_service import FakeService, encode

PREAMBLE = "A preamble that is long enough to be worth computing once, for all of the questions. "


@sw.function
def qa(s: Any, question: str, tail: str = "?") -> None:
    s += PREAMBLE
    s += "Q: " + question + tail
    s += sw.gen("answer")


def test_results_keep_the_items_order(service: FakeService) -> None:
    items = [{"question": f"q{i}"} for i in range(20)]
    states = qa.run_batch(items, temperature=0)
    assert [state.text() for state in states] == [
        f"{PREAMBLE}Q: q{i}?{state['answer']}" for i, state in enumerate(states)
    ]
    assert all(body["sampling_params"]["temperature"] == 0 for body in service.bodies()[1:])


def test_items_may_be_tuples(service: FakeService) -> None:
    first, second = qa.run_batch([("a",), ("b", "!")])
    assert "Q: a?" in first.text()
    assert "Q: b!" in second.text()
    for bad in ([("a", "b", "c")], ["text"], [{"nope": 1}]):
        with pytest.raises(TypeError):
            qa.run_batch(bad)
    assert qa.run_batch([]) == []


def test_items_run_at_once(service: FakeService) -> None:
    service.barrier = threading.Barrier(8)
    assert len(qa.run_batch([(f"{i}",) for i in range(8)])) == 8


def test_the_common_prefix_is_computed_once_before(service: FakeService) -> None:
    states = qa.run_batch([("a",), ("b",)], cache_salt="mine")
    first = service.bodies()[0]
    assert first["text"] == PREAMBLE + "Q: "
    assert first["sampling_params"] == {"max_new_tokens": 0}
    assert first["checkpoint"] is True
    assert all(body["cache_salt"] == "mine" for body in service.bodies())
    assert all(state.usage().cached_tokens >= len(encode(PREAMBLE + "Q: ")) for state in states)
    service.requests.clear()
    qa.run_batch([("alone",)])
    assert len(service.bodies()) == 1


def test_a_failure_ends_the_batch_or_takes_its_place(service: FakeService) -> None:
    @sw.function
    def program(s: Any, n: int) -> None:
        if n == 2:
            raise LookupError("two")
        s += str(n) + sw.gen("x")

    items = [{"n": n} for n in range(4)]
    with pytest.raises(LookupError, match="two"):
        program.run_batch(items)
    results = program.run_batch(items, return_exceptions=True)
    assert isinstance(results[2], LookupError)
    assert [results[i]["x"] is not None for i in (0, 1, 3)] == [True] * 3
    service.failures.append(("/generate", 400, {}, {"error": {"message": "bad"}}))
    with pytest.raises(sw.ProgramError, match="bad"):
        program.run_batch([{"n": 5}])


def test_generator_style(service: FakeService) -> None:
    results = qa.run_batch([(f"{i}",) for i in range(5)], generator_style=True, num_threads=2)
    assert "Q: 0?" in next(results).text()
    assert ["Q: 1?" in next(results).text()] == [True]
    results.close()


def test_only_a_bounded_number_is_in_flight() -> None:
    started: list[int] = []
    items = run_all(
        lambda i: started.append(i),
        range(1000),
        num_threads=2,
        progress_bar=False,
        return_exceptions=False,
    )
    next(items)
    assert len(started) < 20
    items.close()  # type: ignore[attr-defined]
    assert len(started) < 20


def test_thread_count() -> None:
    assert thread_count("auto", 3) == 3
    assert thread_count(2, 100) == 2
    assert thread_count("auto", 10**6) >= 96
    for bad in (0, -1, "many"):
        with pytest.raises(ValueError, match="num_threads"):
            thread_count(bad, 5)


def test_progress_bar(service: FakeService, capsys: pytest.CaptureFixture[str]) -> None:
    qa.run_batch([("a",), ("b",)], progress_bar=True)
    shown = capsys.readouterr().err
    assert shown == f"100% [{'#' * 40}] 2/2\n", "one line where there is no terminal"


def test_trace_ends_where_runs_part(service: FakeService) -> None:
    assert qa.trace().prefix == PREAMBLE + "Q: "
    assert qa.trace(question="known").prefix == PREAMBLE + "Q: known"
    assert qa.bind(question="b", tail="").trace().prefix == PREAMBLE + "Q: b"
    assert qa.trace(question="k", tail="!").ended_by == "a generation"

    @sw.function
    def formats(s: Any, name: str) -> None:
        s += f"hello {name:>10}" + str(name)
        s += sw.gen("x")

    assert formats.trace().prefix == "hello "
    assert formats.trace().ended_by == "argument 'name'"

    @sw.function
    async def roles(s: Any, name: str) -> None:
        s += sw.system("Rules.")
        s += sw.user("Name: " + sw.select("x", ["a", "b"]))

    assert roles.trace(name="x").prefix == (
        "<|im_start|>system\nRules.<|im_end|>\n<|im_start|>user\nName: "
    )
    assert service.bodies() == []


@pytest.mark.parametrize(
    "use",
    [len, bool, iter, lambda a: a[0], lambda a: a.upper(), lambda a: "x" + a[1:]],
)
def test_a_placeholders_value_cannot_be_used(service: FakeService, use: Any) -> None:
    @sw.function
    def program(s: Any, x: str) -> None:
        s += "before"
        use(x)
        s += "after"

    assert program.trace().prefix == "before"


def test_cache_publishes_the_prefix(service: FakeService) -> None:
    assert qa.cache() == PREAMBLE + "Q: "
    assert service.published() == [PREAMBLE + "Q: "]

    @sw.function
    def short(s: Any) -> None:
        s += "short" + sw.gen("x")

    assert short.cache() == ""
    assert len(service.published()) == 1


def test_pin_keeps_a_prefix_warm(service: FakeService) -> None:
    with sw.pin("prefix", refresh=0.01, cache_salt="mine") as pin:
        while pin.num_refreshes < 2:
            assert pin.is_active
    assert not pin.is_active
    assert service.published()[:3] == ["prefix"] * 3
    assert service.bodies()[0]["cache_salt"] == "mine"
    ended = sw.pin("prefix", ttl=0.02, refresh=0.01)
    ended._thread.join()
    assert not ended.is_active
    ended.release()


def test_pin_tells_of_failures(service: FakeService) -> None:
    pin = sw.pin("prefix", refresh=0.01)
    service.failures.append(("/generate", 400, {}, {"error": {"message": "gone"}}))
    pin._thread.join()
    with pytest.raises(sw.ProgramError, match="gone"):
        pin.release()
    pin.release()
    with pytest.raises(ValueError, match="empty"):
        sw.pin("")
    with pytest.raises(ValueError, match="positive"):
        sw.pin("x", ttl=0)
