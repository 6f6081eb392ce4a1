"""Vectors at one byte a number, natively: to a copy of such numbers and scales, and back.

The layout of a copy and what its numbers mean are described in docs/storage-format.md; the torch
form of the same is runtime/tiers/quantise.py, and both make and read the same bytes. Runs on the
calling thread, takes no lock for longer than a look at the kernels in use.

This module does not know what a copy is for.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray

from statewise.kernels import abi, native

Bytes = NDArray[np.uint8]
KIND_CODES = {"int8": 0, "fp8": 1}


def convert(  # noqa: PLR0913 (sizes, each named)
    payload: Bytes,
    copy: Bytes,
    *,
    kind: str,
    dtype: torch.dtype,
    vectors: int,
    dim: int,
    copy_bytes: int,
    back: bool,
) -> None:
    """Quantise `payload` into `copy`, or, `back`, the other way round.

    payload: layers of [vectors, dim] numbers of `dtype`; copy: as many layers of `copy_bytes`.
    """
    layers = copy.size // copy_bytes
    assert copy.size == layers * copy_bytes
    assert payload.size == layers * vectors * dim * dtype.itemsize
    assert payload.flags.c_contiguous and copy.flags.c_contiguous  # noqa: PT018
    assert copy_bytes >= 4 * vectors + vectors * dim
    p = abi.QuantiseParams()
    p.payload, p.copy = payload.ctypes.data, copy.ctypes.data
    p.num_layers, p.vectors, p.dim, p.copy_bytes = layers, vectors, dim, copy_bytes
    p.dtype, p.kind, p.back = abi.DTYPE_CODES[dtype], KIND_CODES[kind], int(back)
    status = native.load_library().sw_quantise(ctypes.addressof(p))
    assert status == abi.OK, f"quantising: status {status}"
