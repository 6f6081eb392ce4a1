"""A program is a function of a state: append text, let the model write, read what it wrote."""

from __future__ import annotations

from typing import Any

from connect import backend

import statewise as sw


@sw.function
def ask(s: Any, question: str) -> None:
    """One question in the model's own chat form."""
    s += sw.system("You answer in one short sentence.")
    s += sw.user(question)
    s += sw.assistant(sw.gen("answer", max_tokens=32, temperature=0))


if __name__ == "__main__":
    with backend():
        state = ask.run(question="What is the capital of France?")
        print(state["answer"])
        print(state.usage())
