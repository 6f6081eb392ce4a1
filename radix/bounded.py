"""Bounded replay: resume from history alone after replaying a fixed number of tokens. Approximate.

Where windows are lost and history is whole, an exact repair replays the receptive field of all
windowed layers, n * (W-1) tokens. A bounded replay runs only the last few: its first rows see a
window that is cut off where it began, so what they compute, and all that follows from it, is
close to exact and no more.

    tokens    ........................ s ........ p        history read from the cache
    windows                            [ written  )        nothing before s is read, now or later

Because it is not exact, nothing of it may be shared: whoever carries the plan out gives the tree
neither the replayed windows nor what the request computes afterwards. It is never planned unless
it was asked for, nor where an exact plan is no dearer.

This module does not execute, and knows no clock.
"""

from __future__ import annotations

import numpy as np

from statewise.radix.cost import CostModel
from statewise.radix.match import Match
from statewise.radix.plan import NO_PAGES, Level, Recompute, RecoveryPlan, Replay, Reuse, Step
from statewise.radix.planner import Budget
from statewise.radix.residency import Residency
from statewise.radix.schema import CacheSchema, GroupKind
from statewise.radix.segment import Tier
from statewise.radix.target import Target


def can_be_bounded(schema: CacheSchema) -> bool:
    """Whether the schema's state allows it: history, windows without sinks, and tails."""
    kinds = {spec.kind for spec in schema.groups}
    if GroupKind.RECURRENT in kinds or not any(kind.is_history for kind in kinds):
        return False
    return not any(spec.sinks for spec in schema.groups if spec.kind.is_window)


def bounded_plan(
    match: Match,
    exact: RecoveryPlan,
    num_tokens: int,
    cost: CostModel,
    budget: Budget,
) -> RecoveryPlan | None:
    """The plan that replays `num_tokens` (rounded up to pages) up to where history is whole.

    None where `exact` is no dearer, where there is nothing to gain, or no blocks for it.
    """
    schema, size = match.schema, match.schema.page_size
    have = Residency(match)
    whole = np.ones(have.num_pages + 1, dtype=np.bool_)
    for group in have.history:
        whole &= have.resumable(group, Tier.DEVICE)
    page = int(np.flatnonzero(whole)[-1])
    start, end = page * size - -(-num_tokens // size) * size, page * size
    if start <= 0 or (exact.position >= end and not exact.replays):
        return None
    target = Target(have, page, (Tier.DEVICE,) * schema.num_groups)
    recovery_s = cost.prefill_s(start, end)
    total_s = recovery_s + cost.prefill_s(end, budget.prompt_len)
    if not target.repairing or exact.total_s <= total_s:
        return None
    replay = _replay(schema, start, end)
    blocks = tuple(
        (end - start) // size * (spec.kind.is_window and not spec.kind.is_snapshot)
        for spec in schema.groups
    )
    if budget.blocks is not None and any(
        mine > free for mine, free in zip(blocks, budget.blocks, strict=True)
    ):
        return None
    steps: list[Step] = [Reuse(0, end), replay]
    if page < have.num_pages:
        steps.append(Recompute(end, have.num_pages * size))
    return RecoveryPlan(
        position=end,
        level=Level.BOUNDED,
        steps=tuple(steps),
        limiting_group=exact.limiting_group,
        read_from=start,
        repairing=target.repairing,
        recovery_s=recovery_s,
        total_s=total_s,
        blocks=blocks,
    )


def _replay(schema: CacheSchema, start: int, end: int) -> Replay:
    """All layers over [start, end): windows and tails written, nothing handed back."""
    trailing = [g for g, spec in enumerate(schema.groups) if not spec.kind.is_history]
    return Replay(
        start,
        end,
        sum(1 << g for g in trailing),
        schema.num_layers,
        tuple(start if spec.kind.is_window else 0 for spec in schema.groups),
        (NO_PAGES,) * schema.num_groups,
    )
