"""Request traces in the Mooncake format, one JSON object a line.

    timestamp      milliseconds, never falling
    input_length   tokens of the prompt
    output_length  tokens generated (not replayed: the format does not identify them)
    hash_ids       one id for each 512 tokens of the prompt; the last may name a part of a block.
                   Equal ids mean equal tokens, and equal tokens before them.

Tokens are made from ids: token j of block i is 512 * i + j, so two prompts share exactly the
tokens that their ids say they share. Only whole blocks are keys of the cache; a part of a block at
the end has an id of its own, which later turns of the same conversation do not repeat, and counts
as tokens that every cache must compute.

This module does not replay.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

BLOCK_TOKENS = 512
MAX_ID = (1 << 31) // BLOCK_TOKENS - 1  # tokens are int32


class TraceError(ValueError):
    """A line that is not what the format says; names file, line and field."""

    def __init__(self, path: Path, line: int, field: str, problem: str) -> None:
        super().__init__(f"{path}:{line}: {field}: {problem}")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One prompt: its length in tokens, and the ids of its whole blocks."""

    prompt_len: int
    blocks: tuple[int, ...]

    def tokens(self) -> NDArray[np.int32]:
        """[len(blocks) * BLOCK_TOKENS] token ids."""
        blocks: NDArray[np.int32] = np.array(self.blocks, dtype=np.int32)
        inside: NDArray[np.int32] = np.arange(BLOCK_TOKENS, dtype=np.int32)
        made: NDArray[np.int32] = (blocks[:, None] * np.int32(BLOCK_TOKENS) + inside).reshape(-1)
        return made


def read_trace(path: Path, max_requests: int = 0) -> list[TraceRequest]:
    """Every request of a file, or the first `max_requests`; TraceError for a malformed line."""
    parents: dict[int, int] = {}
    last = 0
    found: list[TraceRequest] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if max_requests and len(found) == max_requests:
                break
            if not line.strip():
                continue
            at = _Line(path, number, line)
            last = at.timestamp(last)
            found.append(at.request(parents))
    if not found:
        raise TraceError(path, 1, "file", "holds no request")
    return found


class _Line:
    """One line on its way from text to a request."""

    def __init__(self, path: Path, number: int, text: str) -> None:
        self._place = (path, number)
        try:
            self._fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise self._error("line", f"not JSON ({error})") from None
        if not isinstance(self._fields, dict):
            raise self._error("line", "not a JSON object")

    def _error(self, field: str, problem: str) -> TraceError:
        return TraceError(*self._place, field, problem)

    def _integer(self, field: str, low: int) -> int:
        value = self._fields.get(field)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._error(field, f"expected an integer, found {value!r}")
        if value < low:
            raise self._error(field, f"{value} is less than {low}")
        return value

    def timestamp(self, earliest: int) -> int:
        """Arrival in milliseconds."""
        return self._integer("timestamp", earliest)

    def request(self, parents: dict[int, int]) -> TraceRequest:
        """The request; `parents` remembers the id before each id, which must not change."""
        length = self._integer("input_length", 1)
        self._integer("output_length", 0)
        ids = list(self._ids())
        blocks = -(-length // BLOCK_TOKENS)
        if len(ids) != blocks:
            problem = f"{len(ids)} ids for {length} tokens, which are {blocks} blocks"
            raise self._error("hash_ids", problem)
        for before, now in zip([-1, *ids], ids, strict=False):
            if parents.setdefault(now, before) != before:
                problem = f"{now} follows {before} here and {parents[now]} on an earlier line"
                raise self._error("hash_ids", problem)
        return TraceRequest(length, tuple(ids[: length // BLOCK_TOKENS]))

    def _ids(self) -> Iterator[int]:
        ids = self._fields.get("hash_ids")
        if not isinstance(ids, list):
            raise self._error("hash_ids", f"expected a list, found {ids!r}")
        for i, value in enumerate(ids):
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_ID:
                raise self._error(f"hash_ids[{i}]", f"{value!r} is no id in 0..{MAX_ID}")
            yield value
