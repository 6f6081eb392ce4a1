"""The patrol at work: in idle moments, cached blocks are compared with their checksums.

Damage is found before anybody hits it, and treated as if a request had: out of reach at once,
recalled from whoever holds it, counted with source "patrol".

This module does not decide when there is time.
"""

from __future__ import annotations

from statewise.radix import RadixTree
from statewise.radix.patrol import Patrol
from statewise.runtime.cache.blocks import Blocks
from statewise.runtime.cache.counters import CacheCounters
from statewise.runtime.cache.validity import Validity


class CachePatrol:
    """Walks one tree. Does nothing where no checksums are kept."""

    def __init__(
        self, tree: RadixTree, blocks: Blocks, validity: Validity, counters: CacheCounters
    ) -> None:
        self._walk = Patrol(tree)
        self._digest = blocks.sums.digest
        self._validity = validity
        self._counters = counters

    @property
    def num_rounds(self) -> int:
        """How often the whole tree has been walked."""
        return self._walk.num_rounds

    def step(self, max_blocks: int) -> int:
        """Compare the next blocks; returns how many, 0 where nothing has a checksum."""
        if self._digest is None:
            return 0
        compared = 0
        findings = []
        for portion in self._walk.take(max_blocks):
            compared += len(portion)
            self._counters.patrolled(portion.group, len(portion))
            found = self._walk.found(portion, self._digest(portion.group, portion.blocks))
            if found is not None:
                findings.append(found)
        for match, verdicts in findings:
            self._validity.discard(match, verdicts, "patrol")
        return compared
