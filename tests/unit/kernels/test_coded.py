"""Weights kept as codes: the same numbers and the same products as their dequantised matrix."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from statewise.kernels import native
from statewise.kernels.coded import CodedWeight, Codes, fits_codes, pack_codes, stacked
from statewise.kernels.cpu_backend import CpuOps
from statewise.kernels.huge_pages import HugePages
from statewise.kernels.reference import TorchOps

pytestmark = pytest.mark.skipif(not native.is_available(), reason="needs the native library")

FORMS = list(itertools.product((4, 8), (16, 32), (False, True), (False, True)))


def codes_of(
    shape: tuple[int, int], bits: int, group: int, *, wide: bool, offsets: bool, seed: int = 0
) -> Codes:
    """Random codes with scales of either sign; half precision holds them unless `wide`."""
    rng = np.random.default_rng(seed)
    low, high = (0, 16) if bits == 4 else (-128, 128)
    table = (shape[0], shape[1] // group)

    def numbers() -> np.ndarray:
        drawn = rng.normal(0, 0.01, table).astype(np.float32)
        # A half times a small integer, as K types have them, where not a half.
        return drawn.astype(np.float16).astype(np.float32) * (63 if wide else 1)

    codes = rng.integers(low, high, shape).astype(np.int8)
    return Codes(codes, numbers(), numbers() if offsets else None)


def dequantised(codes: Codes) -> torch.Tensor:
    return torch.from_numpy(codes.numbers()).to(torch.bfloat16)


@pytest.mark.parametrize(("bits", "group", "wide", "offsets"), FORMS)
def test_rows_are_those_of_the_matrix(bits: int, group: int, wide: bool, offsets: bool) -> None:
    codes = codes_of((75, 96), bits, group, wide=wide, offsets=offsets)
    kept = pack_codes(codes, HugePages())
    assert kept.shape == codes.shape
    order = torch.randperm(75)
    assert torch.equal(kept.rows(order), dequantised(codes)[order])


@pytest.mark.parametrize(("bits", "group", "wide", "offsets"), FORMS)
@pytest.mark.parametrize("shape", [(64, 32), (75, 608), (200, 1536)])
def test_products_are_bit_for_bit_those_of_the_matrix(
    shape: tuple[int, int], bits: int, group: int, wide: bool, offsets: bool
) -> None:
    if native.instruction_set() != "amx":
        pytest.skip("coded weights are multiplied by tile registers only")
    ops = CpuOps()
    codes = codes_of(shape, bits, group, wide=wide, offsets=offsets)
    kept, matrix = pack_codes(codes, HugePages()), dequantised(codes)
    tiles = ops.pack(torch.cat([matrix] * 64))  # large enough to be packed
    bias = torch.randn(shape[0]).to(torch.bfloat16)
    for num_rows in (1, 2, 5, 16, 17, 31, 32, 33, 70, 700):
        x = torch.randn(num_rows, shape[1] + 8).to(torch.bfloat16)[:, 8:]  # rows need not touch
        ours = ops.linear(x, kept, bias)
        theirs = ops.linear(x, tiles, torch.cat([bias] * 64))[:, : shape[0]]
        assert torch.equal(ours.view(torch.int16), theirs.contiguous().view(torch.int16))
        assert torch.equal(ops.logits(x, kept), ops.linear(x, kept).float())


def test_several_matrices_become_one() -> None:
    parts = [
        codes_of((64, 64), 4, 32, wide=False, offsets=True),
        codes_of((32, 64), 8, 16, wide=True, offsets=False, seed=1),
        codes_of((8, 64), 8, 32, wide=False, offsets=False, seed=2),
    ]
    whole = stacked(parts)
    assert (whole.shape, whole.group) == ((104, 64), 16)
    expected = torch.cat([dequantised(part) for part in parts])
    assert torch.equal(pack_codes(whole, HugePages()).rows(torch.arange(104)), expected)
    assert stacked(parts[:1]) is parts[0]


@pytest.mark.parametrize(("bits", "wide", "share"), [(4, False, 0.33), (8, False, 0.54)])
def test_codes_take_a_part_of_the_memory(bits: int, wide: bool, share: float) -> None:
    codes = codes_of((256, 256), bits, 32, wide=wide, offsets=bits == 4)
    kept = pack_codes(codes, HugePages())
    assert kept.nbytes <= share * dequantised(codes).nbytes


def test_rows_beyond_the_matrix_are_an_error() -> None:
    kept = pack_codes(codes_of((40, 32), 4, 32, wide=False, offsets=True), HugePages())
    for bad in (-1, 40):
        with pytest.raises(IndexError, match="matrix of 40"):
            kept.rows(torch.tensor([0, bad]))


def test_what_does_not_fit_is_packed_as_numbers() -> None:
    narrow = codes_of((512, 48), 8, 16, wide=False, offsets=False)
    large_groups = codes_of((512, 128), 8, 64, wide=False, offsets=False)
    small = codes_of((32, 32), 8, 32, wide=False, offsets=False)
    assert not fits_codes(narrow)
    assert not fits_codes(large_groups)
    ops = CpuOps()
    assert [ops.pack_codes(codes) for codes in (narrow, large_groups, small)] == [None] * 3
    assert TorchOps().pack_codes(codes_of((512, 128), 4, 32, wide=False, offsets=True)) is None


def test_a_large_weight_is_kept_where_tiles_are() -> None:
    kept = CpuOps().pack_codes(codes_of((512, 128), 4, 32, wide=False, offsets=True))
    assert isinstance(kept, CodedWeight) == (native.instruction_set() == "amx")


def test_what_weights_take_is_told() -> None:
    ops = CpuOps()
    assert ops.packed_bytes == 0
    matrix = ops.pack(torch.randn(512, 128).to(torch.bfloat16))
    assert ops.packed_bytes == 512 * 128 * 2, matrix
    kept = ops.pack_codes(codes_of((512, 128), 4, 32, wide=False, offsets=True))
    assert ops.packed_bytes == 512 * 128 * 2 + (kept.nbytes if kept is not None else 0)
    assert ops.keeps_codes == (kept is not None)
    assert not TorchOps().keeps_codes


def test_damaged_scales_are_not_refused() -> None:
    """A file may hold any bits: infinities and NaNs come out as such."""
    codes = codes_of((32, 64), 8, 32, wide=False, offsets=False)
    codes.scales[3, 1], codes.scales[5, 0] = np.inf, np.nan
    kept = pack_codes(codes, HugePages()).rows(torch.arange(32))
    with np.errstate(invalid="ignore"):
        expected = dequantised(codes)
    assert torch.equal(kept.nan_to_num(7.0), expected.nan_to_num(7.0))
