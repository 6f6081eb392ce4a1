"""Native recurrent layers, gated window sums and doubly stochastic matrices, for float32.

The delta rule runs token by token over columns of the state that stay in the cache: how a row is
cut into steps changes no bit. What the library does not take goes to the reference.

This module does not load or build the library (`native` does).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from statewise.kernels import abi, native
from statewise.kernels.recurrent_reference import unit
from statewise.kernels.reference import TorchOps
from statewise.kernels.sparse_abi import ConvParams, DeltaParams, SinkhornParams, WindowsParams


class CpuRecurrentOps(TorchOps):
    """The part of `Ops` that hybrid layers add, on the native library."""

    def pool_windows(self, values: Tensor, gates: Tensor) -> Tensor:
        """Sum of values under a softmax of gates over dimension 1."""
        if values.dtype != torch.float32 or gates.dtype != torch.float32:
            return super().pool_windows(values, gates)
        values, gates = values.contiguous(), gates.contiguous()
        rows, size, dim = values.shape
        out = torch.empty(rows, dim)
        p = WindowsParams()
        p.values, p.gates, p.out = values.data_ptr(), gates.data_ptr(), out.data_ptr()
        p.rows, p.size, p.dim = rows, size, dim
        native.load_library().sw_pool_windows(ctypes.addressof(p))
        return out

    def causal_conv(
        self, x: Tensor, states: Tensor, weight: Tensor, starts: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Depthwise convolution behind the tokens in `states`; see `Ops`."""
        if states.dtype != torch.float32 or weight.dtype != torch.float32:
            return super().causal_conv(x, states, weight, starts)
        wide, states = x.to(torch.float32).contiguous(), states.contiguous()
        columns, begins = weight.T.contiguous(), torch.tensor(starts)
        out, kept = torch.empty_like(wide), torch.empty_like(states)
        p = ConvParams()
        p.x, p.states, p.weight = wide.data_ptr(), states.data_ptr(), columns.data_ptr()
        p.out, p.kept, p.starts = out.data_ptr(), kept.data_ptr(), begins.data_ptr()
        p.num_rows, p.channels, p.size = states.shape[0], wide.shape[1], weight.shape[1]
        native.load_library().sw_causal_conv(ctypes.addressof(p))
        return out.to(x.dtype), kept

    def delta_rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        beta: Tensor,
        states: Tensor,
        rows: tuple[Sequence[int], Sequence[int]],
    ) -> tuple[Tensor, Tensor]:
        """Gated delta rule over each row's tokens; see `Ops`."""
        if states.dtype != torch.float32:
            return super().delta_rule(q, k, v, decay, beta, states, rows)
        scale = q.shape[-1] ** -0.5
        parts = [unit(q.to(torch.float32)) * scale, unit(k.to(torch.float32)), v, decay.exp(), beta]
        parts = [part.to(torch.float32).contiguous() for part in parts]
        states, starts = states.clone(memory_format=torch.contiguous_format), torch.tensor(rows[0])
        out = torch.empty(v.shape, dtype=torch.float32)
        p = DeltaParams()
        p.q, p.k, p.v, p.decay, p.beta = (part.data_ptr() for part in parts)
        p.states, p.out, p.starts = states.data_ptr(), out.data_ptr(), starts.data_ptr()
        p.num_rows, p.num_heads, p.key_dim, p.value_dim = states.shape
        if native.load_library().sw_delta_rule(ctypes.addressof(p)) == abi.NO_MEMORY:
            raise MemoryError("the native delta rule could not allocate its workspace")
        return out.to(v.dtype), states

    def sinkhorn(self, raw: Tensor, iterations: int, eps: float) -> Tensor:
        """Doubly stochastic matrices; see `Ops`."""
        if raw.dtype != torch.float32:
            return super().sinkhorn(raw, iterations, eps)
        raw = raw.contiguous()
        out = torch.empty_like(raw)
        p = SinkhornParams()
        p.x, p.out = raw.data_ptr(), out.data_ptr()
        p.rows, p.n, p.iterations, p.eps = raw.shape[0], raw.shape[1], iterations, eps
        native.load_library().sw_sinkhorn(ctypes.addressof(p))
        return out
