"""What a planted bug is: one exact replacement, and the tests that must notice it.

This module plants nothing (`mutants`) and holds none (`planted`, `planted_tiers`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """Replace `old`, which occurs once in `file`, by `new`: one of `tests` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
