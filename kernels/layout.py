"""What a block looks like, and what a step's layout must satisfy: shared by all backends.

A block of one layer is [2, Hkv, P, D], K then V; a block of entries is [P / ratio, D]; a snapshot
is a row of numbers. All CPU backends use exactly these bytes, so they share one layout id, and a
block written by one is read by the other.

This module does not compute anything on the blocks' contents.
"""

from __future__ import annotations

import torch

from statewise.kernels.interface import (
    AttentionGeometry,
    BatchLayout,
    EntryGeometry,
    StateGeometry,
)

DTYPE_WORDS = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
}


def dtype_word(dtype: torch.dtype) -> str:
    """Short stable word of a floating dtype; ValueError for others."""
    word = DTYPE_WORDS.get(dtype)
    if word is None:
        raise ValueError(f"K/V blocks of {dtype} are not supported; known: {list(DTYPE_WORDS)}")
    return word


def block_shape(geometry: AttentionGeometry) -> tuple[int, int, int, int]:
    """[2, Hkv, P, D]."""
    return (2, geometry.num_kv_heads, geometry.page_size, geometry.head_dim)


def block_layout_id(geometry: AttentionGeometry) -> str:
    """Stable word for the physical layout: order, dtype and geometry of a block."""
    g = geometry
    return f"hnd-{dtype_word(g.dtype)}-h{g.num_kv_heads}-p{g.page_size}-d{g.head_dim}-v1"


def entry_layout_id(geometry: EntryGeometry) -> str:
    """Stable word for a block of entries."""
    g = geometry
    return f"entries-{dtype_word(g.dtype)}-r{g.ratio}-p{g.page_size}-d{g.dim}-v1"


def entry_pool_shape(geometry: EntryGeometry) -> tuple[int, int]:
    """Shape of one block: [P / ratio, D]."""
    return (geometry.entries_per_page, geometry.dim)


def state_layout_id(geometry: StateGeometry) -> str:
    """Stable word for a snapshot."""
    return f"state-{dtype_word(geometry.dtype)}-n{geometry.num_values}-v1"


def readable_start(geometry: AttentionGeometry, context_start: int, position: int) -> int:
    """First key position that the query at `position` may read."""
    if geometry.window <= 0:
        return context_start
    return max(context_start, position - geometry.window + 1)


def check_geometry(geometry: AttentionGeometry) -> None:
    """Raise ValueError for a geometry that no kernel could run."""
    g = geometry
    if min(g.num_q_heads, g.num_kv_heads, g.head_dim, g.page_size) < 1:
        raise ValueError(f"sizes must be positive: {g}")
    if g.num_q_heads % g.num_kv_heads:
        raise ValueError(f"{g.num_q_heads} query heads do not divide over {g.num_kv_heads} heads")


def check_layout(geometry: AttentionGeometry, layout: BatchLayout) -> None:
    """Raise ValueError for arrays of the wrong shape, dtype or order (contents: see below).

    Contents checked: query_starts ascends from 0, every row's tokens fit its context, and the
    page table is wide enough for it. Block numbers are checked where they are used.
    """
    check_geometry(geometry)
    _check_arrays(geometry.page_size, layout)


def check_entry_layout(geometry: EntryGeometry, layout: BatchLayout) -> None:
    """Do the same for a group of entries."""
    g = geometry
    if min(g.dim, g.page_size, g.ratio) < 1 or g.page_size % g.ratio:
        raise ValueError(f"a page must hold whole entries: {g}")
    if g.window < 0 or (g.window and g.ratio != 1):
        raise ValueError(f"only a group of one entry per token can have a window: {g}")
    _check_arrays(g.page_size, layout)


def _check_arrays(page_size: int, layout: BatchLayout) -> None:
    rows = layout.context_lens.shape[0]
    expected = {
        "query_starts": ((rows + 1,), torch.int32),
        "context_lens": ((rows,), torch.int32),
        "context_starts": ((rows,), torch.int32),
        "write_mask": ((rows,), torch.uint8),
        "page_table": ((rows, layout.page_table.shape[-1]), torch.int32),
    }
    for name, (shape, dtype) in expected.items():
        tensor = getattr(layout, name)
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            got = f"{list(tensor.shape)} {tensor.dtype}"
            raise ValueError(f"{name}: expected {list(shape)} {dtype}, got {got}")
    _check_contents(page_size, layout)


def _check_contents(page_size: int, layout: BatchLayout) -> None:
    starts = layout.query_starts.numpy()
    contexts = layout.context_lens.numpy()
    counts = starts[1:] - starts[:-1]
    if starts[0] != 0 or (counts < 0).any():
        raise ValueError(f"query_starts must ascend from 0: {starts.tolist()}")
    if (counts > contexts).any():
        raise ValueError("a row computes more tokens than its context holds")
    if (layout.context_starts.numpy() < 0).any():
        raise ValueError("context_starts must not be negative")
    need = -(-int(contexts.max(initial=0)) // page_size)
    if layout.page_table.shape[1] < need:
        raise ValueError(f"page table has {layout.page_table.shape[1]} pages, rows need {need}")
