"""What the tree, and slower tiers, offer a prompt: the answer of one lookup.

This module does not look anything up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from statewise.radix import Match, Namespace, Tier
from statewise.radix.plan import Level, RecoveryPlan
from statewise.radix.validation import Verdict
from statewise.runtime.cache.promotion import Offer
from statewise.runtime.cache.report import build_report, told_as_lossy
from statewise.runtime.messages import CacheReport


@dataclass(frozen=True)
class Lookup:
    """What the tree offers a prompt, valid for one tree version."""

    namespace: Namespace
    match: Match | None  # None: the cache is off
    plan: RecoveryPlan
    verdicts: tuple[Verdict, ...]
    prompt_len: int
    tree_version: tuple[int, ...]
    offer: Offer | None = None  # a quicker plan, which loads from slower tiers first
    why_not: str = ""  # what slower tiers have and is not worth loading
    lossy: int = 0  # tokens below the position whose state rests on lossy copies

    @property
    def position(self) -> int:
        """Where ordinary computation begins, in tokens."""
        return self.plan.position

    @property
    def promised_position(self) -> int:
        """Where it would begin after what slower tiers offer was loaded."""
        return self.plan.position if self.offer is None else self.offer.plan.position

    @property
    def is_hit(self) -> bool:
        """Whether anything of the prompt was found in the tree."""
        return self.match is not None and bool(self.match.logical_pages or self.match.snapshots)

    @property
    def branch_position(self) -> int:
        """Where trailing state should be kept for the next request; 0: nowhere."""
        return (self.match.branch_position or 0) if self.match is not None else 0

    def report(
        self, loaded: Mapping[int, Tier] | None = None, faults: Sequence[str] = ()
    ) -> CacheReport:
        """Why each prompt token is or is not reused.

        `loaded` pages were copied back for it; `faults` say what did not come back.
        """
        if self.match is None:
            size = self.prompt_len
            return CacheReport(prompt=size, computed=size, reason="the prefix cache is off")
        what = (self.match, self.plan, self.verdicts, self.prompt_len)
        report = build_report(*what, loaded or {}, faults, self.why_not)
        return told_as_lossy(report, self.lossy)


NOTHING = RecoveryPlan(0, Level.RECOMPUTE, (), None, 0)
