"""Made-up models for simulations, one letter per layer.

F  full history                       f  reads the last F layer's state
W  window                             w  reads the last W layer's state
V  a window twice as long             S  a window with sinks
K  aligned chunks                     R  running state
C  window, compressed entries (ratio m, overlap m) routed by an index, their tail
H  window, compressed entries (ratio M), their tail
"""

from __future__ import annotations

from typing import Any

from statewise.radix.schema import CacheSchema, GroupKind, StateGroupSpec

K = GroupKind


def make_schema(
    shape: str, page_size: int, window: int, *, ratio: int = 2, long_ratio: int = 4, sinks: int = 2
) -> CacheSchema:
    """Groups of a model whose layers are the letters of `shape`; ratios must divide the page."""
    groups: list[StateGroupSpec] = []

    def add(name: str, kind: GroupKind, letters: str, **more: Any) -> None:
        layers = tuple(i for i, c in enumerate(shape) if c in letters)
        if not layers:
            return
        shared = tuple(
            (i, max(la for la in layers if la < i))
            for i, c in enumerate(shape)
            if c.islower() and c.upper() in letters
        )
        more["snapshot_bytes" if kind.is_snapshot else "entry_bytes"] = 8
        groups.append(
            StateGroupSpec(name, kind, layers, "digest", "v1", shared_layers=shared, **more)
        )

    add("full", K.FULL, "F")
    add("entries", K.COMPRESSED, "C", ratio=ratio)
    add("index", K.INDEX, "C", ratio=ratio, depends_on="entries")
    add("long", K.COMPRESSED, "H", ratio=long_ratio)
    add("window", K.WINDOW, "WCH", window=window)
    add("wide", K.WINDOW, "V", window=2 * window)
    add("sinks", K.WINDOW, "S", window=window, sinks=sinks)
    add("chunk", K.CHUNKED, "K", window=window)
    add("tail", K.TAIL, "C", ratio=ratio, overlap=ratio)
    add("long_tail", K.TAIL, "H", ratio=long_ratio)
    add("state", K.RECURRENT, "R")
    return CacheSchema(page_size, len(shape), tuple(groups), f"digest-{shape}")
