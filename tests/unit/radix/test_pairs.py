"""What attention reads: closed forms against counting, token by token."""

from __future__ import annotations

import numpy as np
import pytest

from statewise.radix import CacheSchema, GroupKind, StateGroupSpec
from statewise.radix.pairs import full_pairs, pairs_of


def group(name: str, kind: GroupKind, *layers: int, **more: object) -> StateGroupSpec:
    size = "snapshot_bytes" if kind.is_snapshot else "entry_bytes"
    return StateGroupSpec(name, kind, layers, "layout", "v1", **{size: 32, **more})  # type: ignore[arg-type]


def schema_of(*groups: StateGroupSpec, num_layers: int = 1) -> CacheSchema:
    return CacheSchema(12, num_layers, groups, "m")


FULL, COMPRESSED = GroupKind.FULL, GroupKind.COMPRESSED
INDEX = group("i", GroupKind.INDEX, 0, ratio=4, depends_on="c", top_k=5, entry_bytes=8)
KINDS = {
    "full": ([group("f", FULL, 0)], lambda t: t + 1),
    "window": ([group("w", GroupKind.WINDOW, 0, window=7)], lambda t: min(t + 1, 7)),
    "sinks": (
        [group("w", GroupKind.WINDOW, 0, window=7, sinks=3)],
        lambda t: len({*range(max(0, t - 6), t + 1), *range(min(3, t + 1))}),
    ),
    "chunked": ([group("c", GroupKind.CHUNKED, 0, window=8)], lambda t: t % 8 + 1),
    "compressed": ([group("c", COMPRESSED, 0, ratio=3)], lambda t: (t + 1) // 3),
    "routed": (
        [group("c", COMPRESSED, 0, ratio=4), INDEX],
        lambda t: min((t + 1) // 4, 5) + (t + 1) // 4 * 0.25,
    ),
    "routed tokens": (
        [group("f", FULL, 0), group("i", GroupKind.INDEX, 0, depends_on="f", top_k=6)],
        lambda t: min(t + 1, 6) + t + 1,
    ),
    "recurrent": ([group("r", GroupKind.RECURRENT, 0)], lambda t: 0),
    "tail": ([group("t", GroupKind.TAIL, 0, ratio=4)], lambda t: 0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_span_reads_what_its_tokens_read(kind: str) -> None:
    groups, reads = KINDS[kind]
    pairs = pairs_of(schema_of(*groups))
    for start in range(0, 40, 3):
        for end in range(start, 60, 7):
            counted = sum(reads(t) for t in range(start, end))
            assert pairs.count(start, end, 1) == pytest.approx(counted)
    at = np.arange(60, dtype=np.float64)
    assert pairs.before_all(at, 1).tolist() == [pairs.count(0, int(end), 1) for end in at]


def test_depth_takes_the_layers_below_and_sharing_layers_read_as_well() -> None:
    full = group("f", FULL, 1)
    window = group("w", GroupKind.WINDOW, 0, window=4, shared_layers=((2, 0),))
    pairs = pairs_of(schema_of(full, window, num_layers=4))
    in_window, in_full = 4 * 10, sum(range(21, 31))
    assert [pairs.count(20, 30, depth) for depth in range(5)] == [
        0, in_window, in_window + in_full, 2 * in_window + in_full, 2 * in_window + in_full,
    ]  # fmt: skip


def test_without_a_schema_every_layer_reads_everything() -> None:
    assert full_pairs(3).count(10, 12, 2) == 2 * (11 + 12)


def test_only_an_index_chooses_entries() -> None:
    with pytest.raises(ValueError, match="top_k"):
        schema_of(group("c", COMPRESSED, 0, ratio=4, top_k=5))
