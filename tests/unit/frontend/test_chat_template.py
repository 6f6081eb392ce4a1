"""Text around turns, from templates as models have them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from statewise.frontend.chat_template import ChatTemplate, Turn
from statewise.frontend.errors import TemplateError
from statewise.frontend.transcript import Transcript
from support.fake_service import CHATML

GEMMA = (
    "{{ bos_token }}"
    "{% if messages[0].role == 'system' %}"
    "{% set first = messages[0].content + '\n\n' %}{% set loop_messages = messages[1:] %}"
    "{% else %}{% set first = '' %}{% set loop_messages = messages %}{% endif %}"
    "{% for m in loop_messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' "
    "+ (first if loop.first else '') }}{{ m.content | trim }}{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}"
    "{% endfor %}"
)
REASONER = (  # rewrites answers, and starts an answer with an open thought
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "<A>{{ m.content.split('</think>')[-1] }}<E>{% else %}<U>{{ m.content }}<E>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<A><think>\n{% endif %}"
)
LAST_DIFFERS = (
    "{% for m in messages %}{{ m.content }}{% if loop.last %}$END{% else %}|{% endif %}{% endfor %}"
)
BOS = {"bos_token": "<s>", "eos_token": "</s>"}


def text_of(template: ChatTemplate, *turns: tuple[str, str]) -> str:
    transcript = Transcript(lambda: template)
    grown = ""
    for role, content in turns:
        grown += transcript.begin_role(role)
        grown += transcript.fill(content)
        grown += transcript.end_role()
    if "$END" not in transcript.text:
        assert grown == transcript.text
    return transcript.text


def test_default_system_prompt_comes_from_the_template() -> None:
    template = ChatTemplate(CHATML)
    assert text_of(template, ("user", "hi")).startswith("<|im_start|>system\nBe brief.<|im_end|>\n")
    own = text_of(template, ("system", "Own."), ("user", "hi"))
    assert own == "<|im_start|>system\nOwn.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"


def test_folded_system_turn_enters_the_users() -> None:
    template = ChatTemplate(GEMMA, BOS)
    text = text_of(template, ("system", "Be kind. "), ("user", "hi"), ("assistant", "yo"))
    assert text == (
        "<start_of_turn>user\nBe kind.\n\nhi<end_of_turn>\n<start_of_turn>model\nyo<end_of_turn>\n"
    )
    transcript = Transcript(lambda: template)
    transcript.begin_role("system")
    with pytest.raises(TemplateError, match="into the next user turn"):
        transcript.check_can_generate()


def test_the_servers_begin_token_is_not_doubled() -> None:
    kept = ChatTemplate(GEMMA, BOS, strip_bos=False)
    assert text_of(kept, ("user", "hi")).startswith("<s><start_of_turn>")
    stripped = ChatTemplate(GEMMA, BOS)
    assert text_of(stripped, ("user", "hi")).startswith("<start_of_turn>")
    llama = ChatTemplate(LLAMA2, BOS)
    text = text_of(llama, ("user", "a"), ("assistant", "b"), ("user", "c"))
    assert text == "[INST] a [/INST] b </s><s>[INST] c [/INST]"


def test_turns_the_template_refuses_have_their_usual_text() -> None:
    template = ChatTemplate(GEMMA, BOS)
    text = text_of(template, ("assistant", "one"), ("assistant", "two"), ("user", "three"))
    model = "<start_of_turn>model\n"
    assert text == f"{model}one<end_of_turn>\n{model}two<end_of_turn>\n" + (
        "<start_of_turn>user\nthree<end_of_turn>\n"
    )


def test_a_system_turn_that_cannot_be_written_is_an_error() -> None:
    template = ChatTemplate(LLAMA2, BOS)
    with pytest.raises(TemplateError, match=r"system turn here: Only user and assistant"):
        template.opening([], "system")
    gemma = ChatTemplate(GEMMA, BOS)
    with pytest.raises(TemplateError, match="assistant turn here"):
        text_of(gemma, ("system", "lost?"), ("assistant", "x"))


def test_answers_start_with_the_generation_prompt_and_are_kept_as_written() -> None:
    template = ChatTemplate(REASONER)
    turns = [("user", "q"), ("assistant", "thought</think>answer"), ("user", "more")]
    assert text_of(template, *turns) == "<U>q<E><A><think>\nthought</think>answer<E><U>more<E>"


def test_text_after_the_last_turn_is_provisional() -> None:
    template = ChatTemplate(LAST_DIFFERS)
    assert text_of(template, ("user", "a"), ("assistant", "b")) == "a|b$END"
    transcript = Transcript(lambda: template)
    for role in ("user", "assistant"):
        transcript.begin_role(role)
        transcript.fill(role[0])
        transcript.end_role()
        transcript.fill("!")  # text between turns keeps what stands before it
    assert transcript.text == "u$END!|a$END!"


def test_malformed_and_unknown_templates() -> None:
    with pytest.raises(TemplateError, match="malformed"):
        ChatTemplate("{% for %}")
    with pytest.raises(TemplateError, match="unknown chat template name"):
        ChatTemplate.named("chatml")
    with pytest.raises(TemplateError, match="cannot write a user turn"):
        ChatTemplate("{{ messages[0].nope.nope }}").opening([], "user")


def test_templates_run_sandboxed() -> None:
    template = ChatTemplate(
        "{{ messages.append(1) }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(TemplateError):
        template.opening([], "user")


def test_tags_and_functions_models_use() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
        "{{ [1, 'é'] | tojson }}{{ strftime_now('%%') }}"
        "{% for i in range(9) %}{% if i == 1 %}{% break %}{% endif %}.{% endfor %}"
    )
    turns = [Turn("user", "x")]
    assert template.closing(turns) == '[1, "é"]%.'


def rendered(messages: list[dict[str, str]]) -> str:
    """The same conversation rendered at once."""
    from statewise.frontend import chat_template

    return str(chat_template._environment().from_string(CHATML).render(messages=messages))


contents = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "Zs")), max_size=8)


@given(st.lists(contents, min_size=1, max_size=6), st.booleans())
def test_piecewise_text_equals_the_whole_rendering(texts: list[str], with_system: bool) -> None:
    roles = ["system"] if with_system else []
    roles += ["user", "assistant"] * len(texts)
    turns = [(role, text.strip()) for role, text in zip(roles, texts, strict=False)]
    messages: list[dict[str, Any]] = [{"role": r, "content": c} for r, c in turns]
    assert text_of(ChatTemplate(CHATML), *turns) == rendered(messages)
