"""What the prefix cache counts: validations, failures, evictions, patrols.

This module does not decide anything and does not export anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from statewise.radix.schema import CacheSchema
from statewise.radix.validation import ChainLayer, Condition, Verdict
from statewise.runtime.counters import Labelled

PASSED, FAILED, ABSENT = "passed", "failed", "absent"


def layer_word(layer: ChainLayer) -> str:
    """Name a layer of the chain as labels and events do."""
    return layer.name.lower()


class CacheCounters:
    """Everything counted since the cache was made."""

    def __init__(self, schema: CacheSchema) -> None:
        self._names = tuple(group.name for group in schema.groups)
        self.cache_hits = Labelled("Admitted requests whose prefix was found in the tree.")
        self.inconsistent_hits = Labelled("Hits at which validation found damaged or stale state.")
        self.validations = Labelled(
            "Hits by layer of the validation chain and outcome.", "layer", "outcome"
        )
        self.validation_failures = Labelled(
            "Pages or single blocks that failed validation, at use or on patrol.",
            "layer", "condition", "group", "source",
        )  # fmt: skip
        self.evicted_blocks = Labelled(
            "Blocks that left the tree, by group and cause.", "group", "cause"
        )
        self.patrolled_blocks = Labelled("Blocks that the patrol compared.", "group")

    def validated(self, verdicts: Iterable[Verdict]) -> None:
        """Count the hit of an admitted request, with the verdicts of its lookup."""
        self.cache_hits.add()
        outcomes = dict.fromkeys(ChainLayer, PASSED)
        for verdict in verdicts:
            if verdict.is_fault:
                outcomes[verdict.layer] = FAILED
            elif outcomes[verdict.layer] == PASSED:
                outcomes[verdict.layer] = ABSENT
        for layer, outcome in outcomes.items():
            self.validations.add(layer_word(layer), outcome)

    def inconsistent(self) -> None:
        """Count a hit at which damaged or stale state was found."""
        self.inconsistent_hits.add()

    def found(self, verdicts: Sequence[Verdict], source: str) -> None:
        """Count what failed validation, at `source`: use or patrol."""
        for verdict in verdicts:
            self.validation_failures.add(
                layer_word(verdict.layer),
                verdict.condition.value,
                self._names[verdict.group],
                source,
                amount=max(len(verdict.pages), 1),
            )

    def patrolled(self, group: int, num_blocks: int) -> None:
        """Count blocks that the patrol compared."""
        self.patrolled_blocks.add(self._names[group], amount=num_blocks)

    def failures(self, condition: Condition) -> int:
        """Count of pages and blocks that failed on one condition."""
        return int(self.validation_failures.of(condition=condition.value))

    def left(self, group: int, cause: str, num_blocks: int) -> None:
        """Count blocks that left the tree."""
        if num_blocks:
            self.evicted_blocks.add(self._names[group], cause, amount=num_blocks)

    def evicted(self, group: int) -> int:
        """Blocks of `group` that made room for others."""
        name = self._names[group]
        causes = ("room", "follows", "demoted")
        return int(sum(self.evicted_blocks.of(group=name, cause=c) for c in causes))

    @property
    def inconsistency_rate(self) -> float:
        """Hits at which validation failed, of all hits."""
        hits = self.cache_hits.of()
        return self.inconsistent_hits.of() / hits if hits else 0.0
