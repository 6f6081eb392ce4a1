"""Exactness: from which token on each layer's input is exact when a forward starts at r.

    tokens      r ..................................................... end
    layer 0     exact from r on: embeddings need no state
    window W    keys of tokens < r are missing, so a token's output is exact only if W-1 tokens
                before it were exact: exact from r + (W-1) on
    next one    exact from r + 2(W-1) on, and so on: the receptive field
    history     read from the cache, exact everywhere: adds nothing
    recurrent   exact if the snapshot at r is there and its input is exact from r on; else never

A trailing group enters a replay of [r, end) in one of three states:

    intact   all pages that any token of [r, end) reads are there      read only, adds nothing
    warm     the pages below r are there, some of [r, end) are not     written again; adds only if
                                                                       its input is inexact
    cold     pages below r are missing                                 written again from r on; adds

Everything is computed for many starts at once. Layers' exactness never decreases with depth, so
whoever needs several layers of a group asks for the deepest.

This module does not know costs, tiers or pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from statewise.radix.schema import CacheSchema, GroupKind, StateGroupSpec

Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]
NEVER = np.int64(1) << 60


@dataclass(frozen=True, slots=True)
class GroupStart:
    """How one trailing group stands at each start r; arrays [n].

    Windows: `ready` is "pages below r are there", `intact` as in the module's table. Snapshot
    kinds: `ready` is "the snapshot at r is there, or none is needed"; `intact` is unused.
    """

    ready: Bool
    intact: Bool


@lru_cache(maxsize=64)
def readers(schema: CacheSchema) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Per layer: (group, layer that owns the state it reads), for groups that affect exactness."""
    out: list[list[tuple[int, int]]] = [[] for _ in range(schema.num_layers)]
    for group, spec in enumerate(schema.groups):
        if spec.kind.is_history or spec.kind is GroupKind.TAIL:
            continue
        for layer in spec.layers:
            out[layer].append((group, layer))
        for layer, owner in spec.shared_layers:
            out[layer].append((group, owner))
    return tuple(tuple(row) for row in out)


def exact_from(
    schema: CacheSchema, depth: int, starts: Int64, groups: dict[int, GroupStart]
) -> list[Int64]:
    """[depth + 1][n] first token from which the input of layer l is exact; NEVER if none.

    Entry l is also where the state that layer l writes becomes exact.
    """
    exact = [starts]
    for layer in range(depth):
        result = exact[layer]
        for group, owner in readers(schema)[layer]:
            written = exact[owner]
            spec, start = schema.groups[group], groups[group]
            result = np.maximum(result, _after(spec, start, starts, written, exact[layer]))
        exact.append(result)
    return exact


def _after(
    spec: StateGroupSpec, start: GroupStart, starts: Int64, written: Int64, inputs: Int64
) -> Int64:
    """[n] from which token on a layer's output is exact, given what it reads."""
    if spec.kind is GroupKind.RECURRENT:
        going = start.ready & (inputs == starts) & (written == starts)
        return np.where(going, inputs, NEVER)
    if spec.kind is GroupKind.CHUNKED:
        reach = np.where(written >= NEVER, NEVER, -(-written // spec.window) * spec.window)
    else:
        reach = np.where(written >= NEVER, NEVER, written + spec.window - 1)
    clean = start.intact | (start.ready & (written == starts)) | (written == 0)
    if spec.sinks:  # never left behind: they must be there, and not be written inexactly
        kept = (start.ready | start.intact) & (starts >= spec.sinks)
        reach = np.where(kept, reach, NEVER)
    return np.where(clean, inputs, np.maximum(inputs, reach))
