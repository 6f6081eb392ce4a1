"""The parameter structs of `csrc/abi.h` for entries and recurrent layers, field by field.

`SPARSE_STRUCTS` is in the order of the library's `sw_sparse_struct_size`, which is compared when
the library is loaded. This module does not load the library or touch tensors.
"""

from __future__ import annotations

import ctypes

from statewise.kernels.abi import fields


class EntryGroup(ctypes.Structure):
    """A group of entries in one step."""

    _fields_ = fields(
        "pool page_table",
        "num_blocks block_stride table_stride entries_per_page dim ratio window",
    )


class SparseParams(ctypes.Structure):
    """Attention over a window and over entries."""

    _fields_ = [
        ("window", EntryGroup),
        ("entries", EntryGroup),
        *fields(
            "q out sinks selected query_starts context_lens context_starts",
            "num_rows num_tokens num_heads dim value_dim top_k bad_block",
            "q_dtype kv_dtype",
            "scale",
        ),
    ]


class SelectParams(ctypes.Structure):
    """Scores of index keys, and the choice of the best."""

    _fields_ = [
        ("entries", EntryGroup),
        *fields(
            "q weights out query_starts context_lens",
            "num_rows num_tokens num_heads q_stride top_k bad_block",
            "q_dtype kv_dtype",
        ),
    ]


class WindowsParams(ctypes.Structure):
    """Gated sums of windows."""

    _fields_ = fields("values gates out", "rows size dim")


class DeltaParams(ctypes.Structure):
    """Gated delta rule."""

    _fields_ = fields("q k v decay beta states out starts", "num_rows num_heads key_dim value_dim")


class ConvParams(ctypes.Structure):
    """Causal convolution."""

    _fields_ = fields("x states weight out kept starts", "num_rows channels size")


class SinkhornParams(ctypes.Structure):
    """Doubly stochastic matrices."""

    _fields_ = fields("x out", "rows n iterations", "", "eps")


SPARSE_STRUCTS: tuple[type[ctypes.Structure], ...] = (
    EntryGroup,
    SparseParams,
    SelectParams,
    WindowsParams,
    DeltaParams,
    ConvParams,
    SinkhornParams,
)
