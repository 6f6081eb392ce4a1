"""DeepSeek-V4's compressors: one entry for a window of tokens, a gated sum channel by channel.

    entry_i = rope(norm( sum_j softmax_j(gate_j + bias_j) * kv_j ), position of the window's start)

    dense       j runs over the window
    overlapping j runs over the window before ("a" half of each row) and the window ("b" half)

A token's raw row holds kv and gate of every compressor that shares a TAIL group, "a" halves first,
so that the halo of the window before is the first part of a row. One linear layer makes the row.

Every entry is computed from the same rows in the same order, however the tokens arrive in steps.
Source: the DeepSeek-V4 report, sections 2.3.1 and 2.3.2.

Shapes: T tokens, N windows, M ratio, D entry dim, w numbers of a raw row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from statewise.runtime.models.base import TailWindows
from statewise.runtime.models.parts import RmsNorm, Rope, rope_first


@dataclass(frozen=True)
class CompressorWeights:
    """Weights of one compressor, channels in published order; a half is one `dim` of rows.

    kv and gate are [halves * D, d], bias [M, halves * D], norm [D].
    """

    kv: Tensor
    gate: Tensor
    bias: Tensor
    norm: RmsNorm
    dim: int
    rope_dim: int

    def half(self, matrix: Tensor, which: int, dim: int) -> Tensor:
        """Channels of one half, rotary ones first."""
        part = matrix.narrow(dim, which * self.dim, self.dim)
        return rope_first(part, self.dim, self.rope_dim, dim)


class Compressor:
    """Makes entries of completed windows; `offsets` say where its parts lie in a raw row."""

    def __init__(self, weights: CompressorWeights, offsets: list[tuple[int, int]]) -> None:
        self.dim, self.norm = weights.dim, weights.norm
        self.offsets = offsets  # (kv, gate) of each half
        self.biases = [weights.half(weights.bias, h, 1) for h in range(len(offsets))]

    def entries(self, windows: TailWindows, rope: Rope) -> Tensor:
        """[N, D] entries of the windows."""
        values, gates = self._half(windows.current, -1)
        if len(self.offsets) == 2:
            before, before_gates = self._half(windows.previous, 0)
            exists = windows.has_previous.view(-1, 1, 1)
            gates = torch.cat([before_gates.masked_fill(~exists, float("-inf")), gates], 1)
            values = torch.cat([before.masked_fill(~exists, 0.0), values], 1)
        entries = self.norm(rope.ops.pool_windows(values, gates))
        rope.rotate(windows.starts, entries.unsqueeze(1))
        return entries

    def _half(self, rows: Tensor, which: int) -> tuple[Tensor, Tensor]:
        kv, gate = self.offsets[which]
        values = rows[..., kv : kv + self.dim]
        return values, rows[..., gate : gate + self.dim] + self.biases[which]


def combine(compressors: list[CompressorWeights]) -> tuple[Tensor, int, list[Compressor]]:
    """Lay out raw rows: ([w, d] projection of a token to its row, halo width, compressors).

    All compressors have one or all have two halves.
    """
    halves = compressors[0].kv.shape[0] // compressors[0].dim
    rows: list[Tensor] = []
    offsets: list[list[tuple[int, int]]] = [[] for _ in compressors]
    at = halo = 0
    for half in range(halves):
        if half:
            halo = at
        for weights, places in zip(compressors, offsets, strict=True):
            places.append((at, at + weights.dim))
            rows += [weights.half(weights.kv, half, 0), weights.half(weights.gate, half, 0)]
            at += 2 * weights.dim
    parts = [Compressor(w, o) for w, o in zip(compressors, offsets, strict=True)]
    return torch.cat(rows), halo, parts
