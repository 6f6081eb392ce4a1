"""Copies at one byte a number: every instruction set makes and reads the bytes that torch does."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from statewise.kernels.quantised import KIND_CODES, convert
from statewise.runtime.tiers.quantise import Quantiser
from support.native_kernels import INSTRUCTION_SETS, native_setting, needs_native

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1, 1), (2, 3, 5), (3, 7, 64), (2, 2, 33)]  # layers, vectors, dim


def bytes_of(values: torch.Tensor) -> np.ndarray:
    return values.contiguous().view(torch.uint8).numpy().reshape(-1).copy()


def values_like(shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
    """Large and small vectors, zeros, ties, and the smallest numbers of a vector."""
    generator = torch.Generator().manual_seed(sum(shape))
    values = torch.randn(*shape, generator=generator)
    values *= torch.logspace(-6, 4, shape[0] * shape[1]).view(*shape[:2], 1)
    values[0, 0] = 0
    if shape[2] > 8:  # whole steps and halves of them, for both kinds
        values[-1, -1, :8] = torch.tensor([127.0, 0.5, 1.5, -2.5, 63.5, -126.5, 1e-3, -0.0])
        values[-1, 0, :8] = torch.tensor([448.0, 17.0, 19.0, 2**-9, 2**-10, -(2**-6), 0.021, 15.5])
    return values.to(dtype)


@needs_native
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("kind", KIND_CODES)
def test_native_copies_are_those_of_torch(kind: str, instruction_set: str) -> None:
    for shape, dtype in product(SHAPES, DTYPES):
        values = values_like(shape, dtype)
        quantiser = Quantiser(kind, shape[1], shape[2], dtype)
        sizes = {
            "kind": kind, "dtype": dtype, "vectors": shape[1], "dim": shape[2],
            "copy_bytes": quantiser.copy_bytes,
        }  # fmt: skip
        payload = bytes_of(values)
        wanted = np.full(shape[0] * quantiser.copy_bytes, 0xEE, dtype=np.uint8)
        quantiser.quantise_by_torch(payload, wanted)
        assert payload.tobytes() == bytes_of(values).tobytes(), "the block is only read"
        found = np.full_like(wanted, 0x77)
        with native_setting(instruction_set, num_threads=1):
            convert(payload, found, **sizes, back=False)
        assert found.tobytes() == wanted.tobytes(), (shape, dtype)
        read, again = np.full_like(payload, 0xEE), np.full_like(payload, 0x77)
        quantiser.dequantise_by_torch(wanted, read)
        with native_setting(instruction_set, num_threads=1):
            convert(again, wanted, **sizes, back=True)
        assert again.tobytes() == read.tobytes(), (shape, dtype)


@needs_native
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("kind", KIND_CODES)
def test_every_byte_reads_as_torch_reads_it(kind: str, instruction_set: str) -> None:
    quantiser = Quantiser(kind, 1, 256, torch.float32)
    copy = np.zeros(quantiser.copy_bytes, dtype=np.uint8)
    copy[:4] = np.array([0.37], dtype=np.float32).view(np.uint8)
    copy[4:] = np.arange(256, dtype=np.uint8)
    wanted, found = np.zeros(1024, dtype=np.uint8), np.ones(1024, dtype=np.uint8)
    quantiser.dequantise_by_torch(copy, wanted)
    sizes = {"kind": kind, "dtype": torch.float32, "vectors": 1, "dim": 256, "copy_bytes": 260}
    with native_setting(instruction_set, num_threads=1):
        convert(found, copy, **sizes, back=True)
    np.testing.assert_array_equal(found.view(np.float32), wanted.view(np.float32))


@needs_native
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("kind", KIND_CODES)
def test_what_is_not_finite_stays_so(kind: str, instruction_set: str) -> None:
    for bad in (float("nan"), float("inf"), -float("inf")):
        values = torch.ones(1, 2, 20)
        values[0, 1, 17] = bad
        quantiser = Quantiser(kind, 2, 20, torch.float32)
        copy = np.zeros(quantiser.copy_bytes, dtype=np.uint8)
        out = np.zeros(160, dtype=np.uint8)
        with native_setting(instruction_set, num_threads=1):
            quantiser.quantise(bytes_of(values), copy)
            quantiser.dequantise(copy, out)
        back = torch.from_numpy(out).view(torch.float32).view(2, 20)
        assert torch.equal(back[0], torch.ones(20))
        assert not back[1, 17].isfinite()
