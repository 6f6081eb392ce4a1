"""Weights of a linear layer in the order in which tile registers read them.

    [out / 32 panels][in / 32 steps][2 halves][16 pairs of in][16 outputs][2]

Reading weights is then reading memory from front to back, and no step of a product rearranges
anything. Rows can be taken out again, so that a matrix that serves as token table and as output
layer is kept once.

This module does not multiply (`cpu_backend` does) and knows no other layout.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from statewise.kernels import abi, native
from statewise.kernels.huge_pages import HugePages

PANEL_OUTPUTS = 32
STEP_INPUTS = 32


def row_numbers(indices: Tensor, num_rows: int) -> Tensor:
    """Row numbers as int64. IndexError for one that a matrix of `num_rows` does not have."""
    indices = indices.to(torch.int64).contiguous()
    if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < num_rows:
        raise IndexError(f"rows {indices.tolist()} of a matrix of {num_rows}")
    return indices


@dataclass(frozen=True)
class TileWeight:
    """A bfloat16 matrix [out_dim, in_dim] as tiles."""

    tiles: Tensor  # [round_up(out_dim, 32) * in_dim]
    out_dim: int
    in_dim: int

    @property
    def shape(self) -> tuple[int, int]:
        """(out_dim, in_dim)."""
        return self.out_dim, self.in_dim

    def rows(self, indices: Tensor) -> Tensor:
        """Rows [n] int64 of the matrix: [n, in_dim]. IndexError for one that it does not have."""
        indices = row_numbers(indices, self.out_dim)
        out = torch.empty(*indices.shape, self.in_dim, dtype=torch.bfloat16)
        p = abi.TileParams()
        p.tiles, p.rows, p.out = self.tiles.data_ptr(), indices.data_ptr(), out.data_ptr()
        p.in_dim, p.out_dim, p.num_rows = self.in_dim, self.out_dim, indices.numel()
        native.load_library().sw_unpack_rows(ctypes.addressof(p))
        return out


def fits_tiles(weight: Tensor) -> bool:
    """Whether `pack_tiles` takes the weight."""
    return (
        weight.dtype == torch.bfloat16 and weight.dim() == 2 and not weight.shape[1] % STEP_INPUTS
    )


def pack_tiles(weight: Tensor, pages: HugePages) -> TileWeight:
    """Return the weight [out, in] as tiles on huge pages; `weight` is not kept."""
    weight = weight.contiguous()
    out_dim, in_dim = weight.shape
    padded = -(-out_dim // PANEL_OUTPUTS) * PANEL_OUTPUTS
    tiles = pages.empty((padded * in_dim,), torch.bfloat16)
    p = abi.TileParams()
    p.weight, p.tiles = weight.data_ptr(), tiles.data_ptr()
    p.in_dim, p.out_dim = in_dim, out_dim
    native.load_library().sw_pack_tiles(ctypes.addressof(p))
    return TileWeight(tiles, out_dim, in_dim)
