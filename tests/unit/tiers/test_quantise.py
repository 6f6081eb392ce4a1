"""State at fewer bits: how far it may move, and that everybody reads the same bytes alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from statewise.kernels.interface import AttentionGeometry, EntryGeometry, StateGeometry
from statewise.radix.lossy import KINDS
from statewise.runtime.tiers.quantise import PIECE, Quantiser, is_available

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(3, 7, 5), (30, 96, 64), (2, 40, 1024), (1, 1, PIECE + 1)]  # layers, vectors, dim
Bytes = NDArray[np.uint8]


def payload_of(values: torch.Tensor) -> Bytes:
    return values.contiguous().view(torch.uint8).numpy().reshape(-1).copy()


def values_of(payload: Bytes, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(payload).view(like.dtype).view(like.shape)


def there_and_back(quantiser: Quantiser, values: torch.Tensor) -> tuple[Bytes, torch.Tensor]:
    """(copy, what it reads as)."""
    payload = payload_of(values)
    copy = np.full(len(values) * quantiser.copy_bytes, 0xEE, dtype=np.uint8)
    quantiser.quantise(payload, copy)
    out = np.full_like(payload, 0xEE)
    quantiser.dequantise(copy, out)
    return copy, values_of(out, values)


def random_values(layers: int, vectors: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(layers + vectors + dim)
    values = torch.randn(layers, vectors, dim, generator=generator)
    values *= torch.logspace(-3, 2, vectors).unsqueeze(-1)  # vectors of very different size
    return values.to(dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_no_number_moves_further_than_its_vector_allows(
    kind: str, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    values = random_values(*shape, dtype)
    quantiser = Quantiser(kind, shape[1], shape[2], dtype)
    _, back = there_and_back(quantiser, values)
    exact, near = values.double(), back.double()
    largest = exact.abs().amax(-1, keepdim=True)
    step = largest / 254 if kind == "int8" else exact.abs() / 16 + largest / 448 / 512
    rounding = exact.abs() * torch.finfo(dtype).eps
    assert ((exact - near).abs() <= 1.001 * step + rounding).all()
    assert not torch.equal(values, back), "something was lost, or nothing was tested"


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_is_read_by_its_definition(kind: str) -> None:
    """Scales, numbers and padding where docs/storage-format.md says; products rounded once."""
    layers, vectors, dim = 2, 3, 5
    values = random_values(layers, vectors, dim, torch.bfloat16)
    quantiser = Quantiser(kind, vectors, dim, torch.bfloat16)
    copy, back = there_and_back(quantiser, values)
    assert quantiser.copy_bytes == 4 * vectors + 16
    for layer, part in enumerate(copy.reshape(layers, -1)):
        scales = part[: 4 * vectors].view("<f4")
        numbers = part[4 * vectors : 4 * vectors + vectors * dim]
        assert not part[4 * vectors + vectors * dim :].any()
        if kind == "int8":
            read = numbers.view(np.int8).astype(np.float32)
        else:
            read = np.array([e4m3(int(byte)) for byte in numbers], dtype=np.float32)
        wanted = read.reshape(vectors, dim) * scales[:, None]
        assert torch.equal(torch.from_numpy(wanted).to(torch.bfloat16), back[layer])


def e4m3(byte: int) -> float:
    """Value of one byte: sign, 4 bits of exponent with bias 7, 3 bits of fraction."""
    sign, exponent, fraction = byte >> 7, (byte >> 3) & 15, byte & 7
    assert (exponent, fraction) != (15, 7), "not a number"
    size = (8 + fraction) * 2.0 ** (exponent - 10) if exponent else fraction * 2.0**-9
    return -size if sign else size


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_read_from_a_copy_in_16_bits_makes_the_same_copy_again(kind: str) -> None:
    """A page that leaves twice does not drift."""
    values = random_values(4, 24, 64, torch.bfloat16)
    quantiser = Quantiser(kind, 24, 64, torch.bfloat16)
    _, once = there_and_back(quantiser, values)
    _, twice = there_and_back(quantiser, once)
    assert torch.equal(once, twice)


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_and_what_is_not_finite_does_not_look_finite(kind: str) -> None:
    values = torch.zeros(1, 4, 8)
    values[0, 1, 3] = float("nan")
    values[0, 2, 3] = float("inf")
    values[0, 3] = 1e-38
    _, back = there_and_back(Quantiser(kind, 4, 8, torch.float32), values)
    assert (back[0, [0, 3]] == 0).all()
    assert not back[0, 1:3, 3].isfinite().any()


def test_geometries_say_what_a_vector_is() -> None:
    heads = AttentionGeometry(4, 2, 24, 16, torch.bfloat16, 1.0)
    assert Quantiser.of("int8", heads, 2 * 2 * 16 * 24 * 2).vectors == 2 * 2 * 16
    entries = EntryGeometry(40, 16, torch.float32, ratio=4)
    assert Quantiser.of("int8", entries, 4 * 40 * 4).vectors == 4
    with pytest.raises(ValueError, match="every bit"):
        Quantiser.of("int8", StateGeometry(10, torch.float32), 40)


def test_only_kinds_that_exist_are_available() -> None:
    assert is_available("int8")
    assert not is_available("int4")
