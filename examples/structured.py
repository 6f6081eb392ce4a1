"""Output in a form: a type, a regular expression, a JSON schema from a class."""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec
from connect import backend

import statewise as sw


class City(msgspec.Struct):
    """What is asked for; a pydantic model works as well, and so does a schema as a dict."""

    name: str
    continent: Literal["Africa", "America", "Asia", "Europe", "Oceania"]
    is_capital: bool


@sw.function
def facts(s: Any, city: str) -> None:
    """A number, a date, and an object."""
    s += "The number of hours in a day is " + sw.gen_int("hours", max_tokens=8) + ".\n"
    s += "An example of a date is " + sw.gen("date", regex=r"[12][0-9]{3}-[01][0-9]-[0-3][0-9]")
    s += f".\nFacts about {city} as JSON: " + sw.gen("city", json_schema=City, max_tokens=80)


if __name__ == "__main__":
    with backend():
        state = facts.run(city="Paris", temperature=0)
        print(int(state["hours"]), state["date"])
        try:
            print(json.loads(state["city"]))
        except ValueError:  # a small model can fill the tokens it has before it closes the object
            print("unfinished:", state["city"])
