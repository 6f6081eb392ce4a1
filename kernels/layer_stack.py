"""The layers of a dense decoder in one native call: what a step costs is then its arithmetic.

A decoded token passes some ten operations in each layer, most of them of a few microseconds; called
one by one, the interpreter takes longer between them than they do. Weights, norms and tables are
written into one array of structs when the model is loaded, where K/V lie into another while
pools stay; a step sets a few pointers.

The library runs its own single operations one after the other, with the parameters that
`cpu_backend` gives them: results are the same bit for bit, which tests compare.

Long steps keep the way operation by operation: nothing is gained there, and buffers for them would
stay. This module does not compute anything, and does not know in which order a model's parts come
beyond what `LayerWeights` says.

Shapes: T packed tokens, d hidden.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from statewise.kernels import abi, native
from statewise.kernels.coded import CodedWeight
from statewise.kernels.cpu_plan import CpuPlan, check_pool, raise_for
from statewise.kernels.interface import LayerMatrix, LayerPools, LayerWeights, StackShape
from statewise.kernels.packed import TileWeight

MAX_TOKENS = 128  # of a step that takes this way

NORMS = ("input_norm", "mlp_norm", "q_norm", "k_norm", "attention_norm", "output_norm")
MATRICES = ("qkv", "output", "gate_up", "down")


def fits_stack(shape: StackShape, layers: Sequence[LayerWeights], final_norm: Tensor) -> bool:
    """Whether the native call does with these weights what single operations would do."""
    if shape.dtype not in abi.DTYPE_CODES or shape.activation not in abi.ACTIVATION_CODES:
        return False
    if shape.head_dim < 1 or not layers:
        return False
    return _fits(final_norm, shape.dtype) and all(_layer_fits(x, shape) for x in layers)


def _fits(x: Tensor | None, dtype: torch.dtype) -> bool:
    return x is None or (x.dtype == dtype and x.is_contiguous())


def _layer_fits(layer: LayerWeights, shape: StackShape) -> bool:
    tables = (layer.cos, layer.sin, layer.sinks)
    return (
        all(_fits(getattr(layer, name), shape.dtype) for name in NORMS)
        and all(_fits(table, torch.float32) for table in tables)
        and all(
            _matrix_fits(getattr(layer, name), shape.dtype, sizes)
            for name, sizes in _matrix_shapes(shape).items()
        )
    )


def _matrix_shapes(shape: StackShape) -> dict[str, tuple[int, int]]:
    """(out, in) of each matrix of a layer."""
    q_width, kv_width = (n * shape.head_dim for n in (shape.num_q_heads, shape.num_kv_heads))
    return {
        "qkv": (q_width + 2 * kv_width, shape.hidden_size),
        "output": (shape.hidden_size, q_width),
        "gate_up": (2 * shape.intermediate_size, shape.hidden_size),
        "down": (shape.hidden_size, shape.intermediate_size),
    }


def _matrix_fits(matrix: LayerMatrix, dtype: torch.dtype, sizes: tuple[int, int]) -> bool:
    is_packed = isinstance(matrix.weight, TileWeight | CodedWeight)
    weight_fits = dtype == torch.bfloat16 if is_packed else _fits(matrix.weight, dtype)
    return weight_fits and tuple(matrix.weight.shape) == sizes and _fits(matrix.bias, dtype)


def weight_fields(weight: Any) -> tuple[int, int, int]:
    """(address, packing, code form) of a weight or of what `pack` returned."""
    if isinstance(weight, TileWeight):
        return weight.tiles.data_ptr(), abi.TILES, 0
    if isinstance(weight, CodedWeight):
        return weight.coded.data_ptr(), abi.CODED, weight.code_form
    return weight.data_ptr(), abi.ROW_MAJOR, 0


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _matrix_struct(matrix: LayerMatrix) -> abi.LayerMatrix:
    m = abi.LayerMatrix()
    m.weight, m.packing, m.code_form = weight_fields(matrix.weight)
    m.bias = _address(matrix.bias)
    m.out_dim, m.in_dim = matrix.weight.shape
    return m


def _layer_struct(layer: LayerWeights) -> abi.LayerWeights:
    w = abi.LayerWeights()
    for name in MATRICES:
        setattr(w, name, _matrix_struct(getattr(layer, name)))
    for name in (*NORMS, "cos", "sin", "sinks"):
        setattr(w, name, _address(getattr(layer, name)))
    w.max_positions, w.half = layer.cos.shape
    return w


def _pool_structs(pools: LayerPools) -> ctypes.Array[abi.LayerPool]:
    table = (abi.LayerPool * len(pools.tensors))()
    places = zip(table, pools.tensors, pools.groups, pools.writes, strict=True)
    for place, tensor, group, writes in places:
        place.kv, place.num_blocks, place.kv_stride = (
            tensor.data_ptr(),
            tensor.shape[0],
            tensor.stride(0),
        )
        place.group, place.writes = group, writes
    return table


class CpuLayerStack:
    """`LayerStack` in the native library, for weights that `fits_stack`. Not thread safe."""

    def __init__(
        self, shape: StackShape, layers: Sequence[LayerWeights], final_norm: Tensor
    ) -> None:
        library = native.load_library()
        self._run: Callable[[int], int] = library.sw_layers
        self._arena_bytes: Callable[[int], int] = library.sw_layers_arena
        self._weights = (tuple(layers), final_norm)  # alive as long as their addresses are kept
        self._layers = (abi.LayerWeights * len(layers))(*map(_layer_struct, layers))
        self._final_norm = final_norm.data_ptr()
        self._dtype, self._width = shape.dtype, shape.hidden_size
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._arena_tokens = 0
        self._pools: LayerPools | None = None
        self._checked_groups: set[int] = set()
        self._pool_table = (abi.LayerPool * 0)()
        self._params = self._fixed_params(shape)
        self._address = ctypes.addressof(self._params)

    def _fixed_params(self, shape: StackShape) -> abi.LayersParams:
        p = abi.LayersParams()
        p.layers = ctypes.addressof(self._layers)
        p.hidden, p.inner = shape.hidden_size, shape.intermediate_size
        p.num_q_heads, p.num_kv_heads = shape.num_q_heads, shape.num_kv_heads
        p.head_dim, p.dtype = shape.head_dim, abi.DTYPE_CODES[shape.dtype]
        p.activation = abi.ACTIVATION_CODES[shape.activation]
        p.eps, p.offset = shape.norm_eps, shape.norm_offset
        return p

    def takes(self, hidden: Tensor, plans: Sequence[Any]) -> bool:
        """Whether the step is short, and planned by the CPU backend."""
        return (
            0 < hidden.shape[0] <= MAX_TOKENS
            and hidden.dtype == self._dtype
            and all(plan is None or isinstance(plan, CpuPlan) for plan in plans)
        )

    def run(
        self,
        hidden: Tensor,
        positions: Tensor,
        pools: LayerPools,
        plans: Sequence[Any],
        num_layers: int,
    ) -> tuple[Tensor, Tensor]:
        """Run the first `num_layers` (at least 1); IndexError for a bad block or position."""
        residual, positions = hidden.contiguous(), positions.contiguous()
        out = torch.empty_like(residual)
        self._set_pools(pools, plans)
        self._reserve(residual.shape[0])
        addresses = (ctypes.c_void_p * len(plans))(*(plan and plan.address for plan in plans))
        p = self._params
        p.plans, p.positions = ctypes.addressof(addresses), positions.data_ptr()
        p.residual, p.out = residual.data_ptr(), out.data_ptr()
        p.num_layers, p.num_tokens = num_layers, residual.shape[0]
        p.final_norm = self._final_norm if num_layers == len(self._layers) else None
        status = self._run(self._address)
        if status:
            self._raise(status, pools, plans)
        return out, residual

    def _reserve(self, num_tokens: int) -> None:
        if num_tokens > self._arena_tokens:
            self._params.num_tokens = self._arena_tokens = num_tokens
            self._arena = torch.empty(self._arena_bytes(self._address) + 64, dtype=torch.uint8)
            self._params.arena = self._arena.data_ptr() + -self._arena.data_ptr() % 64

    def _set_pools(self, pools: LayerPools, plans: Sequence[Any]) -> None:
        if pools is not self._pools:
            self._pool_table = _pool_structs(pools)
            self._params.pools = ctypes.addressof(self._pool_table)
            self._pools = pools
            self._checked_groups = set()
        for group, plan in enumerate(plans):
            if plan is not None and group not in self._checked_groups:
                self._check_group(group, plan, pools)

    def _check_group(self, group: int, plan: CpuPlan, pools: LayerPools) -> None:
        """Once for each group of pools: its geometry is the same in all steps."""
        for tensor, of in zip(pools.tensors, pools.groups, strict=True):
            if of == group:
                check_pool(plan, tensor)
        self._checked_groups.add(group)

    def _raise(self, status: int, pools: LayerPools, plans: Sequence[Any]) -> None:
        layer = self._params.failed_layer
        if status == abi.BAD_POSITION:
            rows = self._layers[layer].max_positions
            raise IndexError(f"a position lies outside the rotary tables of {rows} rows")
        raise_for(status, plans[pools.groups[layer]].params)
