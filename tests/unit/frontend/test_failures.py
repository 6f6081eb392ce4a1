"""Failures reach whoever reads: nothing is swallowed in a thread."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest

import statewise as sw
from support.fake_service import FakeService

REFUSED: tuple[str, int, dict[str, str], Any] = (
    "/generate",
    400,
    {},
    {"error": {"message": "temperature is -1", "code": "invalid_request"}},
)


@sw.function
def two_steps(s: Any) -> None:
    s += "a" + sw.gen("first")
    s += "b" + sw.gen("second")


def test_reading_a_failed_variable_raises_with_the_cause(service: FakeService) -> None:
    service.failures.append(REFUSED)
    state = two_steps.run()
    with pytest.raises(sw.ProgramError, match="temperature is -1") as caught:
        state["first"]
    cause = caught.value.__cause__
    assert isinstance(cause, sw.BackendError)
    assert (cause.status, cause.code) == (400, "invalid_request")
    for read in (state.sync, state.text, state.messages, state.usage, lambda: state["second"]):
        with pytest.raises(sw.ProgramError):
            read()
    assert state.error() is cause
    assert len(service.bodies()) == 1  # nothing after the failure was sent


def test_what_was_computed_before_the_failure_stays_readable(service: FakeService) -> None:
    state = two_steps.run()
    first = state["first"]
    state.sync()
    service.failures.append(REFUSED)
    state += "c" + sw.gen("third")
    with pytest.raises(sw.ProgramError):
        state["third"]
    assert state["first"] == first


def test_appending_to_a_failed_state_does_nothing(service: FakeService) -> None:
    service.failures.append(REFUSED)
    state = two_steps.run()
    assert state.error() is not None
    state += "more" + sw.gen("more")
    with pytest.raises(sw.ProgramError):
        state["more"]


def test_blocking_run_raises(service: FakeService) -> None:
    service.failures.append(REFUSED)
    with pytest.raises(sw.ProgramError, match="temperature"):
        two_steps.run(use_thread=False)


def test_the_bodys_own_error_leaves_run_unchanged(service: FakeService) -> None:
    @sw.function
    def program(s: Any) -> None:
        s += "a" + sw.gen("x")
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        program.run()


def test_the_bodys_error_in_a_streaming_run_reaches_readers(service: FakeService) -> None:
    @sw.function
    def program(s: Any) -> None:
        s += "a"
        raise LookupError("mine")

    state = program.run(stream=True)
    with pytest.raises(sw.ProgramError, match="mine") as caught:
        state["x"]
    assert isinstance(caught.value.__cause__, LookupError)
    with pytest.raises(sw.ProgramError, match="mine"):
        list(state.text_iter())
    with pytest.raises(sw.ProgramError, match="mine"):
        _ = state.ret_value
    assert isinstance(state.error(), LookupError)


def test_stream_yields_what_came_and_then_raises(service: FakeService) -> None:
    service.script["a"] = "bcdef"
    for attribute, message in (
        ("break_stream_after", "middle"),
        ("error_in_stream_after", "broke"),
    ):
        setattr(service, attribute, 3)
        pieces: list[str] = []
        with pytest.raises(sw.ProgramError, match=message):
            pieces.extend(two_steps.run(stream=True).text_iter())
        assert "".join(pieces) == "abcd"
        with pytest.raises(sw.ProgramError, match=message):
            list(two_steps.run(stream=True).text_iter("first"))
        setattr(service, attribute, None)


def test_an_aborted_request_is_an_error_not_a_shorter_text(service: FakeService) -> None:
    service.abort_message = "shutting down"
    with pytest.raises(sw.ProgramError, match="shutting down"):
        two_steps.run()["first"]


def test_a_branchs_failure_reaches_the_join(service: FakeService) -> None:
    @sw.function
    def program(s: Any) -> None:
        s += "a"
        forks = s.fork(2)
        forks += sw.gen("x")
        forks.join()
        s += sw.gen("after")

    service.failures.append(REFUSED)  # the publication of the prefix
    with pytest.raises(sw.ProgramError, match="temperature"):
        program.run()["x"]
    service.barrier = None

    @sw.function
    def one_bad(s: Any) -> None:
        forks = s.fork(2)
        forks[0] += "good" + sw.gen("x")
        forks[1] += sw.image("bad")
        forks.join()

    state = one_bad.run()
    with pytest.raises(sw.ProgramError, match="no vision"):
        state["x"]
    assert isinstance(state.error(), sw.BackendError)


def test_children_of_a_failed_state_fail_with_it(service: FakeService) -> None:
    service.failures.append(REFUSED)
    seen: list[Any] = []

    @sw.function
    def program(s: Any) -> None:
        s += "a" + sw.gen("x")
        forks = s.fork(2)
        forks += sw.gen("y")
        late = s.fork(1)
        seen.extend([*forks, *late])

    state = program.run()
    for branch in (state, *seen):
        with pytest.raises(sw.ProgramError, match="temperature"):
            branch.sync()


def test_wrong_expressions_fail_at_their_line(service: FakeService) -> None:
    @sw.function
    def program(s: Any) -> None:
        with pytest.raises(ValueError, match="None"):
            s += None
        with pytest.raises(TypeError, match="int"):
            s += 5
        with pytest.raises(TypeError, match="expected text"):
            s += "a" + sw.gen("x") + 5
        with pytest.raises(sw.ProgramError, match="user turn begins inside a system turn"):
            s += sw.system("a" + sw.user("b"))
        s += sw.user_begin()
        with pytest.raises(sw.ProgramError, match="assistant turn begins inside a user turn"):
            s += sw.assistant("nested")
        with pytest.raises(sw.ProgramError, match="system turn ends, but user is open"):
            s += sw.system_end()
        (fork,) = s.fork(1)
        with pytest.raises(sw.ProgramError, match="inside a user turn"):
            fork += sw.user("nested")
        s += sw.user_end()

    program.run().sync()


def test_a_model_without_a_template_says_what_to_do() -> None:
    @sw.function
    def program(s: Any) -> None:
        s += sw.user("hi")
        s += sw.assistant(sw.gen("x"))

    with FakeService(chat_template=None) as service:
        with pytest.raises(sw.ProgramError, match=r"no chat template.*plain text") as caught:
            program.run(backend=sw.RuntimeEndpoint(service.url))["x"]
        assert isinstance(caught.value.__cause__, sw.TemplateError)
        plain = sw.RuntimeEndpoint(service.url, chat_template_name="plain")
        state = program.run(backend=plain)
        assert state.text() == f"USER: hi\nASSISTANT: {state['x']}\n"
        assert service.bodies()[-1]["sampling_params"]["stop"] == ["\nUSER:", "\nSYSTEM:"]
        own = sw.RuntimeEndpoint(
            service.url, chat_template="{% for m in messages %}[{{ m.content }}]{% endfor %}"
        )
        state = program.run(backend=own)
        assert state.text() == f"[hi][{state['x']}]"


def test_no_server_is_said_clearly() -> None:
    with FakeService() as service:
        url = service.url
    with pytest.raises(sw.ProgramError, match=f"no answer from {url}"):
        two_steps.run(backend=sw.RuntimeEndpoint(url))["first"]


@pytest.mark.slow
def test_a_failure_nobody_read_is_logged(
    service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    service.failures.append(REFUSED)
    with caplog.at_level(logging.ERROR, logger="statewise.frontend"):
        state = two_steps.run()
        executor = state._executor
        executor.session.wait_for(executor.poll_settled)
        del executor, state
        gc.collect()
    assert "nobody read" in caplog.text
    assert "temperature is -1" in caplog.text
