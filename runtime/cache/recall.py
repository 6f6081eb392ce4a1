"""State that failed after requests had begun to rely on it.

A page can pass validation at one request's start and fail at another's. The tree then forgets it,
but the first request still holds its block: it must not run on, nor may anything stay cached that
it has computed since (F21: damage does not spread beyond those who ran before it was found).

This module remembers which blocks failed, and answers whether a sequence relies on one. It does
not end requests: the scheduler does.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from statewise.radix import Match
from statewise.radix.validation import Condition, Verdict
from statewise.runtime.cache.sequence import Sequence
from statewise.runtime.memory.block_pool import BlockPool

Int32 = NDArray[np.int32]


class Recalls:
    """Failed blocks that somebody may still hold. Numbered: who began later knew of it."""

    def __init__(self, pools: tuple[BlockPool, ...]) -> None:
        self._pools = pools
        self._failed: list[dict[int, tuple[int, int]]] = [{} for _ in pools]
        self.number = 0  # of the latest failure

    def add(self, group: int, blocks: Iterable[int]) -> None:
        """These blocks of `group` failed just now."""
        self.number += 1
        generations = self._pools[group].generations
        for block in blocks:
            self._failed[group][block] = (int(generations[block]), self.number)

    def concern(self, sequence: Sequence) -> bool:
        """Whether `sequence` relies on a block that failed since it began."""
        if sequence.has_lost_state:
            return True
        if sequence.last_recall == self.number:
            return False
        for group, failed in enumerate(self._failed):
            self._forget_freed(group)
            since = {b for b, (_, number) in failed.items() if number > sequence.last_recall}
            if since and since.intersection(_held(sequence, group)):
                return True
        sequence.last_recall = self.number
        return False

    def _forget_freed(self, group: int) -> None:
        generations, failed = self._pools[group].generations, self._failed[group]
        for block in [b for b, (held, _) in failed.items() if generations[b] != held]:
            del failed[block]


def disowned(sequence: Sequence, match: Match) -> list[Verdict]:
    """What a recalled sequence has published of `match`, as verdicts to discard."""
    first, stop = sequence.began_from, sequence.num_published
    verdicts = []
    for group in range(match.schema.num_groups):
        if group in sequence.snapshot_groups:
            after = first * match.schema.page_size
            made = [s.position for s in match.snapshots if s.position > after]
            verdicts += [Verdict(group, Condition.CHECKSUM, position=p) for p in made]
        elif first < stop:
            verdicts.append(Verdict(group, Condition.CHECKSUM, tuple(range(first, stop))))
    return verdicts


def _held(sequence: Sequence, group: int) -> list[int]:
    """Blocks that the sequence reads, or will read before it stops recovering."""
    blocks: list[int] = sequence.view(group).tolist()
    match = sequence.match
    if sequence.is_recovering and match is not None:
        if group in sequence.snapshot_groups:
            blocks += [b.block for s in match.snapshots for b in s.blocks if b.group == group]
        else:
            blocks += match.blocks(group).tolist()
    return blocks
