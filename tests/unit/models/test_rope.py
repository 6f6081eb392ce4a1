"""Rope tables: filled on demand, never moved, and equal to float64 within float32 rounding."""

from __future__ import annotations

import pytest
import torch

from statewise.runtime.errors import ModelLoadError
from statewise.runtime.models.config import RopeConfig
from statewise.runtime.models.rope import FIRST_ROWS, RopeTable, inverse_frequencies

KINDS = [
    RopeConfig(),
    RopeConfig("linear", factor=4.0),
    RopeConfig("dynamic", factor=2.0, original_len=100),
    RopeConfig("llama3", 500_000.0, 8.0, 8192, 1.0, 4.0),
    RopeConfig("yarn", factor=4.0, original_len=2048),
    RopeConfig("divisors", divisors=tuple(1.0 + i for i in range(32))),
]


@pytest.mark.parametrize("rope", KINDS, ids=lambda r: r.kind)
def test_table_rows_are_cos_and_sin_of_position_times_frequency(rope: RopeConfig) -> None:
    table = RopeTable(rope, 64, 300)
    frequencies, scale = inverse_frequencies(rope, 64, 300)
    angles = torch.arange(300, dtype=torch.float64).unsqueeze(1) * frequencies.double()
    assert (table.cos.double() - angles.cos() * scale).abs().max() < 5e-5
    assert (table.sin.double() - angles.sin() * scale).abs().max() < 5e-5
    assert frequencies.shape == (32,)
    assert (frequencies[1:] < frequencies[:-1]).all()


def test_scaling_slows_long_wavelengths_only() -> None:
    plain, _ = inverse_frequencies(RopeConfig(theta=500_000.0), 64, 0)
    scaled, _ = inverse_frequencies(KINDS[3], 64, 0)
    ratio = plain / scaled
    assert ratio[0] == 1.0
    assert ratio[-1] == pytest.approx(8.0)
    assert (ratio[1:] >= ratio[:-1] - 1e-5).all()


def test_yarn_scales_cos_and_sin() -> None:
    assert inverse_frequencies(KINDS[4], 64, 0)[1] == pytest.approx(1.1386294, abs=1e-6)


def test_table_fills_as_positions_are_reached_and_never_moves() -> None:
    length = 3 * FIRST_ROWS
    table = RopeTable(RopeConfig(), 16, length)
    address = table.cos.data_ptr()
    assert table.num_filled == FIRST_ROWS
    table.cos[5] = 7.0
    table.fill(FIRST_ROWS)
    assert table.num_filled == FIRST_ROWS
    table.fill(FIRST_ROWS + 1)
    assert table.num_filled == 2 * FIRST_ROWS
    table.fill(length)
    assert (table.num_filled, table.cos.data_ptr()) == (length, address)
    assert (table.cos[5] == 7.0).all()  # rows are written once
    whole = RopeTable(RopeConfig(), 16, length)
    whole.fill(length)
    assert torch.equal(table.cos[6:], whole.cos[6:])
    assert torch.equal(table.sin, whole.sin)


def test_position_beyond_the_context_is_a_programmer_error() -> None:
    with pytest.raises(AssertionError, match="outside the model's context"):
        RopeTable(RopeConfig(), 16, 10).fill(11)


def test_divisors_of_another_head_dimension_are_refused() -> None:
    with pytest.raises(ModelLoadError, match="32 rope divisors for head dimension 16"):
        inverse_frequencies(KINDS[5], 16, 10)
