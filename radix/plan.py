"""What a recovery consists of: steps over spans of tokens, frozen.

    tokens   0 ............ r ........ a ........ p ........ logical ........ prompt end
    Reuse    [0, ........................ p)                  used as it stands at the end
    Replay                  [r, a) [a, ... p)                 cached history, some groups written
    Load                    pages of one group, from a slower tier
    Recompute                                     [p, logical)     matched, computed all the same

A `Replay` computes tokens whose history is cached, `num_layers` deep. Of the groups in
`write_groups`, whose pages in [start, end) hold nothing usable, it writes these pages into blocks
of its own; a rebuilt history page keeps its good deeper layers, which are copied into the new block
first. Pages that this plan's replays wrote are read from the own blocks, all others from the
tree's; nothing below `context_floor[group]` is read. Snapshot groups named in `restore` start from
the snapshot at `start` (from nothing at 0); the other snapshot groups written go on where the step
before stopped, if it stopped at `start`, and else start from nothing. After the last replay the
pages `write_back[group]` of each step are exact in all of the group's layers and may be handed to
the tree; other pages written were scratch.

This module does not choose (`planner`) and does not execute.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from statewise.radix.segment import Tier

PageRange = tuple[int, int]
NO_PAGES: PageRange = (0, 0)


class Level(enum.Enum):
    """How much had to be done; the value is the word of cache reports and metrics."""

    DIRECT = "direct"
    LOAD = "load"
    REPAIR = "repair"  # trailing state made exact again
    REBUILD = "rebuild"  # part of one group's history written again
    RECOMPUTE = "recompute"
    BOUNDED = "bounded"  # trailing state approximated; only where it was asked for


@dataclass(frozen=True, slots=True)
class Reuse:
    """Tokens [start, end) are used as they stand."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Load:
    """Copy pages [start_page, end_page) of one group back from `tier` into device blocks.

    Of a snapshot group: the one block that stands at boundary `start_page`.
    """

    group: int
    start_page: int
    end_page: int
    tier: Tier

    @property
    def num_pages(self) -> int:
        """Pages, one block each."""
        return self.end_page - self.start_page


@dataclass(frozen=True, slots=True)
class Replay:
    """Forward over tokens [start, end); see the module's text."""

    start: int
    end: int
    write_groups: int  # bit per group
    num_layers: int
    context_floor: tuple[int, ...]  # per group: first position that may be read
    write_back: tuple[PageRange, ...]  # per group: pages to hand to the tree
    restore: tuple[int, ...] = ()  # snapshot groups that start from the snapshot at `start`

    @property
    def num_tokens(self) -> int:
        """Tokens computed."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Recompute:
    """Tokens [start, end) matched, and are computed as if they had not."""

    start: int
    end: int


Step = Reuse | Load | Replay | Recompute


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """How a request gets to `position`, from where ordinary prefill goes on.

    `read_from`: no replay reads windows of tokens that a resume at `read_from` would not need:
    lease that far back. `repairing` are the groups that cannot resume at `position` before the
    steps have run. With `concurrent`, the loads run while the first `Recompute` does.
    `asynchronous`: better wait in the queue than hold up a step. `recovery_s` is the estimate for
    the steps before `position`, `total_s` that for all tokens of the prompt.
    """

    position: int
    level: Level
    steps: tuple[Step, ...]
    limiting_group: int | None
    read_from: int
    repairing: tuple[int, ...] = ()
    concurrent: bool = False
    asynchronous: bool = False
    recovery_s: float = 0.0
    total_s: float = 0.0
    blocks: tuple[int, ...] = ()  # device blocks the steps need, per group

    @property
    def is_exact(self) -> bool:
        """Whether what is computed after it is what a cold run computes, and may be shared."""
        return self.level is not Level.BOUNDED

    @property
    def replays(self) -> tuple[Replay, ...]:
        """The replay steps, in order."""
        return tuple(s for s in self.steps if isinstance(s, Replay))

    @property
    def loads(self) -> tuple[Load, ...]:
        """The load steps, in order."""
        return tuple(s for s in self.steps if isinstance(s, Load))

    @property
    def replayed_tokens(self) -> int:
        """Tokens computed by replays."""
        return sum(s.num_tokens for s in self.replays)

    @property
    def recomputed_tokens(self) -> int:
        """Matched tokens computed as if they had not matched."""
        return sum(s.end - s.start for s in self.steps if isinstance(s, Recompute))

    @property
    def loaded_pages(self) -> int:
        """Pages with state from a slower tier, whatever the group."""
        pages: set[int] = set()
        for load in self.loads:
            pages.update(range(load.start_page, load.end_page))
        return len(pages)
