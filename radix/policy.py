"""Retention and eviction as policies: what goes first, and where trailing state is kept.

    policy    next to go
    lru       the leaf used longest ago, with every group's pages of its tokens
    recency   per group: the leaf, or the checkpoint, used longest ago
    value     per group: the least  tick + horizon * ln(uses * tokens saved / blocks held)

The last one is recency times recompute saved per byte. If the chance that something is used again
falls by 1/e every `horizon` ticks, then its expected saving at any moment ranks like

    weight * exp(-(now - tick) / horizon)     or, in logarithms,     tick + horizon * ln(weight)

which does not depend on now: a score is computed at a use and holds until the next one, so the
order is a heap and nothing is looked for. The horizon is learned, as the mean number of ticks
between two uses of the same state. Weights of history: `uses`, and the square root of the run's
length against it, because in the traces at hand a long run that was read once comes back more
rarely than a short one (docs/replay.md has the figures).

A checkpoint policy names the positions at which trailing state is kept while a prompt is computed.

This module does not hold an order, evicts nothing, and reads no clock: ticks are the tree's.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log, sqrt

from statewise.radix.node import Checkpoint, Node

LEARNING_RATE = 0.01  # of the horizon


class EvictionPolicy:
    """Least score first. A score is asked for when an item becomes evictable, and then holds.

    This class is `recency`: last use alone counts.
    """

    name = "recency"
    whole_leaves = False  # room for a window, too, is made by taking whole leaves

    def node_score(self, node: Node) -> float:
        """Score of a leaf's history."""
        return float(node.tick)

    def checkpoint_score(self, checkpoint: Checkpoint, num_blocks: int) -> float:
        """Score of a checkpoint in a group of which it holds `num_blocks`."""
        return float(checkpoint.tick)

    def note_gap(self, ticks: int) -> None:
        """Learn that state was used `ticks` after its last use."""


class LeastRecentlyUsed(EvictionPolicy):
    """All groups' state of the same tokens lives and dies together: the baseline."""

    name = "lru"
    whole_leaves = True


class ValuePolicy(EvictionPolicy):
    """Recency times recompute saved per byte; see the module."""

    name = "value"

    def __init__(self) -> None:
        self.horizon = 0.0  # ticks; plain recency until something was used twice

    def node_score(self, node: Node) -> float:
        """Uses over the square root of the run's length."""
        return node.tick + self.horizon * log(max(node.hits, 1) / sqrt(max(node.num_pages, 1)))

    def checkpoint_score(self, checkpoint: Checkpoint, num_blocks: int) -> float:
        """Uses times pages that need not be computed again, over blocks held."""
        saved = max(checkpoint.saved, 1)
        weight = (checkpoint.uses + 1) * saved / max(min(num_blocks, saved), 1)
        return checkpoint.tick + self.horizon * log(weight)

    def note_gap(self, ticks: int) -> None:
        """Follow the mean."""
        if ticks > 0:
            rate = LEARNING_RATE if self.horizon else 1.0
            self.horizon += rate * (ticks - self.horizon)


EVICTION_POLICIES: dict[str, type[EvictionPolicy]] = {
    policy.name: policy for policy in (ValuePolicy, EvictionPolicy, LeastRecentlyUsed)
}


def eviction_policy(name: str) -> EvictionPolicy:
    """Make a policy by its name; ValueError names the known ones."""
    if name not in EVICTION_POLICIES:
        known = ", ".join(EVICTION_POLICIES)
        raise ValueError(f"unknown eviction policy {name!r}; known: {known}")
    return EVICTION_POLICIES[name]()


# ------------------------------------------------------------------------- checkpoints


@dataclass(frozen=True, slots=True)
class Prefill:
    """What is known of a prompt before it is computed; positions in tokens, 0 for nowhere.

    `branch` is where the prompt left what was cached although history went on, `marks` what the
    client asked to be kept.
    """

    start: int
    length: int
    branch: int = 0
    marks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """Keeps trailing state at marks, at branch points (`branches`), and every `interval` tokens.

    An `interval` of 0 means no spacing. The end of a finished request is always kept.
    """

    branches: bool = True
    interval: int = 0

    def positions(self, prefill: Prefill) -> set[int]:
        """Positions after `prefill.start`, at most its length; not aligned to pages."""
        wanted: set[int] = set(prefill.marks)
        if self.branches:
            wanted.add(prefill.branch)
        if self.interval:
            wanted.update(range(self.interval, prefill.length, self.interval))
        return {p for p in wanted if prefill.start < p <= prefill.length}


def checkpoint_policy(name: str, interval: int) -> CheckpointPolicy:
    """`spaced`: everything; `branches`: without the spacing; `ends`: marks alone. Or ValueError."""
    known: dict[str, CheckpointPolicy] = {
        "spaced": CheckpointPolicy(True, interval),
        "branches": CheckpointPolicy(True, 0),
        "ends": CheckpointPolicy(False, 0),
    }
    if name not in known:
        raise ValueError(f"unknown checkpoint policy {name!r}; known: {', '.join(known)}")
    return known[name]
