"""Tensors of hybrid checkpoints: several dialects of names, plain, e4m3 or four-bit matrices.

A matrix with scales beside it is dequantised while it is read: e4m3 under scales of 128 x 128
blocks, or four-bit pairs (mxfp4) under scales of 32 input channels. Experts come one by one or
stacked, and are handed over one by one.

    matrix      scales (published DeepSeek-V4, DeepSeek-V3.2)
    N.weight    N.scale, N.weight_scale_inv

This module does not know which tensors a model needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from statewise.kernels.interface import Ops
from statewise.runtime.models.moe import Activation, Experts
from statewise.runtime.models.mxfp4 import BLOCK, dequantise_mxfp4
from statewise.runtime.models.weights import WeightReader

FP8_BLOCK = 128
SCALE_SUFFIXES = (".scale", ".weight_scale_inv")
GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")


class CheckpointWeights:
    """A reader that takes the names that `rename` gives to the checkpoint's own."""

    def __init__(self, reader: WeightReader, rename: Callable[[str], str] = str) -> None:
        self.reader = reader
        self.rename = rename
        self._names = {rename(name): name for name in reader.names()}

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds the tensor."""
        return name in self._names

    def tensor(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor in the model's dtype or in `dtype`; ModelLoadError if it does not fit."""
        if name.endswith(".weight"):
            for suffix in SCALE_SUFFIXES:
                scale = self._names.get(name.removesuffix(".weight") + suffix)
                if scale is not None:
                    return self._dequantised(name, scale, shape, dtype or self.reader.dtype)
        return self.reader.tensor(self._names.get(name, name), shape, dtype)

    def wide(self, name: str, shape: Sequence[int]) -> Tensor:
        """Return a tensor that must not be rounded: float32 at least."""
        return self.tensor(name, shape, self.reader.wide_dtype)

    def gated(
        self, prefix: str, inner: int, hidden: int, parts: Sequence[str] = GATE_UP_DOWN
    ) -> tuple[Tensor, Tensor]:
        """(gate_up [2I, d], down [d, I]) of one gated MLP."""
        gate, up = (self.tensor(f"{prefix}.{p}.weight", [inner, hidden]) for p in parts[:2])
        return torch.cat([gate, up]), self.tensor(f"{prefix}.{parts[2]}.weight", [hidden, inner])

    def experts(
        self,
        ops: Ops,
        prefix: str,
        sizes: tuple[int, int, int],
        activation: Activation,
        parts: Sequence[str] = GATE_UP_DOWN,
    ) -> Experts:
        """Routed experts of one layer; `sizes` are their number, I and d."""
        count, inner, hidden = sizes
        stacked = f"{prefix}.gate_up_proj"
        if stacked in self._names:
            gate_up = list(self.tensor(stacked, [count, 2 * inner, hidden]))
            down = list(self.tensor(f"{prefix}.down_proj", [count, hidden, inner]))
            return Experts(ops, gate_up, down, activation)
        pairs = [self.gated(f"{prefix}.{e}", inner, hidden, parts) for e in range(count)]
        return Experts(ops, [g for g, _ in pairs], [d for _, d in pairs], activation)

    def finish(self, is_unused: Callable[[str], bool]) -> str:
        """Check that only unused tensors are left over; fingerprint of the weights, as hex."""
        return self.reader.finish(
            lambda name: name.endswith("rotary_emb.inv_freq") or is_unused(self.rename(name))
        )

    def _dequantised(
        self, name: str, scale: str, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        rows, columns = shape
        own = self._names.get(name, name)
        if self.has(name) and self.reader.shape(own) == (rows, columns // 2):
            packed = self.reader.tensor(own, [rows, columns // 2], torch.int8).view(torch.uint8)
            scales = self.reader.tensor(scale, [rows, columns // BLOCK], torch.float8_e8m0fnu)
            return dequantise_mxfp4(packed, scales.view(torch.uint8), dtype)
        blocks = [-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)]
        values = self.reader.tensor(own, shape, torch.float32)
        scales = self.reader.tensor(scale, blocks, torch.float32)
        wide = scales.repeat_interleave(FP8_BLOCK, 0)[:rows]
        return (values * wide.repeat_interleave(FP8_BLOCK, 1)[:, :columns]).to(dtype)
