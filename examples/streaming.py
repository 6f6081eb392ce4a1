"""Text as it is written: in a loop, in an event loop, and from an asynchronous program."""

from __future__ import annotations

import asyncio
from typing import Any

from connect import backend

import statewise as sw


@sw.function
def story(s: Any, about: str) -> None:
    """Two variables, one after the other."""
    s += sw.user(f"Tell a very short story about {about}.")
    s += sw.assistant(sw.gen("story", max_tokens=48, temperature=0))
    s += sw.user("Give it a title.")
    s += sw.assistant(sw.gen("title", max_tokens=12, temperature=0))


@sw.function
async def title_of(s: Any, text: str) -> str:
    """An asynchronous program waits without blocking the event loop."""
    s += sw.user("Give this a title: " + text)
    s += sw.assistant(sw.gen("title", max_tokens=12, temperature=0))
    return str(await s.async_get("title"))


async def both() -> None:
    """Two programs in one event loop."""
    states = await asyncio.gather(*(title_of.arun(text=t) for t in ("A dog runs.", "It rains.")))
    print([state.ret_value for state in states])
    state = story.run(about="a boat", stream=True)
    async for piece in state.text_async_iter("story"):
        print(piece, end="", flush=True)
    print("\n-- title:", await state.async_get("title"))


if __name__ == "__main__":
    with backend():
        state = story.run(about="a lighthouse", stream=True)
        for piece in state.text_iter("story"):
            print(piece, end="", flush=True)
        print("\n-- title:", state["title"])
        asyncio.run(both())
