"""The native CPU backend: the library's operations behind the kernels' interface.

A plan fills one parameter struct with everything constant over the layers of a group; each layer
then sets a few pointers and calls. Tensors that the kernels do not take (float64, strides they
cannot walk) are copied into ones that they do, or go to the torch operations: nothing is refused
that the reference accepts, except pools of other dtypes.

Results of a row are bitwise the same in any batch, however its context is cut into steps, and on
any number of threads. They may differ between instruction sets.

This module does not load or build the library (`native` does), or choose when it is used.

Shapes: T packed tokens, R rows, Hq/Hkv heads, D head dim, P page size, B blocks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from statewise.kernels import abi, native
from statewise.kernels.coded import CodedWeight, Codes, fits_codes, pack_codes
from statewise.kernels.cpu_plan import CpuPlan, check_pool, make_plan, raise_for
from statewise.kernels.huge_pages import HugePages
from statewise.kernels.interface import (
    AttentionGeometry,
    BatchLayout,
    LayerStack,
    LayerWeights,
    StackShape,
)
from statewise.kernels.layer_stack import CpuLayerStack, fits_stack, weight_fields
from statewise.kernels.layout import block_layout_id, block_shape
from statewise.kernels.packed import TileWeight, fits_tiles, pack_tiles
from statewise.kernels.recurrent_cpu import CpuRecurrentOps

MIN_PACKED_BYTES = 1 << 16  # smaller weights stay in cache and where they are


def _token_rows(x: Tensor) -> Tensor:
    """Return x [T, H, D] such that one token's [H, D] is contiguous (copied only if not)."""
    if x.stride(2) == 1 and x.stride(1) == x.shape[2]:
        return x
    return x.contiguous()


class CpuAttention:
    """Paged attention in the native library."""

    name = "cpu"

    def __init__(self) -> None:
        library = native.load_library()
        self._attention = library.sw_attention
        self._append = library.sw_append

    def layout_id(self, geometry: AttentionGeometry) -> str:
        """Word for [2, Hkv, P, D] blocks of the geometry's dtype (the torch backend's too)."""
        return block_layout_id(geometry)

    def block_alignment(self, geometry: AttentionGeometry) -> int:
        """The size of one number: wider loads are unaligned ones."""
        return geometry.dtype.itemsize

    def pool_shape(self, geometry: AttentionGeometry, num_blocks: int) -> tuple[int, ...]:
        """[B, 2, Hkv, P, D]."""
        return (num_blocks, *block_shape(geometry))

    def plan(self, geometry: AttentionGeometry, layout: BatchLayout) -> CpuPlan:
        """Check the layout and fill the parameters; ValueError if either is malformed."""
        return make_plan(geometry, layout)

    def _set_pool(self, plan: CpuPlan, kv: Tensor) -> None:
        check_pool(plan, kv)
        plan.params.kv = kv.data_ptr()
        plan.params.num_blocks = kv.shape[0]
        plan.params.kv_stride = kv.stride(0)

    def append(self, plan: CpuPlan, kv: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k, v [T, Hkv, D] to their slots in `kv`; IndexError for a bad block."""
        self._set_pool(plan, kv)
        if k.dtype not in abi.DTYPE_CODES or k.dtype != v.dtype:
            k, v = k.to(kv.dtype), v.to(kv.dtype)
        k, v = _token_rows(k), _token_rows(v)
        params = plan.params
        params.k, params.v = k.data_ptr(), v.data_ptr()
        params.k_stride, params.v_stride = k.stride(0), v.stride(0)
        params.new_dtype = abi.DTYPE_CODES[k.dtype]
        status = self._append(plan.address)
        if status:
            raise_for(status, params)

    def run(self, plan: CpuPlan, q: Tensor, kv: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Attend q [T, Hq, D] -> [T, Hq, D] in q's dtype; IndexError for a bad block."""
        self._set_pool(plan, kv)
        if q.dtype not in abi.DTYPE_CODES:
            return self.run(plan, q.float(), kv, sinks).to(q.dtype)
        q = _token_rows(q)
        out = _empty_like(q)
        params = plan.params
        params.q, params.out, params.q_stride = q.data_ptr(), out.data_ptr(), q.stride(0)
        params.q_dtype = abi.DTYPE_CODES[q.dtype]
        if sinks is not None and plan.geometry.has_sinks:
            sinks = sinks.to(torch.float32).contiguous()
            params.sinks = sinks.data_ptr()
        else:
            params.sinks = None
        status = self._attention(plan.address)
        if status:
            raise_for(status, params)
        return out


class CpuOps(CpuRecurrentOps):
    """The small operations in the native library; what it does not take goes to torch."""

    name = "cpu"

    def __init__(self) -> None:
        library = native.load_library()
        self._rms_norm = library.sw_rms_norm
        self._rope = library.sw_rope
        self._gated_act = library.sw_gated_act
        self._linear = library.sw_linear
        self._pages = HugePages()
        self._has_tiles = native.instruction_set() == "amx"

    @property
    def packed_bytes(self) -> int:
        """Bytes of the weights on huge pages."""
        return self._pages.placed_bytes

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """Return x * rsqrt(mean(x^2, -1) + eps) * (offset + weight)."""
        if x.dtype not in abi.DTYPE_CODES or weight.dtype not in abi.DTYPE_CODES:
            return super().rms_norm(x, weight, eps, offset)
        rows, stride = _flat_rows(x)
        if stride < 0:
            x = x.contiguous()
            rows, stride = _flat_rows(x)
        out = _empty_like(x)
        p = _norm_params(x, weight, out, rows, stride)
        p.eps, p.offset = eps, offset
        self._rms_norm(ctypes.addressof(p))
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Return (norm of the sum, the sum rounded to x's dtype)."""
        if x.dtype not in abi.DTYPE_CODES or residual.dtype != x.dtype:
            return super().add_rms_norm(x, residual, weight, eps, offset)
        if weight.dtype not in abi.DTYPE_CODES or residual.shape != x.shape:
            return super().add_rms_norm(x, residual, weight, eps, offset)
        x, residual = x.contiguous(), residual.contiguous()
        out, total = torch.empty_like(x), torch.empty_like(x)
        p = _norm_params(x, weight, out, *_flat_rows(x))
        p.residual, p.sum = residual.data_ptr(), total.data_ptr()
        p.eps, p.offset = eps, offset
        self._rms_norm(ctypes.addressof(p))
        return out, total

    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
        """Rotate q and k in place, pairs (i, i + cos.shape[1])."""
        if not _rope_fits(q, k, cos, sin, positions):
            super().rope(q, k, cos, sin, positions)
            return
        p = abi.RopeParams()
        p.q, p.k, p.q_stride, p.k_stride = q.data_ptr(), k.data_ptr(), q.stride(0), k.stride(0)
        p.cos, p.sin, p.positions = cos.data_ptr(), sin.data_ptr(), positions.data_ptr()
        p.num_tokens, p.num_q_heads, p.head_dim = q.shape
        p.num_kv_heads, p.half, p.max_positions = k.shape[1], cos.shape[1], cos.shape[0]
        p.dtype = abi.DTYPE_CODES[q.dtype]
        if self._rope(ctypes.addressof(p)) == abi.BAD_POSITION:
            raise IndexError(f"a position lies outside the rotary tables of {cos.shape[0]} rows")

    def gated_act(self, gate_up: Tensor, kind: str) -> Tensor:
        """Return act(gate) * up; ValueError for an unknown kind."""
        code = abi.ACTIVATION_CODES.get(kind)
        if code is None or gate_up.dtype not in abi.DTYPE_CODES:
            return super().gated_act(gate_up, kind)
        rows, stride = _flat_rows(gate_up)
        if stride < 0:
            gate_up = gate_up.contiguous()
            rows, stride = _flat_rows(gate_up)
        dim = gate_up.shape[-1] // 2
        out = torch.empty(*gate_up.shape[:-1], dim, dtype=gate_up.dtype)
        p = abi.ActParams()
        p.gate_up, p.out = gate_up.data_ptr(), out.data_ptr()
        p.rows, p.dim, p.x_stride = rows, dim, stride
        p.dtype, p.kind = abi.DTYPE_CODES[gate_up.dtype], code
        self._gated_act(ctypes.addressof(p))
        return out

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        """Return x [..., in] @ weight.T (+ bias); what the library does not take goes to torch.

        The way a product takes depends on the weight alone, never on the number of rows.
        """
        if not _linear_fits(x, weight, bias):
            return super().linear(x, weight, bias)
        return self._multiply(x, weight, bias, x.dtype)

    def logits(self, x: Tensor, weight: Any) -> Tensor:
        """What `linear` returns, in float32: rounded as there, without another pass over it."""
        if not _linear_fits(x, weight, None):
            return super().logits(x, weight)
        return self._multiply(x, weight, None, torch.float32)

    def _multiply(
        self, x: Tensor, weight: Any, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        rows, stride = _flat_rows(x)
        if stride < 0:
            x = x.contiguous()
            rows, stride = _flat_rows(x)
        out = torch.empty(*x.shape[:-1], weight.shape[0], dtype=out_dtype)
        p = abi.LinearParams()
        p.weight, p.packing, p.code_form = weight_fields(weight)
        p.x, p.out = x.data_ptr(), out.data_ptr()
        p.bias = None if bias is None else bias.data_ptr()
        p.rows, p.in_dim, p.out_dim, p.x_stride = rows, x.shape[-1], weight.shape[0], stride
        p.dtype, p.wide = abi.DTYPE_CODES[x.dtype], out_dtype != x.dtype
        status = self._linear(ctypes.addressof(p))
        if status == abi.NO_MEMORY:
            raise MemoryError("native linear layer could not allocate its workspace")
        assert status == abi.OK, f"native linear layer: status {status}"
        return out

    def pack(self, weight: Tensor) -> Any:
        """Return a copy of a large weight on huge pages, as tiles where they serve.

        A small weight is returned as it is.

        A caller that keeps the original as well should keep the result in its place, and take
        rows of it through `rows`.
        """
        if weight.nbytes < MIN_PACKED_BYTES or weight.dtype not in abi.DTYPE_CODES:
            return weight
        if self._has_tiles and fits_tiles(weight):
            return pack_tiles(weight, self._pages)
        return self._pages.copy_of(weight)

    @property
    def keeps_codes(self) -> bool:
        """Whether there are tile registers."""
        return self._has_tiles

    def pack_codes(self, codes: Codes) -> CodedWeight | None:
        """Keep codes in place of tiles, on huge pages; None where `pack` would not make tiles."""
        is_small = codes.codes.size * torch.bfloat16.itemsize < MIN_PACKED_BYTES
        if is_small or not self._has_tiles or not fits_codes(codes):
            return None
        return pack_codes(codes, self._pages)

    def stack(
        self, shape: StackShape, layers: Sequence[LayerWeights], final_norm: Tensor
    ) -> LayerStack | None:
        """The layers as one native call; None for weights that single operations give to torch."""
        if not fits_stack(shape, layers, final_norm):
            return None
        return CpuLayerStack(shape, layers, final_norm)

    def rows(self, weight: Any, indices: Tensor) -> Tensor:
        """Return rows [n] of a weight or of what `pack` returned."""
        if isinstance(weight, TileWeight | CodedWeight):
            return weight.rows(indices)
        rows: Tensor = weight[indices]
        return rows


def _empty_like(x: Tensor) -> Tensor:
    """Return an uninitialised contiguous tensor (the quick way where x is contiguous itself)."""
    if x.is_contiguous():
        return torch.empty_like(x)
    return torch.empty(x.shape, dtype=x.dtype)


def _flat_rows(x: Tensor) -> tuple[int, int]:
    """(rows, row stride in elements) of x [..., d] seen as rows; stride -1 if it is not that."""
    dim = x.shape[-1]
    if x.is_contiguous():
        return (x.numel() // dim if dim else 0), dim
    if x.dim() == 2 and x.stride(1) == 1:
        return x.shape[0], x.stride(0)
    return x.numel() // dim, -1


def _norm_params(x: Tensor, weight: Tensor, out: Tensor, rows: int, stride: int) -> abi.NormParams:
    p = abi.NormParams()
    p.x, p.weight, p.out = x.data_ptr(), weight.data_ptr(), out.data_ptr()
    p.rows, p.dim, p.x_stride = rows, x.shape[-1], stride
    p.dtype, p.weight_dtype = abi.DTYPE_CODES[x.dtype], abi.DTYPE_CODES[weight.dtype]
    return p


def _rope_fits(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> bool:
    tables = cos.dtype == sin.dtype == torch.float32 and positions.dtype == torch.int64
    plain = cos.is_contiguous() and sin.is_contiguous() and positions.is_contiguous()
    dtypes = q.dtype == k.dtype and q.dtype in abi.DTYPE_CODES
    walkable = all(x.stride(2) == 1 and x.stride(1) == x.shape[2] for x in (q, k))
    return tables and plain and dtypes and walkable


def _linear_fits(x: Tensor, weight: Any, bias: Tensor | None) -> bool:
    if x.dtype not in abi.DTYPE_CODES or (bias is not None and bias.dtype != x.dtype):
        return False
    if weight.shape[-1] != x.shape[-1]:
        raise ValueError(f"a weight {list(weight.shape)} does not take rows {list(x.shape)}")
    if isinstance(weight, TileWeight | CodedWeight):
        return x.dtype == torch.bfloat16
    return bool(weight.dtype == x.dtype and weight.is_contiguous() and weight.dim() == 2)
