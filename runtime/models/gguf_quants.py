"""GGUF storage types to codes and float32, vectorised over blocks, bit-equal to the `gguf` package.

Layouts (from the GGML sources; d, m: float16 scale and minimum, q: packed weights):

    Q8_0  d | q i8[32]                         x = d*q
    Q4_0  d | q u4[32]                         x = d*(q-8)           low nibbles first, then high
    Q4_1  d m | q u4[32]                       x = d*q + m
    Q5_0  d | h bit[32] | q u4[32]             x = d*(q+16h-16)
    Q5_1  d m | h bit[32] | q u4[32]           x = d*(q+16h) + m
    Q4_K  d m | s u6[8] t u6[8] | q u4[256]    x = d*s*q - m*t       8 sub-blocks of 32
    Q5_K  d m | s t | h bit[256] | q u4[256]   x = d*s*(q+16h) - m*t
    Q6_K  q u4[256] | h u2[256] | s i8[16] | d x = d*s*(q+4h-32)     16 sub-blocks of 16

All of them are x = scale * code + offset, with one scale and one offset for each sub-block.

This module does not know tensors or files: it maps bytes to numbers.

Shapes: N blocks, S sub-blocks of a block, W weights of a sub-block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from statewise.runtime.models.gguf_file import QuantType

Bytes = NDArray[np.uint8]
Int8 = NDArray[np.int8]
Float32 = NDArray[np.float32]

BIT_SHIFTS = np.arange(32, dtype=np.uint32)
NIBBLES = np.array([0, 4], dtype=np.uint8)
PAIRS = np.array([0, 2, 4, 6], dtype=np.uint8)
BITS = np.arange(8, dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class CodedBlocks:
    """Weights of N blocks: scales * codes (+ offsets)."""

    codes: Int8  # [N, S, W]
    scales: Float32  # [N, S, 1]
    offsets: Float32 | None = None  # [N, S, 1]


def dequantise(data: Bytes, quant: QuantType) -> Float32:
    """Weights of whole blocks of bytes [N * block_bytes] -> [N * block_size] float32."""
    if quant.name in PLAIN:
        return PLAIN[quant.name](data)
    with np.errstate(invalid="ignore", over="ignore"):  # a corrupt scale is a NaN, not a warning
        blocks = coded_blocks(data, quant)
        weights = blocks.scales * blocks.codes
        if blocks.offsets is not None:
            weights += blocks.offsets
    return weights.reshape(-1)


def has_codes(quant: QuantType) -> bool:
    """Whether the type stores weights as codes."""
    return quant.name in BLOCKS


def coded_blocks(data: Bytes, quant: QuantType) -> CodedBlocks:
    """What whole blocks of bytes [N * block_bytes] hold, for types that have codes."""
    return BLOCKS[quant.name](data.reshape(-1, quant.block_bytes))


def _half(blocks: Bytes, at: int) -> Float32:
    """[N, 1, 1] float16 at byte `at` of each block."""
    column = np.ascontiguousarray(blocks[:, at : at + 2])
    return column.view(np.float16).astype(np.float32)[:, :, None]


def _nibbles(packed: Bytes) -> Bytes:
    """[N, 16] bytes -> [N, 32]: all low nibbles, then all high ones."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1)


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """[N, 32] bits of the u32 at byte `at`, shifted to bit 4."""
    word = np.ascontiguousarray(blocks[:, at : at + 4]).view("<u4")
    return (((word >> BIT_SHIFTS) & 1) << 4).astype(np.uint8)


def _bf16(data: Bytes) -> Float32:
    return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _signed(codes: Bytes, zero: int = 0) -> Int8:
    """[N, 1, W] codes less their zero."""
    return codes.view(np.int8)[:, None] - np.int8(zero)


def _q8_0(blocks: Bytes) -> CodedBlocks:
    return CodedBlocks(_signed(blocks[:, 2:]), _half(blocks, 0))


def _q4_0(blocks: Bytes) -> CodedBlocks:
    return CodedBlocks(_signed(_nibbles(blocks[:, 2:]), 8), _half(blocks, 0))


def _q4_1(blocks: Bytes) -> CodedBlocks:
    return CodedBlocks(_signed(_nibbles(blocks[:, 4:])), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Bytes) -> CodedBlocks:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return CodedBlocks(_signed(codes, 16), _half(blocks, 0))


def _q5_1(blocks: Bytes) -> CodedBlocks:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return CodedBlocks(_signed(codes), _half(blocks, 0), _half(blocks, 2))


def _sub_scales(blocks: Bytes) -> tuple[Float32, Float32]:
    """Scales d*s and minima m*t of the 8 sub-blocks, [N, 8, 1] each.

    Twelve bytes hold both: bytes 0-3 s and 4-7 t of the first four, whose upper two bits belong to
    the last four; bytes 8-11 the lower nibbles of s and t of the last four.
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 0x3F, (third & 0x0F) | ((first >> 2) & 0x30)], axis=1)
    minima = np.concatenate([second & 0x3F, (third >> 4) | ((second >> 2) & 0x30)], axis=1)
    return _half(blocks, 0) * scales[:, :, None], _half(blocks, 2) * minima[:, :, None]


def _k_nibbles(packed: Bytes) -> Bytes:
    """[N, 128] bytes -> [N, 8, 32]: each run of 32 bytes holds two sub-blocks."""
    runs = packed.reshape(-1, 4, 1, 32)
    nibbles: Bytes = (runs >> NIBBLES[:, None]) & np.uint8(0x0F)
    return nibbles.reshape(-1, 8, 32)


def _q4_k(blocks: Bytes) -> CodedBlocks:
    scales, minima = _sub_scales(blocks)
    return CodedBlocks(_k_nibbles(blocks[:, 16:]).view(np.int8), scales, -minima)


def _q5_k(blocks: Bytes) -> CodedBlocks:
    scales, minima = _sub_scales(blocks)
    high = (blocks[:, 16:48].reshape(-1, 1, 32) >> BITS[:, None]) & 1
    codes = _k_nibbles(blocks[:, 48:]) | (high << 4)
    return CodedBlocks(codes.view(np.int8), scales, -minima)


def _q6_k(blocks: Bytes) -> CodedBlocks:
    low = (blocks[:, :128].reshape(-1, 2, 1, 64) >> NIBBLES[:, None]) & 0x0F
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> PAIRS[:, None]) & 0x03
    weights = low.reshape(-1, 16, 16) | (high.reshape(-1, 16, 16) << 4)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)[:, :, None] * _half(blocks, 208)
    return CodedBlocks(weights.astype(np.int8) - np.int8(32), scales)


PLAIN: dict[str, Callable[[Bytes], Float32]] = {
    "F32": lambda data: data.view("<f4"),
    "F16": lambda data: data.view("<f2").astype(np.float32),
    "BF16": _bf16,
}
BLOCKS: dict[str, Callable[[Bytes], CodedBlocks]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
