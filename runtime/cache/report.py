"""A request's own account of the cache: what matched, what was used, and what stood in the way.

This module only describes a decision that was made elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from statewise.radix import Match
from statewise.radix.plan import Level, RecoveryPlan
from statewise.radix.segment import Tier
from statewise.radix.validation import ChainLayer, Verdict
from statewise.runtime.messages import CacheReport, GroupReport

MAX_VERDICTS = 16
MAX_FAULTS = 4  # in the sentence for a person


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


def build_report(
    match: Match,
    plan: RecoveryPlan,
    verdicts: tuple[Verdict, ...],
    prompt_len: int,
    loaded: Mapping[int, Tier],
    faults: Sequence[str] = (),
    why_not: str = "",
) -> CacheReport:
    """The report of a request that matched `match` and follows `plan`.

    `loaded` pages came back from slower tiers for it, before it was matched; `faults` say what did
    not, `why_not` what else they have.
    """
    position = plan.position
    matched = _matched(match, plan)
    groups = group_reports(match)
    limiting = ""
    if plan.limiting_group is not None:
        limiting = match.schema.groups[plan.limiting_group].name
    replayed = _replayed(plan)
    repaired = sum(end - start for start, end in replayed)
    by_tier = _by_tier(loaded, position // match.schema.page_size, match.schema.page_size, replayed)
    num_loaded = sum(by_tier.values())
    level = plan.level.value if matched else "none"
    if num_loaded and plan.level is Level.DIRECT:
        level = Level.LOAD.value
    return CacheReport(
        prompt=prompt_len,
        matched=matched,
        reused=position - repaired - num_loaded,
        repaired=repaired,
        loaded=num_loaded,
        loaded_from=by_tier,
        recomputed=matched - position,
        computed=prompt_len - matched,
        level=level,
        limiting_group=limiting,
        reason=_reason(match, plan, prompt_len, repaired, limiting)
        + _whence(by_tier)
        + _damage(match, verdicts)
        + "".join(f"; {text}" for text in (*faults[:MAX_FAULTS], why_not) if text),
        groups=groups,
        verdicts=(*(str(v) for v in verdicts if v.is_fault), *faults)[:MAX_VERDICTS],
    )


def told_as_lossy(report: CacheReport, num_tokens: int) -> CacheReport:
    """Return the report of a request that uses state of so many tokens that rests on lossy copies.

    Once told, the number only grows: others may hand over pages after the request began.
    """
    if num_tokens <= report.lossy:
        return report
    reason = report.reason.removesuffix(_lossy_text(report.lossy)) + _lossy_text(num_tokens)
    return msgspec.structs.replace(report, lossy=num_tokens, reason=reason)


def told_as_met(report: CacheReport, num_tokens: int) -> CacheReport:
    """Return the report of a request that computed so many tokens while the rest was loaded."""
    num_tokens = min(num_tokens, report.reused)
    if num_tokens <= 0:
        return report
    return msgspec.structs.replace(
        report,
        reused=report.reused - num_tokens,
        recomputed=report.recomputed + num_tokens,
        reason=f"{report.reason}; {num_tokens} computed while the rest was loaded",
    )


def _lossy_text(num_tokens: int) -> str:
    return f"; approximate: {num_tokens} rest on lossy copies"


def _matched(match: Match, plan: RecoveryPlan) -> int:
    """Tokens of the logical hit: whole pages, and those of the partly filled page resumed in."""
    return max(match.logical_tokens, plan.position)


def _by_tier(
    loaded: Mapping[int, Tier], num_pages: int, page_size: int, replayed: list[tuple[int, int]]
) -> dict[str, int]:
    """Tokens on loaded pages that are used as they came, by the tier they came from."""
    counts: dict[str, int] = {}
    for page, tier in sorted(loaded.items()):
        start, end = page * page_size, (page + 1) * page_size
        again = sum(max(0, min(end, e) - max(start, s)) for s, e in replayed)
        if page < num_pages and again < page_size:
            name = tier.name.lower()
            counts[name] = counts.get(name, 0) + page_size - again
    return counts


def _whence(by_tier: Mapping[str, int]) -> str:
    """Say where loaded state came from."""
    parts = [f"{count} from {tier}" for tier, count in by_tier.items()]
    return f"; copied back: {' and '.join(parts)}" if parts else ""


def _damage(match: Match, verdicts: Iterable[Verdict]) -> str:
    """Say what was found to be damaged on the device."""
    count: Counter[str] = Counter()
    for verdict in verdicts:
        if verdict.is_fault and verdict.layer is ChainLayer.INTEGRITY:
            name = match.schema.groups[verdict.group].name
            count[name] += max(len(verdict.pages), 1)
    parts = [f"{n} {'page' if n == 1 else 'pages'} of {name!r}" for name, n in count.items()]
    return f"; damaged on the device: {' and '.join(parts)}" if parts else ""


def _replayed(plan: RecoveryPlan) -> list[tuple[int, int]]:
    """Spans of tokens below the resume position that at least one replay computes, disjoint."""
    spans: list[tuple[int, int]] = []
    seen = 0
    for replay in sorted(plan.replays, key=lambda r: r.start):
        if replay.end > seen:
            spans.append((max(replay.start, seen), replay.end))
            seen = replay.end
    return spans


def _reason(match: Match, plan: RecoveryPlan, prompt_len: int, repaired: int, limiting: str) -> str:
    page = match.schema.page_size
    matched, position = _matched(match, plan), plan.position
    if not matched:
        if prompt_len <= page:
            return f"nothing shorter than a page of {page} tokens is cached"
        return "no cached prefix"
    if position == matched and not repaired:
        return f"all {matched} matched tokens were used as they stood"
    if not plan.is_exact:
        return f"approximate: {repaired} tokens replayed over a cut-off window of {limiting!r}"
    if position and repaired:
        return (
            f"{position} of {matched} matched tokens used after replaying {repaired} of them: "
            f"group {limiting!r} had to be made exact again"
        )
    if not limiting:
        return f"{position} of {matched} matched tokens used; reuse is limited to chunk boundaries"
    return (
        f"{position} of {matched} matched tokens used: group {limiting!r} could not resume deeper"
    )
