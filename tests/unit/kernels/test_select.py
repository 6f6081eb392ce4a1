"""Backends by name, and messages that say what to do."""

from __future__ import annotations

import pytest
import torch

from statewise.kernels import native, select
from statewise.kernels.select import BACKENDS, BackendUnavailableError, select_backend
from support.native_kernels import needs_native


def unavailable() -> None:
    raise native.NativeUnavailableError("native kernels: no compiler; build them with: make")


@pytest.fixture
def no_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "is_available", lambda: False)
    monkeypatch.setattr(native, "load_library", unavailable)


def names(name: str, dtype: torch.dtype) -> tuple[str, str]:
    attention, ops = select_backend(name, dtype)
    return attention.name, ops.name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_torch_takes_any_dtype(dtype: torch.dtype) -> None:
    assert names("torch", dtype) == ("torch", "torch")


@needs_native
def test_native_where_it_runs() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert names("cpu", dtype) == ("cpu", "cpu")
    with pytest.raises(BackendUnavailableError, match=r"takes pools of float32.*use torch"):
        select_backend("cpu", torch.float64)


@needs_native
@pytest.mark.skipif(torch.cuda.is_available(), reason="auto prefers the device")
def test_auto_takes_the_best_that_runs() -> None:
    assert names("auto", torch.bfloat16) == ("cpu", "cpu")
    assert names("auto", torch.float64) == ("torch", "torch")


@pytest.mark.usefixtures("no_native")
def test_without_the_library(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(BackendUnavailableError, match="no compiler; build them with"):
        select_backend("cpu", torch.float32)
    if not torch.cuda.is_available():
        assert names("auto", torch.float32) == ("torch", "torch")
        assert "python -m statewise.kernels.build" in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="says so only without a device")
def test_flashinfer_needs_a_device() -> None:
    with pytest.raises(BackendUnavailableError, match=r"needs a CUDA device.*use cpu or torch"):
        select_backend("flashinfer", torch.bfloat16)


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(ValueError, match=", ".join(BACKENDS)):
        select_backend("triton", torch.float32)
