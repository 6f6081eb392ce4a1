"""The parameter structs of `csrc/abi.h`, field by field.

A struct is filled once and passed by pointer: one ctypes call costs less than a microsecond,
passing six tensors through a binding costs many. `STRUCTS` is in the order of the library's
`sw_struct_size`, which a test compares.

This module does not load the library or touch tensors.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

ABI_VERSION = 6

OK, BAD_BLOCK, NO_MEMORY, UNSUPPORTED, BAD_POSITION = range(5)

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ROW_MAJOR, TILES, CODED = range(3)  # packing of a linear layer's weight
ACTIVATION_CODES = {"silu": 0, "gelu_tanh": 1}

_P = ctypes.c_void_p
_I64 = ctypes.c_int64
_I32 = ctypes.c_int32
_F32 = ctypes.c_float


def fields(
    pointers: str, integers: str, codes: str = "", floats: str = ""
) -> list[tuple[str, type[Any]]]:
    """Fields of a struct by kind, in this order: pointers, 64-bit and 32-bit integers, floats."""
    groups: tuple[tuple[str, type[Any]], ...] = (
        *((pointers, _P), (integers, _I64)),
        *((codes, _I32), (floats, _F32)),
    )
    return [(name, kind) for names, kind in groups for name in names.split()]


class AttentionParams(ctypes.Structure):
    """Attention and append."""

    _fields_ = fields(
        "q out kv k v sinks query_starts context_lens context_starts page_table write_mask",
        "num_rows num_q_heads num_kv_heads head_dim page_size table_stride num_blocks kv_stride "
        "q_stride k_stride v_stride window checked_blocks bad_block",
        "q_dtype kv_dtype new_dtype",
        "scale soft_cap",
    )


class NormParams(ctypes.Structure):
    """Root-mean-square norm, with or without a residual."""

    _fields_ = fields(
        "x residual weight sum out", "rows dim x_stride", "dtype weight_dtype", "eps offset"
    )


class RopeParams(ctypes.Structure):
    """Rotary embedding in place."""

    _fields_ = fields(
        "q k cos sin positions",
        "num_tokens num_q_heads num_kv_heads head_dim half max_positions q_stride k_stride",
        "dtype",
    )


class ActParams(ctypes.Structure):
    """Gated activation."""

    _fields_ = fields("gate_up out", "rows dim x_stride", "dtype kind")


class LinearParams(ctypes.Structure):
    """Linear layer."""

    _fields_ = fields(
        "x weight bias out", "rows in_dim out_dim x_stride", "dtype packing code_form wide"
    )


class DigestParams(ctypes.Structure):
    """Digests of blocks."""

    _fields_ = fields("base blocks out", "num_blocks block_stride block_bytes")


class TileParams(ctypes.Structure):
    """Packing weights into tiles, and unpacking rows."""

    _fields_ = fields("weight tiles rows out", "in_dim out_dim num_rows")


class CodedParams(ctypes.Structure):
    """Packing codes of weights, and unpacking rows."""

    _fields_ = fields(
        "codes scales offsets coded rows out", "in_dim out_dim num_rows", "code_form reserved"
    )


class BlockRowsParams(ctypes.Structure):
    """Blocks of all layers of a group, to rows or back."""

    _fields_ = fields(
        "layers blocks rows out", "num_layers num_blocks block_stride layer_bytes", "direction"
    )


class ReadRecordsParams(ctypes.Structure):
    """Neighbouring records of a file, into blocks of all layers of a group."""

    _fields_ = fields(
        "layers blocks buffer heads out",
        "num_layers num_records block_stride layer_bytes offset record_bytes head_bytes "
        "buffer_bytes num_read",
        "fd error",
    )


class QuantiseParams(ctypes.Structure):
    """Layers of vectors, to or from a copy at one byte a number."""

    _fields_ = fields("payload copy", "num_layers vectors dim copy_bytes", "dtype kind back")


class LayerMatrix(ctypes.Structure):
    """One matrix of a layer."""

    _fields_ = fields("weight bias", "in_dim out_dim", "packing code_form")


class LayerWeights(ctypes.Structure):
    """One layer of a dense decoder."""

    _fields_ = [
        *((name, LayerMatrix) for name in ("qkv", "output", "gate_up", "down")),
        *fields(
            "input_norm q_norm k_norm attention_norm mlp_norm output_norm sinks cos sin",
            "half max_positions",
        ),
    ]


class LayerPool(ctypes.Structure):
    """Where a layer's keys and values lie."""

    _fields_ = fields("kv", "num_blocks kv_stride", "group writes")


class LayersParams(ctypes.Structure):
    """Some layers of a dense decoder in one step."""

    _fields_ = fields(
        "layers pools plans final_norm positions residual out arena",
        "num_layers num_tokens hidden inner num_q_heads num_kv_heads head_dim failed_layer",
        "dtype activation",
        "eps offset",
    )


STRUCTS: tuple[type[ctypes.Structure], ...] = (
    AttentionParams,
    NormParams,
    RopeParams,
    ActParams,
    LinearParams,
    DigestParams,
    TileParams,
    BlockRowsParams,
    QuantiseParams,
    CodedParams,
    LayerWeights,
    LayerPool,
    LayersParams,
    ReadRecordsParams,
)
