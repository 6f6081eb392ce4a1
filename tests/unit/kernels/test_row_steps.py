"""Rounded-up rows change nothing but the number of shapes that the library sees."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from statewise.kernels import row_steps


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 8), (33, 8), (64, 8), (100, 8), (5, 11, 8), (0, 8)], ids=str)
def test_equals_the_plain_product(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator).to(dtype)
    weight = torch.randn(6, 8, generator=generator).to(dtype)
    bias = torch.randn(6, generator=generator).to(dtype)
    for b in (None, bias):
        out = row_steps.linear(x, weight, b)
        plain = functional.linear(x, weight, b)
        assert out.shape == plain.shape
        assert out.dtype == dtype
        torch.testing.assert_close(out, plain)


def test_rows_that_are_a_strided_view() -> None:
    x = torch.randn(70, 20).bfloat16()[:, 4:12]
    weight = torch.eye(8).bfloat16()
    assert torch.equal(row_steps.linear(x, weight), x)


def test_few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    plain = functional.linear

    def counting(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        seen.add(x.shape)
        return plain(x, weight, bias)

    monkeypatch.setattr(functional, "linear", counting)
    weight = torch.ones(4, 8).bfloat16()
    for rows in range(33, 513):
        assert row_steps.linear(torch.ones(rows, 8).bfloat16(), weight).shape == (rows, 4)
    assert len(seen) == 15
