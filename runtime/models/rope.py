"""Rotary embedding: frequencies of every scaling rule, and tables of cos and sin.

Frequencies and angles are computed in float32 in the order that the published implementations use:
at position 30,000 another order of rounding already turns the angle by 1e-3.

    linear    frequencies / factor
    dynamic   base grown for the longest context ("NTK"); as published it changes with every token
              past the trained length, which would make cached keys depend on who reads them, so the
              base is fixed once, for the context length the model was loaded with
    llama3    long wavelengths / factor, short ones kept, smooth between      (Llama 3.1)
    yarn      ramp between kept and divided frequencies, scaled cos and sin   (arXiv:2309.00071)
    divisors  each frequency / its own divisor (how GGUF files store llama3)

`RopeTable` reserves rows for the whole context and fills them as positions are reached, so a long
context costs no memory before it is used and the tables never move.

Shapes: D head dim, N positions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from statewise.runtime.errors import ModelLoadError
from statewise.runtime.models.config import RopeConfig

FIRST_ROWS = 2048


def inverse_frequencies(rope: RopeConfig, head_dim: int, context_len: int) -> tuple[Tensor, float]:
    """Return ([D/2] float32 radians per token, scale of cos and sin).

    Raises ModelLoadError where divisors do not match the head dimension.
    """
    plain = _plain(rope.theta, head_dim)
    match rope.kind:
        case "default":
            return plain, 1.0
        case "linear":
            return plain / rope.factor, 1.0
        case "dynamic":
            return _plain(_grown_theta(rope, head_dim, context_len), head_dim), 1.0
        case "llama3":
            return _llama3(plain, rope), 1.0
        case "yarn":
            return _yarn(rope, head_dim), _yarn_scale(rope)
        case "divisors":
            if len(rope.divisors) != head_dim // 2:
                raise ModelLoadError(
                    f"{len(rope.divisors)} rope divisors for head dimension {head_dim}"
                )
            return plain / torch.tensor(rope.divisors, dtype=torch.float32), 1.0
        case _:
            raise ModelLoadError(f"rope type {rope.kind!r} is not supported")


def _plain(theta: float, head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return torch.as_tensor(1.0 / (theta**exponents))


def _grown_theta(rope: RopeConfig, head_dim: int, context_len: int) -> float:
    length = max(context_len, rope.original_len)
    growth = rope.factor * length / rope.original_len - (rope.factor - 1)
    return float(rope.theta * growth ** (head_dim / (head_dim - 2)))


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    low_wavelength = rope.original_len / rope.low_freq_factor
    high_wavelength = rope.original_len / rope.high_freq_factor
    wavelength = 2 * math.pi / plain
    scaled = torch.where(wavelength > low_wavelength, plain / rope.factor, plain)
    span = rope.high_freq_factor - rope.low_freq_factor
    smooth = (rope.original_len / wavelength - rope.low_freq_factor) / span
    between = (1 - smooth) * scaled / rope.factor + smooth * scaled
    is_between = ~(wavelength < high_wavelength) & ~(wavelength > low_wavelength)
    return torch.where(is_between, between, scaled)


def _yarn(rope: RopeConfig, head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    periods = torch.as_tensor(rope.theta**exponents)
    low, high = (_yarn_dim(rope, head_dim, beta) for beta in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (rope.factor * periods) * (1 - kept) + 1.0 / periods * kept


def _yarn_dim(rope: RopeConfig, head_dim: int, rotations: float) -> float:
    """Dimension that turns `rotations` times over the original context."""
    turns = math.log(rope.original_len / (rotations * 2 * math.pi))
    return head_dim * turns / (2 * math.log(rope.theta))


def _yarn_scale(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


class RopeTable:
    """cos and sin of every position of one rope: [N, D/2] float32, filled up to `num_filled`."""

    def __init__(self, rope: RopeConfig, head_dim: int, context_len: int) -> None:
        self.frequencies, self.scale = inverse_frequencies(rope, head_dim, context_len)
        self.cos = torch.empty(context_len, head_dim // 2, dtype=torch.float32)
        self.sin = torch.empty_like(self.cos)
        self.num_filled = 0
        self.fill(min(FIRST_ROWS, context_len))

    def fill(self, num_positions: int) -> None:
        """Make rows [0, num_positions) valid; AssertionError beyond the context length."""
        if num_positions <= self.num_filled:
            return
        assert num_positions <= self.cos.shape[0], "position outside the model's context"
        end = min(max(num_positions, 2 * self.num_filled), self.cos.shape[0])
        positions = torch.arange(self.num_filled, end, dtype=torch.float32).unsqueeze(1)
        angles = positions * self.frequencies
        self.cos[self.num_filled : end] = angles.cos() * self.scale
        self.sin[self.num_filled : end] = angles.sin() * self.scale
        self.num_filled = end
