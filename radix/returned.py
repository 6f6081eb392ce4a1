"""Blocks that came back from a slower tier: validated again before anything may read them.

    length      as many bytes as a block of the group has
    checksum    what was recorded when the page left, per layer
    alignment   the block it came back to

No error from the transfer is no evidence: a copy counts as loaded when these hold. The rest of the
chain runs over these pages as over all others, once they are in the tree.

This module does not copy, and does not drop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from statewise.radix.segment import Int32
from statewise.radix.validation import (
    Condition,
    UInt64,
    ValidationEnv,
    Verdict,
    bad_layers,
    misaligned,
)


@dataclass(frozen=True, slots=True)
class Returned:
    """Pages of one group and what was read for them; arrays by page.

    `recorded` [n, layers] are the checksums from when the pages left, `found` those of the bytes
    on the device now; `lengths` the bytes that arrived.
    """

    group: int
    pages: tuple[int, ...]
    blocks: Int32
    lengths: Sequence[int]
    recorded: UInt64
    found: UInt64


def validate_returned(env: ValidationEnv, back: Returned) -> tuple[Verdict, ...]:
    """Verdicts over pages that came back; each page fails once, by its first condition."""
    verdicts: list[Verdict] = []
    size = env.schema.groups[back.group].block_bytes(env.schema.page_size)
    short = np.array([length != size for length in back.lengths], dtype=np.bool_)
    masks = np.array(bad_layers(back.recorded, back.found), dtype=object)
    changed = ~short & (masks != 0)
    crooked = ~short & ~changed & misaligned(env.groups[back.group], back.blocks)
    for i, page in enumerate(back.pages):
        if short[i]:
            detail = f"{back.lengths[i]} bytes, not {size}"
            verdicts.append(Verdict(back.group, Condition.LENGTH, (page,), detail=detail))
        elif changed[i]:
            mask = int(masks[i])
            detail = f"bytes changed: layers {mask:#x}"
            verdicts.append(
                Verdict(back.group, Condition.CHECKSUM, (page,), layers=mask, detail=detail)
            )
        elif crooked[i]:
            need = f"needs {env.groups[back.group].alignment} bytes"
            verdicts.append(Verdict(back.group, Condition.ALIGNMENT, (page,), detail=need))
    return tuple(verdicts)
