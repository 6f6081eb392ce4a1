"""One program over many arguments: results in order, the common prefix computed once."""

from __future__ import annotations

from typing import Any

from connect import backend

import statewise as sw

PLACES = ["Lisbon", "Nairobi", "Lima", "Hanoi", "Oslo", "Quito", "Cairo", "Perth"]


@sw.function
def classify(s: Any, place: str) -> None:
    """The examples are the same for all; they are cached before the batch starts."""
    s += "Name the continent.\nTokyo: Asia\nParis: Europe\nDakar: Africa\nToronto: America\n"
    s += place + ": "
    s += sw.select("continent", ["Africa", "America", "Asia", "Europe", "Oceania"])


if __name__ == "__main__":
    with backend():
        states = classify.run_batch([{"place": p} for p in PLACES], progress_bar=True)
        for place, state in zip(PLACES, states, strict=True):
            print(f"{place:8} {state['continent']}")
        print(f"constant prefix: {classify.trace().prefix!r}")
