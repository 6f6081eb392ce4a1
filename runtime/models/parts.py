"""Parts that take tensors: linear layers, norms, rotary tables, token tables.

The hybrid models read their weights under several names and reorder some of them, so their parts
are made of tensors; what reads a checkpoint stands in the model's own file.

Rotary channels are brought to the front of a head, the first half of every pair before the second
(`rope_first`): one reordering of weights while loading, and the plain half-split rotation serves
models that rotate interleaved pairs at the end of a head. Dot products do not notice.

Shapes: T tokens, d hidden, H heads, D head dim, r rotary channels, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from statewise.kernels.interface import Ops
from statewise.runtime.models.config import RopeConfig
from statewise.runtime.models.rope import RopeTable


class Linear:
    """x @ weight.T (+ bias)."""

    def __init__(self, ops: Ops, weight: Tensor, bias: Tensor | None = None) -> None:
        self.ops = ops
        self.weight: Any = ops.pack(weight.contiguous())
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        return self.ops.linear(x, self.weight, self.bias)


class RmsNorm:
    """RMS norm of the last dimension; multiplies by (offset + weight)."""

    def __init__(self, ops: Ops, weight: Tensor, eps: float, offset: float = 0.0) -> None:
        self.ops, self.weight, self.eps, self.offset = ops, weight, eps, offset

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise x [..., width]."""
        return self.ops.rms_norm(x, self.weight, self.eps, self.offset)


def unit_rms(x: Tensor, eps: float) -> Tensor:
    """RMS norm without a weight; computed in float32 at least."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


class Rope:
    """Rotation of the first r channels of heads whose channels are `rope_first`."""

    def __init__(self, ops: Ops, rope: RopeConfig, rope_dim: int, context_len: int) -> None:
        self.ops = ops
        self.table = RopeTable(rope, rope_dim, context_len)

    def fill(self, positions: Tensor) -> None:
        """Make the tables reach the positions."""
        if positions.numel():
            self.table.fill(int(positions.max()) + 1)

    def rotate(self, positions: Tensor, q: Tensor, k: Tensor | None = None) -> None:
        """Rotate q [T, H, D] and k [T, H', D] in place."""
        other = q[:, :0] if k is None else k
        self.ops.rope(q, other, self.table.cos, self.table.sin, positions)

    def rotate_back(self, positions: Tensor, x: Tensor) -> None:
        """Undo `rotate` in place."""
        cos, sin = self.table.cos[positions], -self.table.sin[positions]
        self.ops.rope(x, x[:, :0], cos, sin, torch.arange(len(positions)))


def rope_first(weight: Tensor, head_dim: int, rope_dim: int, dim: int = 0) -> Tensor:
    """Reorder each head's channels along `dim`: from [rest | pairs] to [firsts | seconds | rest].

    `dim` holds whole heads of `head_dim` channels, the last `rope_dim` of which are interleaved
    pairs.
    """
    start = head_dim - rope_dim
    order = [*range(start, head_dim, 2), *range(start + 1, head_dim, 2), *range(start)]
    heads = torch.arange(weight.shape[dim] // head_dim).unsqueeze(1) * head_dim
    return weight.index_select(dim, (heads + torch.tensor(order)).flatten())


class TokenTable:
    """Token embeddings, and logits over the same vocabulary."""

    def __init__(self, ops: Ops, embedding: Tensor, head: Tensor | None) -> None:
        self.ops = ops
        self.head: Any = ops.pack(embedding if head is None else head)
        self.weight: Any = self.head if head is None else embedding  # one copy serves both

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] int64 -> [T, d]."""
        return self.ops.rows(self.weight, token_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, d] -> [N, V] float32 (float64 in a float64 model)."""
        return self.ops.logits(hidden, self.head)
