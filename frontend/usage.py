"""What a program's calls cost, as the server reported it.

Every call's `meta_info` is kept as it came; `Usage` adds the figures up. `repaired` and
`recomputed` come from the server's cache report and are 0 for backends that send none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Usage:
    """Tokens over all calls of a state, and of the forks joined into it."""

    num_calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    repaired_tokens: int = 0
    recomputed_tokens: int = 0
    generated_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        mine, theirs = vars(self), vars(other)
        return Usage(**{name: mine[name] + theirs[name] for name in mine})


@dataclass(frozen=True)
class Call:
    """One call to the backend. `kind`: gen, select, publish."""

    kind: str
    name: str | None
    meta_info: Mapping[str, Any]

    def usage(self) -> Usage:
        """Return the call's figures; what the backend did not report counts 0."""
        report = self.report() or {}
        return Usage(
            num_calls=1,
            prompt_tokens=_count(self.meta_info, "prompt_tokens"),
            cached_tokens=_count(self.meta_info, "cached_tokens"),
            repaired_tokens=_count(report, "repaired"),
            recomputed_tokens=_count(report, "recomputed"),
            generated_tokens=_count(self.meta_info, "completion_tokens"),
        )

    def report(self) -> Mapping[str, Any] | None:
        """Return the server's cache report, where it sent one."""
        report = self.meta_info.get("cache_report")
        return report if isinstance(report, Mapping) else None


def _count(figures: Mapping[str, Any], name: str) -> int:
    value = figures.get(name)
    return value if isinstance(value, int) else 0


def total(calls: Iterable[Call]) -> Usage:
    """Return the sum over `calls`."""
    result = Usage()
    for call in calls:
        result += call.usage()
    return result


def cache_report(calls: Iterable[Call]) -> list[dict[str, Any]]:
    """One entry for each call, in order: kind, name, token counts, and the server's report."""
    entries = []
    for call in calls:
        usage = call.usage()
        entries.append(
            {
                "kind": call.kind,
                "name": call.name,
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached_tokens,
                "generated_tokens": usage.generated_tokens,
                "report": dict(call.report() or {}),
            }
        )
    return entries
