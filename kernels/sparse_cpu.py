"""Native sparse attention over entries; what the library does not take goes to the reference.

A query's result depends on that query alone: it is bitwise the same in any batch, in any cutting of
a prompt into steps and on any number of threads. Instruction sets may differ in rounding.

This module does not load or build the library (`native` does).

Shapes: T packed tokens, H query heads, D entry dim.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from statewise.kernels import abi, native
from statewise.kernels.layout import entry_pool_shape
from statewise.kernels.sparse_abi import EntryGroup, SelectParams, SparseParams
from statewise.kernels.sparse_reference import EntryPlan, TorchSparse, needs_selection

_NO_GROUP = EntryGroup()


class CpuSparse(TorchSparse):
    """`SparseKernels` on the native library."""

    name = "cpu"

    def __init__(self) -> None:
        library = native.load_library()
        self._attend = library.sw_sparse_attend
        self._select = library.sw_select

    def select(
        self, plan: EntryPlan, pool: Tensor, q: Tensor, weights: Tensor, top_k: int
    ) -> Tensor | None:
        """Choose entries by score; see `SparseKernels`."""
        if not needs_selection(plan, top_k):
            return None
        if not (q.dtype in abi.DTYPE_CODES and pool.dtype in abi.DTYPE_CODES):
            return super().select(plan, pool, q, weights, top_k)
        if q.stride(2) != 1 or q.stride(1) != q.shape[2]:
            q = q.contiguous()
        weights = weights.to(torch.float32).contiguous()
        out = torch.empty(q.shape[0], top_k, dtype=torch.int32)
        p = SelectParams()
        p.entries = _group(plan, pool)
        p.q, p.weights, p.out = q.data_ptr(), weights.data_ptr(), out.data_ptr()
        p.query_starts = plan.layout.query_starts.data_ptr()
        p.context_lens = plan.layout.context_lens.data_ptr()
        p.num_rows, p.num_tokens, p.num_heads = len(plan.rows), q.shape[0], q.shape[1]
        p.q_stride, p.top_k = q.stride(0), top_k
        p.q_dtype, p.kv_dtype = abi.DTYPE_CODES[q.dtype], abi.DTYPE_CODES[pool.dtype]
        _check(self._select(ctypes.addressof(p)), p.bad_block, pool)
        return out

    def attend(
        self,
        q: Tensor,
        window: tuple[EntryPlan, Tensor] | None,
        entries: tuple[EntryPlan, Tensor] | None,
        selected: Tensor | None,
        sinks: Tensor | None,
        *,
        scale: float,
        value_dim: int,
    ) -> Tensor:
        """Attend over window and entries; see `SparseKernels`."""
        parts = [part for part in (window, entries) if part is not None]
        dtypes = {pool.dtype for _, pool in parts}
        if len(dtypes) != 1 or not ({q.dtype} | dtypes) <= set(abi.DTYPE_CODES):
            return super().attend(
                q, window, entries, selected, sinks, scale=scale, value_dim=value_dim
            )
        plan, pool = parts[0]
        q = q.contiguous()
        out = torch.empty(*q.shape[:2], value_dim, dtype=q.dtype)
        p = SparseParams()
        p.window = _NO_GROUP if window is None else _group(*window)
        p.entries = _NO_GROUP if entries is None else _group(*entries)
        p.q, p.out = q.data_ptr(), out.data_ptr()
        if sinks is not None:
            sinks = sinks.to(torch.float32).contiguous()
            p.sinks = sinks.data_ptr()
        if selected is not None:
            selected = selected.contiguous()
            p.selected, p.top_k = selected.data_ptr(), selected.shape[1]
        p.query_starts = plan.layout.query_starts.data_ptr()
        p.context_lens = plan.layout.context_lens.data_ptr()
        p.context_starts = plan.layout.context_starts.data_ptr()
        p.num_rows, (p.num_tokens, p.num_heads, p.dim) = len(plan.rows), q.shape
        p.value_dim, p.scale = value_dim, scale
        p.q_dtype, p.kv_dtype = abi.DTYPE_CODES[q.dtype], abi.DTYPE_CODES[pool.dtype]
        _check(self._attend(ctypes.addressof(p)), p.bad_block, pool)
        return out


def _group(plan: EntryPlan, pool: Tensor) -> EntryGroup:
    geometry, table = plan.geometry, plan.layout.page_table
    if tuple(pool.shape[1:]) != entry_pool_shape(geometry) or not pool[:1].is_contiguous():
        raise ValueError(f"a pool of {list(pool.shape)} does not fit {geometry}")
    g = EntryGroup()
    g.pool, g.page_table = pool.data_ptr(), table.data_ptr()
    g.num_blocks, g.block_stride, g.table_stride = pool.shape[0], pool.stride(0), table.shape[1]
    g.entries_per_page, g.dim = entry_pool_shape(geometry)
    g.ratio, g.window = geometry.ratio, geometry.window
    return g


def _check(status: int, bad_block: int, pool: Tensor) -> None:
    if status == abi.BAD_BLOCK:
        raise IndexError(f"page table names block {bad_block}, the pool has {pool.shape[0]} blocks")
    if status == abi.NO_MEMORY:
        raise MemoryError("native sparse attention could not allocate its workspace")
    assert status == abi.OK, f"native sparse attention: status {status}"
