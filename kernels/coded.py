"""Weights kept as the codes of a quantised file: less memory to read, the same numbers.

    w[out, in] = bfloat16(scale[out, in / g] * code[out, in] + offset[out, in / g])     g: 16 or 32

The native product turns codes into the very bfloat16 numbers that a dequantised matrix holds, in
registers, and multiplies those in the same order: a coded weight gives bit for bit what its
dequantised one gives (but that a zero may lose its sign, which no sum can show).

Scales and offsets are kept in half precision where that holds all of them; codes in four bits
where all are 0 to 15, else in eight.

This module does not know file formats (`gguf_quants` does) and does not multiply.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from statewise.kernels import abi, native
from statewise.kernels.huge_pages import HugePages
from statewise.kernels.packed import STEP_INPUTS, row_numbers

FOUR_BITS, TWO_SCALES, WIDE, OFFSETS = 1, 2, 4, 8  # of `code_form`; see csrc/coded.h

Int8 = NDArray[np.int8]
Float32 = NDArray[np.float32]


@dataclass(frozen=True)
class Codes:
    """A matrix [out, in] as codes; see the module's formula.

    Scales and offsets are [out, in / g]; without offsets, they are zero.
    """

    codes: Int8
    scales: Float32
    offsets: Float32 | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(out_dim, in_dim)."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return int(self.codes.shape[1] // self.scales.shape[1])

    def rows(self, order: NDArray[np.int64]) -> Codes:
        """The matrix with its rows in another order."""
        offsets = None if self.offsets is None else self.offsets[order]
        return Codes(self.codes[order], self.scales[order], offsets)

    def numbers(self) -> Float32:
        """[out, in] float32: the formula before rounding."""
        scales = np.repeat(self.scales, self.group, axis=1)
        found: Float32 = scales * self.codes
        if self.offsets is not None:
            found = found + np.repeat(self.offsets, self.group, axis=1)
        return found


def stacked(parts: Sequence[Codes]) -> Codes:
    """Several matrices over the same inputs as one."""
    if len(parts) == 1:
        return parts[0]
    group = min(part.group for part in parts)
    scales = [np.repeat(part.scales, part.group // group, axis=1) for part in parts]
    offsets: Float32 | None = None
    if any(part.offsets is not None for part in parts):
        each = [
            np.zeros_like(scale)
            if part.offsets is None
            else np.repeat(part.offsets, part.group // group, axis=1)
            for part, scale in zip(parts, scales, strict=True)
        ]
        offsets = np.concatenate(each)
    return Codes(np.concatenate([p.codes for p in parts]), np.concatenate(scales), offsets)


@dataclass(frozen=True)
class CodedWeight:
    """A bfloat16 matrix [out_dim, in_dim] kept as codes, in the native library's order."""

    coded: Tensor  # bytes
    out_dim: int
    in_dim: int
    code_form: int

    @property
    def shape(self) -> tuple[int, int]:
        """(out_dim, in_dim)."""
        return self.out_dim, self.in_dim

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.coded.nbytes

    def rows(self, indices: Tensor) -> Tensor:
        """Rows [n] int64 of the matrix: [n, in_dim]. IndexError for one that it does not have."""
        indices = row_numbers(indices, self.out_dim)
        out = torch.empty(*indices.shape, self.in_dim, dtype=torch.bfloat16)
        p = _params(self.out_dim, self.in_dim, self.code_form)
        p.coded, p.rows, p.out = self.coded.data_ptr(), indices.data_ptr(), out.data_ptr()
        p.num_rows = indices.numel()
        native.load_library().sw_unpack_coded_rows(ctypes.addressof(p))
        return out


def fits_codes(codes: Codes) -> bool:
    """Whether `pack_codes` takes them."""
    return not codes.shape[1] % STEP_INPUTS and codes.group in (STEP_INPUTS // 2, STEP_INPUTS)


def pack_codes(codes: Codes, pages: HugePages) -> CodedWeight:
    """Return the matrix as a coded weight on huge pages; `codes` are not kept."""
    out_dim, in_dim = codes.shape
    form, tables = _form_of(codes)
    values = np.ascontiguousarray(codes.codes)
    p = _params(out_dim, in_dim, form)
    p.codes = values.ctypes.data
    p.scales, p.offsets = tables[0].ctypes.data, tables[-1].ctypes.data
    library = native.load_library()
    coded = pages.empty((int(library.sw_coded_bytes(ctypes.addressof(p))),), torch.uint8)
    p.coded = coded.data_ptr()
    library.sw_pack_codes(ctypes.addressof(p))
    return CodedWeight(coded, out_dim, in_dim, form)


def _params(out_dim: int, in_dim: int, form: int) -> abi.CodedParams:
    p = abi.CodedParams()
    p.in_dim, p.out_dim, p.code_form = in_dim, out_dim, form
    return p


def _form_of(codes: Codes) -> tuple[int, list[NDArray[np.generic]]]:
    """(code form, [scales, offsets where it has any] as they are kept)."""
    four = bool(codes.codes.size) and 0 <= int(codes.codes.min()) <= int(codes.codes.max()) < 16
    tables = [codes.scales]
    if codes.offsets is not None or four:
        zeros = np.zeros_like(codes.scales)
        tables.append(zeros if codes.offsets is None else codes.offsets)
    wide = not all(_is_half(table) for table in tables)
    form = four * FOUR_BITS | (codes.group < STEP_INPUTS) * TWO_SCALES | wide * WIDE
    form |= (len(tables) > 1) * OFFSETS
    kept = np.float32 if wide else np.float16
    return form, [np.ascontiguousarray(table.astype(kept)) for table in tables]


def _is_half(table: Float32) -> bool:
    with np.errstate(over="ignore"):
        return bool((table.astype(np.float16).astype(np.float32) == table).all())
