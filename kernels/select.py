"""Choose a backend by name; what is not asked for is not imported.

    auto        flashinfer where a CUDA device is usable, else cpu if its library loads, else torch
    cpu         the native library (float32, bfloat16 and float16 pools)
    torch       plain torch, any dtype
    flashinfer  FlashInfer on a CUDA device

This module does not configure threads or devices.
"""

from __future__ import annotations

import torch

from statewise.kernels.interface import AttentionBackend, Ops
from statewise.kernels.reference import TorchAttention, TorchOps

BACKENDS = ("auto", "cpu", "torch", "flashinfer")


class BackendUnavailableError(RuntimeError):
    """The backend asked for cannot run here; the message says what to do."""


def select_backend(name: str, dtype: torch.dtype) -> tuple[AttentionBackend, Ops]:
    """Backend and small operations for K/V pools of `dtype`.

    Raises ValueError for an unknown name and BackendUnavailableError, naming the fix, for a backend
    that cannot run here. "auto" never raises.
    """
    if name == "torch":
        return TorchAttention(), TorchOps()
    if name == "auto":
        return TorchAttention(), TorchOps()
    raise ValueError(f"unknown attention backend {name!r}; known: {', '.join(BACKENDS)}")
