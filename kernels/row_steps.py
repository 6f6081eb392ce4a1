"""Products of many rows in few shapes: the number of rows is rounded up before oneDNN sees it.

oneDNN compiles a program for each shape and keeps it. A server's prompts have any number of rows:
with the shapes as they come, a model of four linear layers compiled four programs (some
milliseconds each) for every new prompt length and kept half a megabyte for each, without end.
Rounded up to a multiple of 32 rows there are sixteen shapes a layer below 512 rows. The added rows
are zeros and are cut off; at most 31 are computed in vain.

Only 16-bit types go through oneDNN; others are multiplied as they are. So are up to 32 rows: there
are few such shapes.

This module does not choose a backend.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

ROW_STEP = 32
ROUNDED_DTYPES = frozenset({torch.bfloat16, torch.float16})


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [..., in] @ weight.T (+ bias), weight [out, in]."""
    rows = x.shape[:-1].numel()
    surplus = -rows % ROW_STEP
    if rows <= ROW_STEP or not surplus or x.dtype not in ROUNDED_DTYPES:
        return functional.linear(x, weight, bias)
    padded = x.new_empty(rows + surplus, x.shape[-1])
    padded[:rows] = x.reshape(rows, -1)
    padded[rows:] = 0
    out = functional.linear(padded, weight, bias)[:rows]
    return out.view(*x.shape[:-1], weight.shape[0])
