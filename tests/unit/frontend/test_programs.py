"""Programs against a toy service: text, variables, roles, forks, batches."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import statewise as sw
from support.fake_service import FakeService


@sw.function
def qa(s: Any, question: str) -> str:
    s += "Q: " + question + "\nA:"
    s += sw.gen("answer", max_tokens=16, stop="\n", temperature=0)
    return "done " + question


def test_text_and_variable(service: FakeService) -> None:
    service.script["A:"] = " Paris\nmore"
    state = qa.run(question="capital of France?")
    assert state["answer"] == " Paris"
    assert state.text() == "Q: capital of France?\nA: Paris"
    assert state.ret_value == "done capital of France?"
    assert state.get_meta_info("answer")["finish_reason"] == {"type": "stop", "matched": "\n"}
    assert "answer" in state
    assert "other" not in state
    assert state.error() is None


def test_calling_is_running_and_positional_arguments_work(service: FakeService) -> None:
    assert qa("one").text().startswith("Q: one\nA: out")


def test_options_of_gen_go_over_options_of_run(service: FakeService) -> None:
    @sw.function
    def program(s: Any) -> None:
        s += "a" + sw.gen("x", temperature=0, stop=["b"]) + sw.gen("y", regex="(k|l)", seed=3)

    program.run(temperature=0.5, top_k=7, max_new_tokens=9, stop="z", min_p=0.1).sync()
    first, second = (body["sampling_params"] for body in service.bodies())
    assert first["temperature"] == 0
    assert first["stop"] == ["b"]
    assert first["top_k"] == second["top_k"] == 7
    assert second["temperature"] == 0.5
    assert second["stop"] == "z"
    assert second["sampling_seed"] == 3
    assert second["regex"] == "(k|l)"
    assert first["max_new_tokens"] == 9
    assert first["min_p"] == 0.1


def test_defaults_are_the_documented_ones(service: FakeService) -> None:
    @sw.function
    def program(s: Any) -> None:
        s += "a" + sw.gen("x")

    program.run().sync()
    (body,) = service.bodies()
    assert body == {
        "text": "a",
        "sampling_params": {
            "max_new_tokens": 128,
            "n": 1,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "ignore_eos": False,
        },
    }


def test_several_samples_make_a_list_and_the_first_enters_the_text(service: FakeService) -> None:
    @sw.function
    def program(s: Any) -> None:
        s += "a" + sw.gen("x", n=3)

    for stream in (False, True):
        state = program.run(stream=stream)
        assert len(state["x"]) == 3
        assert len(set(state["x"])) == 3
        assert state.text() == "a" + state["x"][0]
        assert len(state.get_meta_info("x")) == 3


def test_a_variable_generated_again_is_read_after_its_last_generation(service: FakeService) -> None:
    service.script |= {"one": " first", "two": " second"}

    @sw.function
    def program(s: Any) -> None:
        s += "one" + sw.gen("x") + " two" + sw.gen("x")

    assert program.run()["x"] == " second"


def test_control_flow_reads_variables(service: FakeService) -> None:
    service.script["use a "] = "calculator"

    @sw.function
    def program(s: Any) -> None:
        s += "use a " + sw.gen("tool")
        s += "!" if s["tool"] == "calculator" else "?"
        s["note"] = 5

    state = program.run()
    assert state.text() == "use a calculator!"
    assert state["note"] == 5


def test_unknown_variable_is_a_key_error_at_once(service: FakeService) -> None:
    @sw.function
    def program(s: Any) -> None:
        with pytest.raises(KeyError):
            s["nothing"]
        s += "a"

    with pytest.raises(KeyError):
        program.run()["nothing"]
    with pytest.raises(KeyError):
        program.run(stream=True)["nothing"]


def test_roles_take_their_text_from_the_served_template(service: FakeService) -> None:
    service.script["<|im_start|>assistant\n"] = "hi"

    @sw.function
    def program(s: Any) -> None:
        s += sw.user("hello")
        s += sw.assistant(sw.gen("x"))
        with s.user():
            s += "bye"
        s += sw.assistant_begin()
        s += "well, " + sw.gen("y")
        s += sw.assistant_end()

    state = program.run()
    assert state.text() == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\nhi<|im_end|>\n"
        "<|im_start|>user\nbye<|im_end|>\n"
        f"<|im_start|>assistant\nwell, {state['y']}<|im_end|>\n"
    )
    assert state.messages() == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "bye"},
        {"role": "assistant", "content": f"well, {state['y']}"},
    ]
    assert service.prompts()[0].endswith("<|im_start|>assistant\n")


def test_var_scope_records_text(service: FakeService) -> None:
    service.script["a"] = "b"

    @sw.function
    def program(s: Any) -> None:
        with s.var_scope("whole"):
            s += "a" + sw.gen("x")
            s += "c"
        s += "d"

    assert program.run()["whole"] == "abc"


def test_unnamed_generation_stays_in_the_text(service: FakeService) -> None:
    service.script["a"] = "b"

    @sw.function
    def program(s: Any) -> None:
        s += "a" + sw.gen() + "c"

    for stream in (False, True):
        assert program.run(stream=stream).text() == "abc"


def test_fork_runs_branches_at_once_and_publishes_the_prefix_once(service: FakeService) -> None:
    service.barrier = threading.Barrier(3)

    @sw.function
    def program(s: Any) -> None:
        s += "common prefix."
        forks = s.fork(3)
        forks += lambda i: f" branch {i}:"
        for fork in forks:
            fork += sw.gen("x")
        forks.join()
        s["all"] = s["x"]

    state = program.run()
    assert len(state["all"]) == 3
    assert state["x"] == state["all"]
    assert len(state.get_meta_info("x")) == 3
    assert service.published() == ["common prefix."]
    assert service.bodies()[0]["text"] == "common prefix."
    assert sorted(service.prompts()) == [f"common prefix. branch {i}:" for i in range(3)]
    assert state.usage().num_calls == 4


def test_fork_does_not_wait_for_what_comes_before_it(service: FakeService) -> None:
    service.barrier = threading.Barrier(2)  # the first generation waits for the second program's

    @sw.function
    def program(s: Any) -> None:
        s += "a" + sw.gen("x")
        (fork,) = s.fork(1)
        fork += " b"

    first = program.run()
    second = program.run()
    assert first.text() == "a" + first["x"] == second.text()


def test_branches_inherit_variables_that_are_still_to_come(service: FakeService) -> None:
    service.script["a"] = "1"

    @sw.function
    def program(s: Any) -> None:
        s["early"] = "e"
        s += "a" + sw.gen("x")
        forks = s.fork(2)
        for fork in forks:
            fork["seen"] = fork["early"] + fork["x"]
        forks.join()

    state = program.run()
    assert state["seen"] == ["e1", "e1"]
    assert state["x"] == "1"


def test_join_appends_texts(service: FakeService) -> None:
    @sw.function
    def program(s: Any) -> None:
        s += "start"
        forks = s.fork(2)
        forks += [" one", " two"]
        forks[0] += "!"
        forks.join("concate_and_append")

    assert program.run().text() == "start one! two"


def test_nothing_can_be_appended_to_a_joined_branch(service: FakeService) -> None:
    @sw.function
    def program(s: Any) -> None:
        forks = s.fork(2)
        forks.join()
        forks[0] += "late"

    with pytest.raises(sw.ProgramError, match="joined"):
        program.run()


def test_copy_goes_on_and_is_joined(service: FakeService) -> None:
    service.script |= {"a": "1", "ab": "2"}

    @sw.function
    def program(s: Any) -> None:
        s += "a"
        with s.copy() as other:
            other += "b" + sw.gen("y")

    state = program.run()
    assert state["y"] == ["2"]
    assert state.text() == "a"


def test_nested_forks(service: FakeService) -> None:
    @sw.function
    def program(s: Any) -> None:
        s += "r"
        outer = s.fork(2)
        for i, branch in enumerate(outer):
            branch += f"{i}"
            inner = branch.fork(2)
            inner += lambda j: f"{j}" + sw.gen("leaf")
            inner.join()
        outer.join()

    leaves = program.run()["leaf"]
    assert [len(group) for group in leaves] == [2, 2]
    assert len({leaf for group in leaves for leaf in group}) == 4


def test_group_rejects_a_wrong_number_of_expressions(service: FakeService) -> None:
    @sw.function
    def program(s: Any) -> None:
        forks = s.fork(2)
        forks += ["only one"]

    with pytest.raises(ValueError, match="1 expressions for 2 branches"):
        program.run()


def test_without_threads_everything_runs_in_the_caller(service: FakeService) -> None:
    service.script["a"] = "b"

    @sw.function
    def program(s: Any) -> None:
        s += "a" + sw.gen("x")
        assert s["x"] == "b"
        forks = s.fork(2)
        forks += sw.gen("y")
        forks.join()

    before = threading.active_count()
    state = program.run(use_thread=False)
    assert len(state["y"]) == 2
    assert threading.active_count() <= before + 1  # the service's own handler


def test_bound_arguments_give_way_to_the_call(service: FakeService) -> None:
    bound = qa.bind(question="bound")
    assert bound.run().text().startswith("Q: bound")
    assert bound.run(question="called").text().startswith("Q: called")
    assert bound.run("positional").text().startswith("Q: positional")
    with pytest.raises(TypeError):
        qa.bind(nonsense=1)
    with pytest.raises(TypeError):
        qa.run()


def test_an_argument_named_like_an_option_is_explained(service: FakeService) -> None:
    @sw.function
    def program(s: Any, n: int, stream: bool = True) -> None:
        s += f"{n}"

    with pytest.raises(TypeError, match="'n' is also an option of run"):
        program.run(n=2)
    assert program.run(2).text() == program.bind(n=2).run().text() == "2"
    assert program.run_batch([{"n": 2}])[0].text() == "2"


def test_the_first_parameter_must_be_s() -> None:
    with pytest.raises(TypeError, match="named 's'"):
        sw.function(lambda state: None)


def test_decorator_with_parentheses(service: FakeService) -> None:
    @sw.function(num_api_spec_tokens=64)
    def program(s: Any) -> None:
        """Doc."""
        s += "x"

    assert program.run().text() == "x"
    assert program.__doc__ == "Doc."


def test_salt_and_checkpoint_reach_the_server(service: FakeService) -> None:
    @sw.function
    def program(s: Any) -> None:
        s += "a"
        s += sw.checkpoint()
        s += sw.gen("x")

    state = program.run(cache_salt="tenant")
    state.sync()
    publish, generate = service.bodies()
    assert publish["checkpoint"] is True
    assert publish["cache_salt"] == generate["cache_salt"] == "tenant"
    assert "checkpoint" not in generate
    assert "exact" not in generate
    assert [entry["kind"] for entry in state.cache_report()] == ["publish", "gen"]


def test_exact_reaches_the_server_with_every_call(service: FakeService) -> None:
    @sw.function
    def program(s: Any) -> None:
        s += "a"
        s += sw.checkpoint()
        s += sw.gen("x")
        s += sw.select("y", ["k", "l"])

    program.run(exact=True).sync()
    assert len(service.bodies()) > 3
    assert all(body["exact"] is True for body in service.bodies())
    service.requests.clear()
    program.run_batch([(), ()], exact=True)
    assert all(body["exact"] is True for body in service.bodies())
    service.requests.clear()
    with sw.pin("prefix", exact=True):
        pass
    assert service.bodies()[0]["exact"] is True


def test_usage_adds_up(service: FakeService) -> None:
    service.script["A:"] = "xy\n"
    state = qa.run(question="q")
    prompt = len("Q: q\nA:") + 1
    usage = state.usage()
    assert usage.prompt_tokens == prompt
    assert usage.generated_tokens == 2
    assert (usage.cached_tokens, usage.repaired_tokens, usage.recomputed_tokens) == (0, 1, 2)
    again = qa.run(question="q")
    assert again.usage().cached_tokens == prompt - 1
    assert again.cache_report()[0]["report"]["reused"] == prompt - 1


def test_images_are_refused_clearly(service: FakeService) -> None:
    @sw.function
    def program(s: Any) -> None:
        s += "look: " + sw.image("cat.png") + sw.gen("x")

    with pytest.raises(sw.ProgramError, match="no vision"):
        program.run()["x"]


def test_reasoning_is_separated(service: FakeService) -> None:
    service.script["a: "] = "<think>hmm</think>\n\nyes"

    @sw.function
    def program(s: Any) -> None:
        s += "a: " + sw.separate_reasoning("so " + sw.gen("x", max_tokens=1)) + "."
        s += " a: " + sw.separate_reasoning(sw.gen("y"), model_type="qwen3") + "."

    for stream in (False, True):
        state = program.run(stream=stream)
        assert state["y"] == "yes"
        assert state["y_reasoning_content"] == "hmm"
        assert state["x"] == ""  # opened by the prompt, never closed: all reasoning
        assert state.text() == "a: so . a: yes."


def test_no_backend_is_said_clearly() -> None:
    with pytest.raises(sw.ProgramError, match="no backend"):
        qa.run(question="x")
    with pytest.raises(TypeError, match="not a backend"):
        sw.set_default_backend(object())


def test_server_words(service: FakeService) -> None:
    info = sw.get_server_info()
    assert info is not None
    assert info["path"] == "/get_server_info"
    assert sw.flush_cache() is True
    sw.set_default_backend(None)
    assert sw.get_server_info() is None
    assert sw.flush_cache() is False
