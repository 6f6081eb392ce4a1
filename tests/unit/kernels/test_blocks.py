"""Digests notice any change of a block; copies read all sources before they write."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from statewise.kernels.blocks import BlockRows, block_digests, copy_blocks, numpy_digests
from support.native_kernels import INSTRUCTION_SETS, native_setting, needs_native


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def random_pool(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(shape, dtype=dtype).nbytes
    raw = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(shape)


@needs_native
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("inner", [(1,), (3, 5), (2, 3, 16, 64), (2, 1, 1, 8)])
def test_native_and_numpy_digests_agree(
    inner: tuple[int, ...], dtype: torch.dtype, instruction_set: str
) -> None:
    pool = random_pool((150, *inner), dtype)
    blocks = ints(3, 0, 149, 3, *range(100))
    with native_setting(instruction_set, num_threads=2):
        digests = block_digests(pool, blocks)
    assert digests.dtype == np.uint64
    assert digests.tolist() == numpy_digests(pool, blocks).tolist()


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("inner", [(1,), (3, 5), (2, 3, 16, 64)])
def test_blocks_go_to_rows_and_back_with_their_digests(
    inner: tuple[int, ...], instruction_set: str
) -> None:
    layers = [random_pool((20, *inner), torch.bfloat16, seed) for seed in range(3)]
    before = [layer.clone() for layer in layers]
    size = layers[0][0].nbytes
    rows = np.zeros((4, 3 * size + 7), dtype=np.uint8)
    places = np.array([row.ctypes.data for row in rows], dtype=np.uint64)
    copier = BlockRows(layers)
    source, target = np.array([5, 0, 19, 5], np.int32), np.array([1, 2, 3, 4], np.int32)
    with native_setting(instruction_set, num_threads=2):
        out = copier.copy(source, places, to_blocks=False)
        back = copier.copy(target, places, to_blocks=True)
    expected = [block_digests(layer, torch.from_numpy(source)).tolist() for layer in before]
    assert out.T.tolist() == back.T.tolist() == expected
    for row, block in zip(rows, source.tolist(), strict=True):
        whole = b"".join(bytes(layer[block].view(torch.uint8).flatten()) for layer in before)
        assert row.tobytes() == whole + bytes(7)
    for layer, old in zip(layers, before, strict=True):
        assert torch.equal(layer[1:5].view(torch.uint8), old[source.tolist()].view(torch.uint8))
        assert torch.equal(layer[5:].view(torch.uint8), old[5:].view(torch.uint8))
    for bad in (-1, 20):
        with pytest.raises(IndexError):
            copier.copy(np.array([0, bad], np.int32), places, to_blocks=True)


class Records:
    """A file of records: a head of 512 bytes, a row, padding up to `size`."""

    head = 512

    def __init__(self, path: Path, layers: list[torch.Tensor], count: int) -> None:
        self.row = sum(layer[0].nbytes for layer in layers)
        self.size = self.head + self.row + 9
        data = torch.randint(0, 256, (count, self.size), dtype=torch.uint8).numpy()
        path.write_bytes(bytes(100) + data.tobytes())
        self.data = data
        self.heads = np.zeros((count, self.head), dtype=np.uint8)

    def read(self, fd: int, blocks: Sequence[int], per_read: int, copier: BlockRows) -> Any:
        buffer = np.zeros(per_read * self.size + 1, dtype=np.uint8)
        wanted = np.array(blocks, dtype=np.int32)
        return copier.read_records(wanted, fd, 100, self.size, buffer, self.heads)


@contextlib.contextmanager
def opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    fd = os.open(path, flags)
    try:
        yield fd
    finally:
        os.close(fd)


@needs_native
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("per_read", [1, 2, 5, 9])
def test_records_of_a_file_land_in_blocks(
    tmp_path: Path, per_read: int, instruction_set: str
) -> None:
    layers = [random_pool((8, 3, 16, 5), torch.bfloat16, seed) for seed in range(3)]
    old = [layer.clone() for layer in layers]
    records = Records(tmp_path / "file", layers, 5)
    blocks = [6, 0, 3, 7, 1]
    with opened(tmp_path / "file") as fd, native_setting(instruction_set, num_threads=2):
        out = records.read(fd, blocks, per_read, BlockRows(layers))
    assert (records.heads == records.data[:, : records.head]).all()
    size = layers[0][0].nbytes
    for number, layer in enumerate(layers):
        begin = records.head + number * size
        found = layer[blocks].view(torch.uint8).reshape(5, size).numpy()
        assert (found == records.data[:, begin : begin + size]).all()
        assert torch.equal(
            layer[[2, 4, 5]].view(torch.uint8), old[number][[2, 4, 5]].view(torch.uint8)
        )
        assert out[:, number].tolist() == block_digests(layer, ints(*blocks)).tolist()


@needs_native
@pytest.mark.parametrize("left", [0, 1, 3])
def test_a_file_that_ends_gives_the_records_before_its_end(tmp_path: Path, left: int) -> None:
    layers = [random_pool((5, 64), torch.uint8)]
    records = Records(tmp_path / "file", layers, 5)
    os.truncate(tmp_path / "file", 100 + left * records.size + 520)
    before = layers[0].clone()
    with opened(tmp_path / "file") as fd:
        out = records.read(fd, range(5), 2, BlockRows(layers))
    assert len(out) == left
    assert torch.equal(layers[0][left:], before[left:]), "what is not whole goes nowhere"


@needs_native
def test_records_that_cannot_be_read_say_why(tmp_path: Path) -> None:
    layers = [random_pool((5, 16), torch.float32)]
    records, copier = Records(tmp_path / "file", layers, 5), BlockRows(layers)
    with (
        opened(tmp_path / "file", os.O_WRONLY) as fd,
        pytest.raises(OSError, match=os.strerror(errno.EBADF)),
    ):
        records.read(fd, range(5), 2, copier)
    with opened(tmp_path / "file") as fd:
        for bad in (-1, 5):
            with pytest.raises(IndexError):
                records.read(fd, [0, bad], 2, copier)
        with pytest.raises(ValueError, match="hold no record"):
            records.read(fd, range(5), 0, copier)
        records.size = records.head + records.row - 1
        with pytest.raises(ValueError, match="no head and row"):
            records.read(fd, range(5), 2, copier)


def test_digests_are_a_stored_format() -> None:
    pool = torch.arange(40, dtype=torch.uint8).view(2, 20)
    expected = [5264914145874881882, 13880950592084627267]
    assert block_digests(pool, ints(0, 1)).tolist() == expected
    assert numpy_digests(pool, ints(0, 1)).tolist() == expected


def test_every_flipped_bit_changes_the_digest() -> None:
    pool = random_pool((2, 2, 1, 4, 9), torch.bfloat16)
    before = block_digests(pool, ints(0, 1))
    raw = pool.view(torch.uint8).view(2, -1)
    for byte in range(raw.shape[1]):
        for bit in range(8):
            raw[1, byte] ^= 1 << bit
            after = block_digests(pool, ints(0, 1))
            raw[1, byte] ^= 1 << bit
            assert after[0] == before[0]
            assert after[1] != before[1], f"byte {byte} bit {bit}"


@settings(max_examples=40)
@given(st.data())
def test_moved_words_change_the_digest(data: st.DataObject) -> None:
    words = data.draw(st.lists(st.integers(0, 2**63 - 1), min_size=2, max_size=12, unique=True))
    other = data.draw(st.permutations(words))
    pool = torch.tensor([words, other], dtype=torch.int64)
    first, second = block_digests(pool, ints(0, 1)).tolist()
    assert (first == second) == (words == list(other))


def test_a_digest_covers_its_length() -> None:
    longer = torch.zeros(1, 24, dtype=torch.uint8)
    lengths = [int(block_digests(longer[:, :n].contiguous(), ints(0))[0]) for n in range(25)]
    assert len(set(lengths)) == len(lengths)


def test_blocks_of_a_strided_pool() -> None:
    layers = random_pool((6, 4, 2, 3, 8), torch.float32)
    one = layers[:, 2]
    assert block_digests(one, ints(5, 1)).tolist() == (
        block_digests(one.contiguous(), ints(5, 1)).tolist()
    )
    with pytest.raises(ValueError, match="contiguous"):
        block_digests(layers.transpose(3, 4), ints(0))


@pytest.mark.parametrize("bad", [-1, 6])
def test_blocks_outside_the_pool_are_refused(bad: int) -> None:
    pool = torch.zeros(6, 8)
    with pytest.raises(IndexError, match="of a pool of 6"):
        block_digests(pool, ints(0, bad))
    with pytest.raises(IndexError, match="of a pool of 6"):
        copy_blocks(pool, ints(bad), ints(0))
    with pytest.raises(IndexError, match="of a pool of 6"):
        copy_blocks(pool, ints(0), ints(bad))


def test_copies_read_every_source_first() -> None:
    pool = random_pool((5, 2, 3), torch.bfloat16)
    before = pool.clone().view(torch.int16)
    copy_blocks(pool, ints(0, 1, 4), ints(1, 0, 3))
    after = pool.view(torch.int16)
    for target, source in {0: 1, 1: 0, 2: 2, 3: 4, 4: 4}.items():
        assert torch.equal(after[target], before[source])


def test_copies_must_name_each_target_once() -> None:
    pool = torch.zeros(4, 2)
    with pytest.raises(ValueError, match="target of two copies"):
        copy_blocks(pool, ints(0, 1), ints(2, 2))
    with pytest.raises(ValueError, match="2 sources for 1"):
        copy_blocks(pool, ints(0, 1), ints(2))
