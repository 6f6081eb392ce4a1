"""A conversation: every turn continues the one before it, and reuses its state."""

from __future__ import annotations

from typing import Any

from connect import backend

import statewise as sw

QUESTIONS = ["Name a large river.", "Through which countries does it flow?", "How long is it?"]


@sw.function
def converse(s: Any, questions: list[str]) -> None:
    """Ask the questions one after another."""
    s += sw.system("You are a geographer. Be brief.")
    for number, question in enumerate(questions):
        s += sw.user(question)
        s += sw.assistant(sw.gen(f"answer{number}", max_tokens=40, temperature=0))


if __name__ == "__main__":
    with backend():
        state = converse.run(questions=QUESTIONS)
        for message in state.messages():
            print(f"{message['role']:>9}: {message['content'].strip()}")
        for call in state.cache_report():
            print(f"{call['name']}: {call['cached_tokens']} of {call['prompt_tokens']} reused")
