"""Branches run at the same time from one point; their common prefix is computed once."""

from __future__ import annotations

from typing import Any

from connect import backend

import statewise as sw


@sw.function
def tips(s: Any, topic: str, num_tips: int) -> None:
    """Name tips, expand each in a branch of its own, then sum up."""
    s += sw.user(f"Give me {num_tips} short tips for {topic}.")
    s += sw.assistant(sw.gen("tips", max_tokens=60, temperature=0))
    branches = s.fork(num_tips)
    for number, branch in enumerate(branches, 1):
        branch += sw.user(f"Explain tip {number} in one sentence.")
        branch += sw.assistant(sw.gen("detail", max_tokens=40, temperature=0))
    branches.join()
    s += sw.user("Now sum all of it up: " + " ".join(s["detail"]))
    s += sw.assistant(sw.gen("summary", max_tokens=40, temperature=0))


if __name__ == "__main__":
    with backend():
        state = tips.run(topic="staying healthy", num_tips=3)
        for detail in state["detail"]:
            print("-", detail.strip())
        print("In short:", state["summary"].strip())
        print(state.usage())
