"""Choose a backend by name; what is not asked for is not imported.

    auto        flashinfer where a CUDA device is usable, else cpu if its library loads, else torch
    cpu         the native library (float32, bfloat16 and float16 pools)
    torch       plain torch, any dtype
    flashinfer  FlashInfer on a CUDA device

This module does not configure threads or devices.
"""

from __future__ import annotations

import logging

import torch

from statewise.kernels.abi import DTYPE_CODES
from statewise.kernels.interface import AttentionBackend, Ops, SparseKernels
from statewise.kernels.native import NativeUnavailableError, is_available
from statewise.kernels.reference import TorchAttention, TorchOps
from statewise.kernels.sparse_reference import TorchSparse

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "cpu", "torch", "flashinfer")


class BackendUnavailableError(RuntimeError):
    """The backend asked for cannot run here; the message says what to do."""


def select_backend(name: str, dtype: torch.dtype) -> tuple[AttentionBackend, Ops]:
    """Backend and small operations for K/V pools of `dtype`.

    Raises ValueError for an unknown name and BackendUnavailableError, naming the fix, for a
    backend that cannot run here. "auto" never raises.
    """
    match name:
        case "auto":
            return select_backend(_best(dtype), dtype)
        case "torch":
            return TorchAttention(), TorchOps()
        case "cpu":
            return _cpu(dtype)
        case "flashinfer":
            return _flashinfer(dtype)
        case _:
            raise ValueError(f"unknown attention backend {name!r}; known: {', '.join(BACKENDS)}")


def select_sparse(backend_name: str) -> SparseKernels:
    """Operations on entries that go with an attention backend."""
    if backend_name != "cpu":
        return TorchSparse()
    from statewise.kernels.sparse_cpu import CpuSparse

    return CpuSparse()


def _best(dtype: torch.dtype) -> str:
    if torch.cuda.is_available():
        from statewise.kernels import flashinfer_backend

        if flashinfer_backend.why_unavailable(dtype) is None:
            return "flashinfer"
    if dtype not in DTYPE_CODES:
        return "torch"
    if not is_available():
        logger.warning(
            "native kernels are not available, using plain torch (slow); "
            "build them with: python -m statewise.kernels.build"
        )
        return "torch"
    return "cpu"


def _cpu(dtype: torch.dtype) -> tuple[AttentionBackend, Ops]:
    if dtype not in DTYPE_CODES:
        words = ", ".join(str(d).removeprefix("torch.") for d in DTYPE_CODES)
        raise BackendUnavailableError(
            f"attention backend cpu takes pools of {words}, not {dtype}; use torch"
        )
    from statewise.kernels.cpu_backend import CpuAttention, CpuOps

    try:
        return CpuAttention(), CpuOps()
    except NativeUnavailableError as error:
        raise BackendUnavailableError(f"attention backend cpu: {error}") from error


def _flashinfer(dtype: torch.dtype) -> tuple[AttentionBackend, Ops]:
    from statewise.kernels import flashinfer_backend

    reason = flashinfer_backend.why_unavailable(dtype)
    if reason is not None:
        raise BackendUnavailableError(f"attention backend flashinfer: {reason}")
    return flashinfer_backend.FlashInferAttention(), TorchOps()
