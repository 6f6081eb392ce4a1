"""Routed experts: each token goes through a few of many small MLPs, weighted.

    out[t] = sum over chosen experts e of  weight[t, e] * down_e(act(gate_up_e(x[t])))

Tokens are grouped by expert, so that each expert's matrices are read once however many tokens
chose it. Contributions are added in ascending order of experts, whatever else is in the batch.
How experts are chosen is the architecture's business: a router hands over `chosen` and `weights`.

This module does not read weights from files.

Shapes: T tokens, d hidden, I intermediate, E experts, k chosen experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from statewise.kernels.interface import Ops

Activation = Callable[[Tensor], Tensor]  # [n, 2I] = (gate | up) -> [n, I]


class Experts:
    """All routed experts of one layer; gate_up[e] is [2I, d] = (gate | up), down[e] is [d, I]."""

    def __init__(
        self,
        ops: Ops,
        gate_up: Sequence[Tensor],
        down: Sequence[Tensor],
        activation: Activation,
        biases: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.ops = ops
        self.activation = activation
        self.gate_up: list[Any] = [ops.pack(w) for w in gate_up]
        self.down: list[Any] = [ops.pack(w) for w in down]
        self.biases = biases  # [E, 2I] and [E, d]

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return [T, d] for x [T, d], chosen [T, k] int64 and weights [T, k]."""
        out = torch.zeros_like(x)
        for expert, places in _by_expert(chosen):
            tokens = places // chosen.shape[1]
            part = self._expert(expert, x[tokens])
            scale = weights.flatten()[places].unsqueeze(1)
            out.index_add_(0, tokens, (part * scale).to(out.dtype))
        return out

    def _expert(self, expert: int, x: Tensor) -> Tensor:
        up_bias, down_bias = (None, None) if self.biases is None else self.biases
        inner = self.ops.linear(
            x, self.gate_up[expert], None if up_bias is None else up_bias[expert]
        )
        inner = self.activation(inner)
        return self.ops.linear(
            inner, self.down[expert], None if down_bias is None else down_bias[expert]
        )


def _by_expert(chosen: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(expert, places in chosen.flatten()) of each expert that was chosen, ascending."""
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    at = 0
    for expert, count in enumerate(torch.bincount(flat).tolist()):
        if count:
            yield expert, order[at : at + count]
            at += count


def clamped_swiglu(limit: float) -> Activation:
    """silu(min(gate, limit)) * clamp(up, -limit, limit)."""

    def activation(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)

    return activation
