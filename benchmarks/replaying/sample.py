"""A small trace in the same format, made from a seed: conversations that go on, one shared start.

    usage: python benchmarks/replaying/sample.py FILE [--conversations N] [--seed N]

Turns per conversation are geometric, a turn adds a few hundred to a few thousand tokens, and gaps
between turns are about as long as a few dozen other requests. No figure is taken from any
recorded trace; figures about real traffic need one.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

BLOCK_TOKENS = 512
SYSTEM_BLOCKS = 2  # every conversation begins with these
GO_ON = 0.7  # chance of another turn


def requests(conversations: int, seed: int) -> Iterator[dict[str, object]]:
    """Requests in order of time, as objects of the trace format."""
    rng = random.Random(seed)
    turns: list[tuple[int, int, int]] = []  # (milliseconds, conversation, prompt tokens)
    for conversation in range(conversations):
        at, length = rng.randrange(conversations * 1000), SYSTEM_BLOCKS * BLOCK_TOKENS
        while True:
            length += int(rng.paretovariate(1.2) * 300) % 9000 + 40
            turns.append((at, conversation, length))
            if rng.random() > GO_ON:
                break
            at += int(rng.expovariate(1 / 30_000)) + 500
    ids = _Ids()
    for at, conversation, length in sorted(turns):
        yield {
            "timestamp": at,
            "input_length": length,
            "output_length": rng.randrange(20, 600),
            "hash_ids": ids.of(conversation, length),
        }


class _Ids:
    """Ids of blocks: whole ones keep theirs, a part at the end never comes again."""

    def __init__(self) -> None:
        self._next = SYSTEM_BLOCKS
        self._whole: dict[int, list[int]] = {}

    def _new(self) -> int:
        self._next += 1
        return self._next - 1

    def of(self, conversation: int, length: int) -> list[int]:
        """Ids of the first `length` tokens."""
        whole = self._whole.setdefault(conversation, list(range(SYSTEM_BLOCKS)))
        while len(whole) < length // BLOCK_TOKENS:
            whole.append(self._new())
        return [*whole, self._new()] if length % BLOCK_TOKENS else list(whole)


def write_sample(path: Path, conversations: int, seed: int) -> None:
    """Write a trace file."""
    lines = [json.dumps(request) + "\n" for request in requests(conversations, seed)]
    path.write_text("".join(lines), encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write_sample(args.file, args.conversations, args.seed)


if __name__ == "__main__":
    main()
