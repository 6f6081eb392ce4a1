"""Weights of a GGUF file under Hugging Face names: dequantised, rows and norms as those expect.

Tensors are dequantised in pieces of whole rows that fit the processor's cache and written straight
to their place in the model's dtype.

This module does not parse the file (`gguf_file`) and does not know layouts of blocks
(`gguf_quants`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from statewise.kernels.coded import Codes
from statewise.runtime.models.gguf_file import GgufFile, GgufTensor
from statewise.runtime.models.gguf_names import (
    PERMUTED_ARCHITECTURES,
    ROPE_DIVISORS,
    gguf_architecture,
    hf_tensor_name,
)
from statewise.runtime.models.gguf_quants import coded_blocks, dequantise, has_codes

PIECE_WEIGHTS = 1 << 17  # weights dequantised at once: half a MiB of float32


class GgufSource:
    """All weights of one GGUF file; `head_dim` undoes the permutation of q and k."""

    def __init__(self, file: GgufFile, head_dim: int) -> None:
        self._file = file
        self._arch = gguf_architecture(file)
        self._head_dim = head_dim
        self._tensors: dict[str, GgufTensor] = {}
        for own_name, tensor in file.tensors.items():
            if own_name != ROPE_DIVISORS:
                # An unknown tensor keeps its own name and is reported as unexpected.
                self._tensors[hf_tensor_name(self._arch, own_name) or own_name] = tensor

    def names(self) -> Iterable[str]:
        """All tensor names."""
        return self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._tensors[name].shape

    def size_bytes(self, name: str) -> int:
        """Bytes of a tensor in the file."""
        return self._tensors[name].size

    def place(self, name: str) -> str:
        """File and tensor for messages."""
        tensor = self._tensors.get(name)
        own_name = f" ({tensor.name})" if tensor and tensor.name != name else ""
        return f"{self._file.path}: {name!r}{own_name}"

    def read_into(self, name: str, out: Tensor) -> None:
        """Dequantise a tensor into `out`."""
        if self._is_permuted(name):
            # [heads, pair element, half, in] in the file; [heads, half, pair element, in] wanted.
            rows = out.view(-1, 2, self._head_dim // 2, *out.shape[1:])
            value = torch.empty(out.shape, dtype=out.dtype)
            self._dequantise_into(name, value)
            rows.copy_(value.view(-1, self._head_dim // 2, 2, *out.shape[1:]).transpose(1, 2))
            return
        self._dequantise_into(name, out)
        if self._arch == "gemma3" and name.endswith("norm.weight"):
            out.sub_(1.0)

    def codes(self, name: str) -> Codes | None:
        """A quantised matrix as the codes that the file holds; None for any other tensor."""
        tensor = self._tensors[name]
        if not has_codes(tensor.type) or len(tensor.shape) != 2:
            return None
        num_rows, width = tensor.shape
        with np.errstate(invalid="ignore", over="ignore"):
            blocks = coded_blocks(self._file.data(tensor), tensor.type)
        codes = Codes(
            blocks.codes.reshape(num_rows, width),
            blocks.scales.reshape(num_rows, -1),
            None if blocks.offsets is None else blocks.offsets.reshape(num_rows, -1),
        )
        if not self._is_permuted(name):
            return codes
        order = np.arange(num_rows).reshape(-1, self._head_dim // 2, 2)
        return codes.rows(order.transpose(0, 2, 1).reshape(-1))

    def buffers(self) -> Iterator[tuple[str, memoryview]]:
        """Identity and bytes of every tensor, by name."""
        for name, tensor in sorted(self._tensors.items()):
            identity = f"{name};{tensor.type.name};{tensor.shape}"
            yield identity, self._file.data(tensor).data

    def close(self) -> None:
        """Forget the file; its last view unmaps it."""
        self._tensors.clear()

    def _is_permuted(self, name: str) -> bool:
        is_q_or_k = ".q_proj." in name or ".k_proj." in name
        return is_q_or_k and self._arch in PERMUTED_ARCHITECTURES

    def _dequantise_into(self, name: str, out: Tensor) -> None:
        tensor = self._tensors[name]
        data, quant = self._file.data(tensor), tensor.type
        rows = out.view(out.shape[0], -1)
        row_weights = rows.shape[1]
        if row_weights % quant.block_size:  # a quantised vector: one row of whole blocks
            rows, row_weights = out.view(1, -1), out.numel()
        row_bytes = row_weights // quant.block_size * quant.block_bytes
        step = max(1, PIECE_WEIGHTS // max(1, row_weights))
        for first in range(0, rows.shape[0], step):
            part = rows[first : first + step]
            piece = dequantise(data[first * row_bytes :][: part.shape[0] * row_bytes], quant)
            part.copy_(_tensor(piece).view(part.shape))


def _tensor(array: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> Tensor:
    """Tensor over the array (copied where the array is a read-only view of the file)."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())
