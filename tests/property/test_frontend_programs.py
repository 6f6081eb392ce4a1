"""Any program means the same however it is run: in threads, in the caller, streamed, or awaited.

Programs are random trees of appends, generations, variables, turns, scopes, forks and joins. The
oracle walks the same tree one step after another with plain strings; the model is a hash of the
whole text, so that a step out of order, a lost append or a branch that started too early changes
what comes after it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import statewise as sw
from statewise.frontend.backends.base import Backend, CacheHints, Completion, Prompt
from statewise.frontend.chat_template import ChatTemplate
from statewise.frontend.choices import ChoicesDecision, ChoicesMethod
from statewise.frontend.sampling import SamplingOptions

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
CHOICES = ("left", "right")


def written_after(text: str) -> str:
    """What the model writes after a text."""
    return hashlib.blake2b(text.encode(), digest_size=2).hexdigest()


def picked_after(text: str) -> str:
    """What the model picks after a text."""
    return CHOICES[len(written_after(text).strip("abcdef")) % 2]


class HashModel:
    """A backend in memory."""

    def __init__(self) -> None:
        self.published: list[str] = []

    def chat_template(self) -> ChatTemplate:
        return ChatTemplate(TEMPLATE)

    def generate(
        self, prompt: Prompt, options: SamplingOptions, hints: CacheHints
    ) -> list[Completion]:
        return [Completion(written_after(prompt.text), {"completion_tokens": 1})]

    def stream(
        self, prompt: Prompt, options: SamplingOptions, hints: CacheHints
    ) -> Iterator[Completion]:
        for character in written_after(prompt.text):
            yield Completion(character, {"completion_tokens": 1})

    def publish(self, text: str, hints: CacheHints) -> dict[str, Any]:
        self.published.append(text)
        return {}

    def select(
        self, prompt: Prompt, choices: Sequence[str], method: ChoicesMethod, hints: CacheHints
    ) -> ChoicesDecision:
        return ChoicesDecision(picked_after(prompt.text), {})

    def flush_cache(self) -> None:
        """Nothing is cached."""

    def get_server_info(self) -> dict[str, Any]:
        return {}


# A step is (kind, argument): text, gen name, select name, use of a variable, turn, scope, fork.
names = st.sampled_from("xyz")
leaves = st.one_of(
    st.tuples(st.just("text"), st.text("ab ", max_size=3)),
    st.tuples(st.just("gen"), names),
    st.tuples(st.just("select"), names),
    st.tuples(st.just("read"), names),
    st.tuples(st.just("turn"), st.sampled_from(["user", "assistant", "system"])),
)
steps = st.recursive(
    st.lists(leaves, max_size=5),
    lambda inner: st.lists(
        st.one_of(
            leaves,
            st.tuples(st.just("scope"), inner),
            st.tuples(
                st.sampled_from(["gather_variable", "concate_and_append"]),
                st.lists(inner, min_size=1, max_size=3),
            ),
        ),
        max_size=5,
    ),
    max_leaves=12,
)


class Oracle:
    """The meaning of a program, one step after another."""

    def __init__(self, text: str = "", variables: dict[str, Any] | None = None) -> None:
        self.text = text
        self.variables = dict(variables or {})
        self.published: list[str] = []

    def run(self, program: Any) -> Oracle:
        for kind, argument in program:
            match kind:
                case "text":
                    self.text += argument
                case "gen":
                    self.variables[argument] = written_after(self.text)
                    self.text += self.variables[argument]
                case "select":
                    self.variables[argument] = picked_after(self.text)
                    self.text += self.variables[argument]
                case "read":
                    self.text += str(self.variables.get(argument, "?"))
                case "turn":
                    self.text += (
                        f"<{argument}>" + written_after(self.text + f"<{argument}>") + "</>"
                    )
                case "scope":
                    start = len(self.text)
                    self.run(argument)
                    self.variables["scope"] = self.text[start:]
                case _:
                    self.fork(kind, argument)
        return self

    def fork(self, mode: str, branches: Any) -> None:
        if len(branches) > 1 and self.text:
            self.published.append(self.text)
        children = [Oracle(self.text, self.variables).run(branch) for branch in branches]
        for child in children:
            self.published += child.published
        start = len(self.text)
        if mode == "concate_and_append":
            self.text += "".join(child.text[start:] for child in children)
            return
        new = {n for child in children for n in child.variables} - set(self.variables)
        for name in new:
            values = [c.variables[name] for c in children if name in c.variables]
            self.variables[name] = values


def apply(s: Any, program: Any) -> None:
    """The same program in the language."""
    for kind, argument in program:
        match kind:
            case "text":
                s += argument
            case "gen":
                s += sw.gen(argument)
            case "select":
                s += sw.select(argument, CHOICES)
            case "read":
                s += str(s[argument]) if argument in s else "?"
            case "turn":
                s += sw.user(sw.gen()) if argument == "user" else getattr(sw, argument)(sw.gen())
            case "scope":
                with s.var_scope("scope"):
                    apply(s, argument)
            case _:
                forks = s.fork(len(argument))
                for fork, branch in zip(forks, argument, strict=True):
                    apply(fork, branch)
                forks.join(kind)


@sw.function
def plain(s: Any, program: Any) -> None:
    apply(s, program)


@sw.function
async def asynchronous(s: Any, program: Any) -> None:
    apply(s, program)


def check(state: Any, expected: Oracle, model: HashModel) -> None:
    assert state.text() == expected.text
    assert {name: state[name] for name in expected.variables} == expected.variables
    assert sorted(model.published) == sorted(expected.published)


@pytest.mark.slow
@settings(max_examples=40)
@given(steps)
def test_a_program_means_the_same_however_it_is_run(program: Any) -> None:
    expected = Oracle().run(program)
    for run in (plain.run, asynchronous.run):
        for options in ({}, {"stream": True}, {"use_thread": False}):
            model = HashModel()
            assert isinstance(model, Backend)
            state = run(program, backend=model, **options)  # type: ignore[arg-type]
            check(state, expected, model)
            assert "".join(state.text_iter()) == expected.text
    model = HashModel()
    check(asyncio.run(asynchronous.arun(program, backend=model)), expected, model)
