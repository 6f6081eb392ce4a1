"""One step of one group for the native library: its parameter struct, filled once.

Everything constant over the layers of a group is set here; each layer then sets a few pointers.

This module does not call the library.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from torch import Tensor

from statewise.kernels import abi
from statewise.kernels.interface import AttentionGeometry, BatchLayout
from statewise.kernels.layout import block_shape, check_layout


@dataclass(frozen=True)
class CpuPlan:
    """One step of one group; `params` points into the layout's arrays, which it keeps alive."""

    geometry: AttentionGeometry
    layout: BatchLayout
    block_shape: tuple[int, ...]
    params: abi.AttentionParams
    address: int
    kept: tuple[Tensor, ...]


def raise_for(status: int, params: abi.AttentionParams) -> None:
    """Raise what a status of attention or append means."""
    if status == abi.BAD_BLOCK:
        raise IndexError(
            f"page table names block {params.bad_block}, the pool has {params.num_blocks} blocks"
        )
    if status == abi.NO_MEMORY:
        raise MemoryError("native kernels could not allocate their workspace")
    raise ValueError("dtype not supported by the native kernels")


def make_plan(geometry: AttentionGeometry, layout: BatchLayout) -> CpuPlan:
    """Check the layout and fill the parameters; ValueError if either is malformed."""
    check_layout(geometry, layout)
    if geometry.dtype not in abi.DTYPE_CODES:
        raise ValueError(f"native kernels do not take {geometry.dtype} pools; use torch")
    kept = tuple(
        x.contiguous()
        for x in (
            layout.query_starts,
            layout.context_lens,
            layout.context_starts,
            layout.page_table,
            layout.write_mask,
        )
    )
    params = abi.AttentionParams()
    names = ("query_starts", "context_lens", "context_starts", "page_table", "write_mask")
    for name, tensor in zip(names, kept, strict=True):
        setattr(params, name, tensor.data_ptr())
    params.num_rows = layout.context_lens.shape[0]
    params.num_q_heads = geometry.num_q_heads
    params.num_kv_heads = geometry.num_kv_heads
    params.head_dim = geometry.head_dim
    params.page_size = geometry.page_size
    params.table_stride = layout.page_table.shape[1]
    params.window = geometry.window
    params.kv_dtype = abi.DTYPE_CODES[geometry.dtype]
    params.scale = geometry.scale
    params.soft_cap = geometry.soft_cap
    shape, address = block_shape(geometry), ctypes.addressof(params)
    return CpuPlan(geometry, layout, shape, params, address, kept)


def check_pool(plan: CpuPlan, kv: Tensor) -> None:
    """Raise ValueError for a pool [B, 2, Hkv, P, D] that the plan is not for."""
    if kv.dtype != plan.geometry.dtype or kv.shape[1:] != plan.block_shape:
        raise ValueError(f"pool is {list(kv.shape)} {kv.dtype}, the plan is for {plan.geometry}")
    if not (kv.is_contiguous() or kv[0].is_contiguous()):
        raise ValueError("the [2, Hkv, P, D] bytes of a block must be contiguous")
