"""A request's own account of the cache: what matched, what was used, and what stood in the way.

This module only describes a decision that was made elsewhere.
"""

from __future__ import annotations

import numpy as np

from statewise.radix import Match
from statewise.runtime.messages import CacheReport, GroupReport


def group_reports(match: Match) -> tuple[GroupReport, ...]:
    """Per group: tokens resident along the match, deepest position it alone could resume at."""
    page = match.schema.page_size
    out = []
    for g, spec in enumerate(match.schema.groups):
        if spec.kind.is_snapshot:
            resident = sum(s.block_of(g) is not None for s in match.snapshots)
        else:
            resident = int(np.count_nonzero(match.resident(g))) * page
        out.append(GroupReport(spec.name, resident, match.deepest(g) * page))
    return tuple(out)


def build_report(match: Match, prompt_len: int, position: int) -> CacheReport:
    """The report of a request that reuses `position` of `prompt_len` tokens as they stand."""
    matched = match.logical_tokens
    groups = group_reports(match)
    limiting = ""
    if position < matched:
        worst = match.limiting_group(match.logical_pages)
        limiting = groups[worst].name if worst is not None else ""
    return CacheReport(
        prompt=prompt_len,
        matched=matched,
        reused=position,
        recomputed=matched - position,
        computed=prompt_len - matched,
        level="direct" if position else ("recompute" if matched else "none"),
        limiting_group=limiting,
        reason=_reason(match, prompt_len, position, limiting),
        groups=groups,
    )


def _reason(match: Match, prompt_len: int, position: int, limiting: str) -> str:
    page = match.schema.page_size
    matched = match.logical_tokens
    if not matched:
        if prompt_len <= page:
            return f"nothing shorter than a page of {page} tokens is cached"
        return "no cached prefix"
    if position == matched:
        return f"all {matched} matched tokens were used as they stood"
    if not limiting:
        return f"{position} of {matched} matched tokens used; reuse is limited to chunk boundaries"
    return (
        f"{position} of {matched} matched tokens used: group {limiting!r} could not resume deeper"
    )
