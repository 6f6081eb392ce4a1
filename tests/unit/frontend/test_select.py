"""Selection: the three rules, token boundaries, and the constrained method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import statewise as sw
from statewise.frontend.backends.scoring import common_prefix_len, escape
from support.fake_service import FakeService, encode

METHODS = [
    sw.token_length_normalized,
    sw.greedy_token_selection,
    sw.unconditional_likelihood_normalized,
    sw.constrained,
]


def program_of(prompt: str, choices: list[str], method: Any) -> Any:
    @sw.function
    def program(s: Any) -> None:
        s += prompt + sw.select("pick", choices, choices_method=method) + "."

    return program


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_every_method_picks_the_likeliest(service: FakeService, method: Any) -> None:
    service.script["capital: "] = "Berlin"
    state = program_of("capital: ", ["Rome", "Berlin", "Oslo"], method).run()
    assert state["pick"] == "Berlin"
    assert state.text() == "capital: Berlin."
    assert state.get_meta_info("pick")["prompt_tokens"] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_gen_with_choices_is_a_select(service: FakeService, stream: bool) -> None:
    service.script["use a "] = "search"

    @sw.function
    def program(s: Any) -> None:
        s += "use a " + sw.gen("tool", choices=["calc", "search"], max_tokens=5)

    state = program.run(stream=stream, temperature=0.7)
    assert state["tool"] == "search"
    assert "".join(state.text_iter("tool")) == "search"


def test_merging_choices_are_scored_from_the_common_prefix(service: FakeService) -> None:
    # "is P" + "aris" becomes one token " Paris"; "is P" + "orto" does not.
    prompt, choices = "it is P", ["aris", "orto"]
    assert encode(prompt + "aris")[:-1] == encode("it is")
    service.script[" is"] = " Paris"
    state = program_of(prompt, choices, sw.token_length_normalized).run()
    assert state["pick"] == "aris"
    meta = state.get_meta_info("pick")
    scored = meta["input_token_logprobs"]
    assert ["".join(token[2] for token in row) for row in scored] == [" Paris", " Porto"]
    assert service.bodies()[0]["input_ids"] == encode("it is")[:-1]


def test_no_merge_scores_the_choices_alone(service: FakeService) -> None:
    state = program_of("x: ", ["one", "two three"], sw.token_length_normalized).run()
    meta = state.get_meta_info("pick")
    texts = ["".join(token[2] for token in row) for row in meta["input_token_logprobs"]]
    assert texts == ["one", "two three"]
    means = [sum(t[0] for t in row) / len(row) for row in meta["input_token_logprobs"]]
    assert meta["normalized_prompt_logprobs"] == pytest.approx(means)


def test_the_prefix_is_computed_once_for_all_choices(service: FakeService) -> None:
    state = program_of("a long shared prompt: ", ["k", "l", "m"], sw.token_length_normalized).run()
    state.sync()
    first, scoring = service.bodies()
    assert first["sampling_params"] == {"max_new_tokens": 0}
    assert first["checkpoint"] is True
    assert [ids[: len(first["input_ids"])] for ids in scoring["input_ids"]] == [
        first["input_ids"]
    ] * 3
    assert scoring["logprob_start_len"] == len(first["input_ids"])


def test_unconditional_scores_the_choices_without_a_prompt(service: FakeService) -> None:
    state = program_of("x: ", ["one", "six"], sw.unconditional_likelihood_normalized).run()
    state.sync()
    assert service.bodies()[-1]["input_ids"] == [
        encode("one", with_bos=False),
        encode("six", with_bos=False),
    ]
    meta = state.get_meta_info("pick")
    rows = zip(meta["input_token_logprobs"], meta["unconditional_token_logprobs"], strict=True)
    gains = [
        sum(a[0] - (b[0] or 0) for a, b in zip(own, alone, strict=True)) / len(own)
        for own, alone in rows
    ]
    assert meta["normalized_unconditional_prompt_logprobs"] == pytest.approx(gains)


def test_constrained_heals_the_boundary(service: FakeService) -> None:
    service.script["it is"] = " Porto"
    state = program_of("it is P", ["aris", "orto"], sw.constrained).run()
    assert state["pick"] == "orto"
    assert state.text() == "it is Porto."
    (body,) = service.bodies()
    assert body["input_ids"] == encode("it is")
    assert body["sampling_params"]["regex"] == " P(aris|orto)"
    assert body["sampling_params"]["temperature"] == 0


def test_constrained_escapes_choices(service: FakeService) -> None:
    service.script["x"] = "a.b (c)|d"
    state = program_of("x", ["other", "a.b (c)|d"], sw.constrained).run()
    assert state["pick"] == "a.b (c)|d"


def test_select_in_an_empty_state(service: FakeService) -> None:
    for method in METHODS:
        assert program_of("", ["one", "two"], method).run()["pick"] in ("one", "two")


def test_salt_reaches_every_request_of_a_selection(service: FakeService) -> None:
    for method in METHODS:
        program_of("x: ", ["k", "l"], method).run(cache_salt="mine").sync()
    assert all(body["cache_salt"] == "mine" for body in service.bodies())


def test_wrong_choices_fail_at_their_line() -> None:
    for choices in (None, [], "text", ["", "a"]):
        with pytest.raises(ValueError, match=r"choice"):
            sw.select("x", choices)
    with pytest.raises(ValueError, match="temperature"):
        sw.select("x", ["a"], temperature=0.5)
    with pytest.raises(ValueError, match="at least one choice"):
        sw.gen("x", choices=[])


def scored(*rows: Sequence[tuple[float | None, int]]) -> dict[str, Any]:
    tokens = [[[logprob, token, None] for logprob, token in row] for row in rows]
    return {
        "choices": [f"c{i}" for i in range(len(rows))],
        "normalized_prompt_logprobs": [sum(t[0] or 0 for t in row) / len(row) for row in tokens],
        "input_token_logprobs": tokens,
        "output_token_logprobs": [[] for _ in rows],
    }


def test_length_normalization_takes_the_mean() -> None:
    figures = scored([(-1.0, 1), (-1.0, 2)], [(-1.5, 3)])
    assert sw.token_length_normalized(**figures).decision == "c0"


def test_greedy_follows_tokens_not_means() -> None:
    figures = scored([(-0.5, 1), (-9.0, 2)], [(-0.6, 3), (-0.1, 4)])
    assert sw.greedy_token_selection(**figures).decision == "c0"


def test_greedy_keeps_choices_that_share_a_token_whatever_its_noise() -> None:
    figures = scored([(-0.5, 1), (-9.0, 2)], [(-0.5000001, 1), (-0.1, 4)], [(-3.0, 5)])
    assert sw.greedy_token_selection(**figures).decision == "c1"


def test_greedy_extends_a_choice_that_ends_with_its_mean() -> None:
    ends, goes_on = [(-1.0, 1)], [(-1.0, 1), (-0.5, 2)]
    assert sw.greedy_token_selection(**scored(ends, goes_on)).decision == "c1"
    goes_on = [(-1.0, 1), (-2.0, 2)]
    assert sw.greedy_token_selection(**scored(ends, goes_on)).decision == "c0"


def test_unconditional_needs_its_scores() -> None:
    with pytest.raises(ValueError, match="unconditional"):
        sw.unconditional_likelihood_normalized(**scored([(-1.0, 1)]))


def test_common_prefix_and_escape() -> None:
    assert common_prefix_len([[1, 2, 3], [1, 2], [1, 2, 4]]) == 2
    assert common_prefix_len([[1], [2]]) == 0
    assert common_prefix_len([[5, 6]]) == 2
    assert escape(r"a.b\(c)[d]{e}^$|+*?") == r"a\.b\\\(c\)\[d\]\{e\}\^\$\|\+\*\?"
    assert escape("a-b c\n") == "a-b c\n"
