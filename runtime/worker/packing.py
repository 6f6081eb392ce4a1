"""From rows of a `ScheduledBatch` to packed tensors: tokens, positions and one layout per group.

    rows        r0: 3 tokens        r1: 1 token    r2: 2 tokens
    packed      a a a               b              c c
    starts      0                   3              4         6

Page tables are copied into one rectangle per group, -1 where a row has no page. This module does
not run anything and does not check what the page tables say; kernels do, at each access.

Shapes: T packed tokens, R rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from statewise.kernels.interface import BatchLayout
from statewise.runtime.scheduler.batch import BatchRow, Int32


@dataclass(frozen=True)
class PackedRows:
    """Rows of one forward pass, packed. `starts` and `ends` are numpy for indexing."""

    rows: tuple[BatchRow, ...]
    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    starts: Int32  # [R+1] first packed token of each row
    ends: Int32  # [R] context length after each row


def pack_rows(rows: Sequence[BatchRow]) -> PackedRows:
    """Pack at least one row of at least one token each."""
    starts = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([len(r.tokens) for r in rows], out=starts[1:])
    ends = np.array([r.end for r in rows], dtype=np.int32)
    tokens = np.concatenate([r.tokens for r in rows], dtype=np.int64)
    positions = np.concatenate([np.arange(r.start, r.end, dtype=np.int64) for r in rows])
    assert (starts[1:] > starts[:-1]).all(), "a row without tokens was scheduled"
    return PackedRows(
        tuple(rows), torch.from_numpy(tokens), torch.from_numpy(positions), starts, ends
    )


def group_layout(packed: PackedRows, group: int, page_size: int) -> BatchLayout:
    """Where the packed rows read and write in one group."""
    rows = packed.rows
    width = -(-int(packed.ends.max()) // page_size)
    table = np.full((len(rows), width), -1, dtype=np.int32)
    for i, row in enumerate(rows):
        pages = row.page_tables[group][:width]
        table[i, : len(pages)] = pages
    reads = np.array([r.context_starts[group] for r in rows], dtype=np.int32)
    mask = np.array([r.write_groups >> group & 1 for r in rows], dtype=np.uint8)
    return BatchLayout(
        query_starts=torch.from_numpy(packed.starts),
        context_lens=torch.from_numpy(packed.ends),
        context_starts=torch.from_numpy(reads),
        page_table=torch.from_numpy(table),
        write_mask=torch.from_numpy(mask),
    )
