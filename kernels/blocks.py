"""Whole blocks: digests that tell whether one changed, and copies between them.

The digest of a block is defined over its bytes as 64-bit little-endian words w[i] (the last one
padded with zeros):

    mix(bytes + sum_i mix(w[i] ^ (i + 1) * golden))      mod 2^64

`mix` is a bijection, so a change confined to one word always changes the digest, and any other
change goes unnoticed with probability 2^-64. It is no protection against somebody who wants a
collision. The native and the numpy form give the same numbers.

This module does not know what a block means, or when it must be checked.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from statewise.kernels import abi, native

Digests = NDArray[np.uint64]

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)
_CHUNK_BLOCKS = 64  # blocks hashed at once by numpy: bounds its temporaries


def block_digests(kv: Tensor, blocks: Tensor) -> Digests:
    """Digest of each block: kv [B, ...], blocks [n] int32 -> [n] uint64.

    The bytes of one block must be contiguous (ValueError); IndexError for a block outside kv.
    """
    wanted = _checked_blocks(kv, blocks)
    if kv[:1].numel() and not kv[0].is_contiguous():
        raise ValueError("the bytes of a block must be contiguous")
    if native.is_available():
        return _native_digests(kv, wanted)
    return numpy_digests(kv, wanted)


class BlockRows:
    """Copies blocks of a group's layers to rows of memory and back, digests included.

    `layers` are pools [B, ...] of one shape, on the CPU, whose blocks are contiguous. A row holds
    a block's layers one after the other. Runs on the calling thread and beside other kernels;
    needs the native library.
    """

    def __init__(self, layers: Sequence[Tensor]) -> None:
        first = layers[0]
        assert all(kv.shape == first.shape and kv.is_contiguous() for kv in layers)
        self._layers = np.array([kv.data_ptr() for kv in layers], dtype=np.uint64)
        self._num_blocks = first.shape[0]
        self._stride = first.stride(0) * first.element_size()
        self._layer_bytes = _block_bytes(first)

    def copy(
        self, blocks: NDArray[np.int32], rows: NDArray[np.uint64], *, to_blocks: bool
    ) -> Digests:
        """Copy each block [n] to the row at its address [n], or back: [n, L] digests.

        The digests are those of the words that were copied. IndexError for a block outside the
        pools.
        """
        out = np.empty((len(blocks), len(self._layers)), dtype=np.uint64)
        self._check(blocks)
        wanted = np.ascontiguousarray(blocks, dtype=np.int32)
        p = abi.BlockRowsParams()
        p.layers, p.blocks = self._layers.ctypes.data, wanted.ctypes.data
        p.rows, p.out = rows.ctypes.data, out.ctypes.data
        p.num_layers, p.num_blocks = len(self._layers), len(wanted)
        p.block_stride, p.layer_bytes = self._stride, self._layer_bytes
        p.direction = int(to_blocks)
        native.load_library().sw_block_rows(ctypes.addressof(p))
        return out

    def read_records(
        self,
        blocks: NDArray[np.int32],
        fd: int,
        offset: int,
        record_bytes: int,
        buffer: NDArray[np.uint8],
        heads: NDArray[np.uint8],
    ) -> Digests:
        """Read neighbouring records of a file, and copy their rows into blocks [n].

        A record is a head, a row, and padding; those of the file begin at `offset`. `heads` [n,
        head_bytes] uint8 takes the heads, `buffer` (at least a record) what is read at a time;
        both are contiguous. [m, L] digests of what was copied: of the first m records, where the
        file ends before the next one. IndexError for a block outside the pools, ValueError for a
        row that does not fit its record, OSError as the system gave it.
        """
        self._check(blocks)
        if heads.shape[1] + len(self._layers) * self._layer_bytes > record_bytes:
            raise ValueError(f"records of {record_bytes} bytes hold no head and row")
        if buffer.size < record_bytes:
            raise ValueError(f"{buffer.size} bytes hold no record of {record_bytes}")
        out = np.empty((len(blocks), len(self._layers)), dtype=np.uint64)
        wanted = np.ascontiguousarray(blocks, dtype=np.int32)
        p = abi.ReadRecordsParams()
        p.layers, p.blocks = self._layers.ctypes.data, wanted.ctypes.data
        p.buffer, p.heads, p.out = buffer.ctypes.data, heads.ctypes.data, out.ctypes.data
        p.num_layers, p.num_records = len(self._layers), len(blocks)
        p.block_stride, p.layer_bytes = self._stride, self._layer_bytes
        p.offset, p.record_bytes, p.head_bytes = offset, record_bytes, heads.shape[1]
        p.buffer_bytes, p.fd = buffer.size, fd
        native.load_library().sw_read_records(ctypes.addressof(p))
        if p.error:
            raise OSError(p.error, os.strerror(p.error))
        found: Digests = out[: p.num_read]
        return found

    def _check(self, blocks: NDArray[np.int32]) -> None:
        if len(blocks) and not 0 <= int(blocks.min()) <= int(blocks.max()) < self._num_blocks:
            raise IndexError(f"blocks {blocks} of a pool of {self._num_blocks}")


def _checked_blocks(kv: Tensor, blocks: Tensor) -> Tensor:
    wanted = blocks.to(torch.int32).contiguous()
    bad = (wanted < 0) | (wanted >= kv.shape[0])
    if bool(bad.any()):
        raise IndexError(f"block {int(wanted[bad][0])} of a pool of {kv.shape[0]} blocks")
    return wanted


def _block_bytes(kv: Tensor) -> int:
    return kv[0].numel() * kv.element_size()


def _native_digests(kv: Tensor, blocks: Tensor) -> Digests:
    out = np.empty(blocks.shape[0], dtype=np.uint64)
    if out.size == 0:
        return out
    p = abi.DigestParams()
    p.base, p.blocks, p.out = kv.data_ptr(), blocks.data_ptr(), out.ctypes.data
    p.num_blocks = blocks.shape[0]
    p.block_stride = kv.stride(0) * kv.element_size()
    p.block_bytes = _block_bytes(kv)
    native.load_library().sw_digest(ctypes.addressof(p))
    return out


def _mix(x: Digests) -> Digests:
    x = (x ^ (x >> np.uint64(32))) * _MIX_A
    x = (x ^ (x >> np.uint64(29))) * _MIX_B
    return x ^ (x >> np.uint64(32))


def numpy_digests(kv: Tensor, blocks: Tensor) -> Digests:
    """Compute the same digests without the native library."""
    size = _block_bytes(kv)
    num_words = -(-size // 8)
    order = np.arange(1, num_words + 1, dtype=np.uint64)
    keys = order * np.uint64(_GOLDEN)
    out = np.empty(blocks.shape[0], dtype=np.uint64)
    for first in range(0, blocks.shape[0], _CHUNK_BLOCKS):
        part = blocks[first : first + _CHUNK_BLOCKS].to(torch.int64)
        rows = kv.index_select(0, part).contiguous().view(torch.uint8).reshape(part.shape[0], -1)
        words = np.zeros((part.shape[0], num_words * 8), dtype=np.uint8)
        words[:, :size] = rows.numpy()
        sums = _mix(words.view("<u8") ^ keys).sum(axis=1, dtype=np.uint64)
        out[first : first + _CHUNK_BLOCKS] = _mix(sums + np.uint64(size))
    return out


def copy_blocks(kv: Tensor, src: Tensor, dst: Tensor) -> None:
    """Set kv[dst[i]] = kv[src[i]] for all i, as if every source were read before any write.

    src, dst [n] integers; `dst` must not repeat (ValueError); IndexError outside kv.
    """
    sources, targets = _checked_blocks(kv, src), _checked_blocks(kv, dst)
    if sources.shape != targets.shape:
        raise ValueError(f"{sources.shape[0]} sources for {targets.shape[0]} targets")
    if len(set(targets.tolist())) != targets.shape[0]:
        raise ValueError(f"a block is the target of two copies: {targets.tolist()}")
    kv[targets.to(torch.int64)] = kv.index_select(0, sources.to(torch.int64))
