"""What was reused, and why no more: the cache's own account of every call."""

from __future__ import annotations

from typing import Any

from connect import backend

import statewise as sw

DOCUMENT = "The harbour book notes every ship, its cargo, and the hour of the tide. " * 12


@sw.function
def ask(s: Any, question: str) -> None:
    """A question under a long document."""
    s += DOCUMENT + "\nQuestion: " + question + "\nAnswer:"
    s += sw.gen("answer", max_tokens=16, temperature=0, stop="\n")


if __name__ == "__main__":
    with backend():
        sw.flush_cache()
        for question in ("What does the book note?", "What is the hour of?", "Who keeps it?"):
            call = ask.run(question=question).cache_report()[0]
            report = call["report"]
            print(
                f"prompt {call['prompt_tokens']:4}  matched {report.get('matched', 0):4}  "
                f"reused {report.get('reused', 0):4}  {report.get('reason', '')}"
            )
        apart = ask.run(question="What does the book note?", cache_salt="another tenant")
        print("under another salt:", apart.usage().cached_tokens, "reused")
