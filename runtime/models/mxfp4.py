"""Four-bit floats with shared exponents (OCP MX, e2m1 with e8m0 scales) to ordinary floats.

    byte      two values: low nibble first, high nibble second
    nibble    sign, two exponent bits, one mantissa bit: one of 16 values
    block     32 values (16 bytes) share one scale byte s: value * 2^(s - 127)

This module does not multiply anything in four bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32  # values that share a scale
SCALE_BIAS = 127
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantise_mxfp4(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Values [..., 2n] of packed [..., n] uint8 under scales [..., 2n / 32] uint8.

    Raises ValueError where the scales do not fit.
    """
    if packed.shape[-1] * 2 != scales.shape[-1] * BLOCK or packed.shape[:-1] != scales.shape[:-1]:
        raise ValueError(f"scales {list(scales.shape)} do not fit {list(packed.shape)} packed")
    table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=torch.float32)
    out = torch.empty(*packed.shape[:-1], packed.shape[-1] * 2, dtype=dtype)
    out[..., 0::2] = table[(packed & 15).long()].to(dtype)
    out[..., 1::2] = table[(packed >> 4).long()].to(dtype)
    blocks = out.view(*out.shape[:-1], -1, BLOCK)
    blocks *= torch.exp2(scales.to(torch.float32) - SCALE_BIAS).to(dtype).unsqueeze(-1)
    return out
