"""Let the model pick: three ways to score the choices, and one to decode over them alone."""

from __future__ import annotations

from typing import Any

from connect import backend

import statewise as sw

METHODS = [
    sw.token_length_normalized,
    sw.greedy_token_selection,
    sw.unconditional_likelihood_normalized,
    sw.constrained,
]


@sw.function
def capital(s: Any, country: str, method: Any) -> None:
    """The choices' first characters may merge with the blank before them: scores are exact."""
    s += sw.user(f"What is the capital of {country}?")
    s += sw.assistant(
        f"The capital of {country} is "
        + sw.select("city", ["London", "Paris", "Berlin", "Rome"], choices_method=method)
        + "."
    )


if __name__ == "__main__":
    with backend():
        for method in METHODS:
            state = capital.run(country="Italy", method=method)
            print(f"{method!r:34} {state['city']}")
