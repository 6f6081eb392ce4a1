"""Read safetensors checkpoints: one file, or shards with an index.

Files are mapped, not read: a tensor's bytes are touched once, when they are converted into the
model. The header is checked before anything is believed: sizes, offsets, dtypes, and that the data
of every tensor lies inside the file, so a truncated download is named with a tensor.

Format: u64 length of the header, a JSON object name -> {dtype, shape, data_offsets}, then the data.

This module does not know which tensors a model needs.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from statewise.runtime.errors import ModelLoadError
from statewise.runtime.models.mapped_file import map_file

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
MAX_HEADER_BYTES = 100 << 20
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # byte offset in the file
    size: int  # bytes


class SafetensorsSource:
    """All tensors of a Hugging Face directory; holds its files mapped until `close`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._maps: dict[Path, mmap.mmap] = {}
        self._entries: dict[str, Entry] = {}
        try:
            for file, expected in checkpoint_files(directory).items():
                self._open(file, expected)
        except BaseException:
            self.close()
            raise

    def names(self) -> Iterable[str]:
        """All tensor names."""
        return self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._entries[name].shape

    def size_bytes(self, name: str) -> int:
        """Bytes of a tensor in its file."""
        return self._entries[name].size

    def place(self, name: str) -> str:
        """File and tensor for messages."""
        entry = self._entries.get(name)
        return f"{entry.file if entry else self._directory}: {name!r}"

    def read_into(self, name: str, out: Tensor) -> None:
        """Write a tensor to `out`, converted to its dtype."""
        entry = self._entries[name]
        if entry.size == 0:
            return
        dtype = DTYPES[entry.dtype]
        count = math.prod(entry.shape)
        flat = torch.frombuffer(
            self._maps[entry.file], dtype=dtype, count=count, offset=entry.start
        )
        out.copy_(flat.view(entry.shape))

    def codes(self, name: str) -> None:
        """No matrix is kept as codes that the kernels know."""
        del name

    def buffers(self) -> Iterator[tuple[str, memoryview]]:
        """Identity and bytes of every tensor, by name."""
        for name, entry in sorted(self._entries.items()):
            whole = memoryview(self._maps[entry.file])
            yield (
                f"{name};{entry.dtype};{entry.shape}",
                whole[entry.start : entry.start + entry.size],
            )

    def close(self) -> None:
        """Forget the mapped files; the last view of each unmaps it."""
        self._maps.clear()

    def _open(self, file: Path, expected: frozenset[str] | None) -> None:
        mapped, header, data_start = _open_header(file)
        self._maps[file] = mapped
        tensors = {n: v for n, v in header.items() if n != "__metadata__"}
        for name in sorted(expected or ()):
            if name not in tensors:
                raise ModelLoadError(f"{file}: {name!r}: tensor is missing, the index lists it")
        for name, value in tensors.items():
            if expected is not None and name not in expected:
                raise ModelLoadError(f"{file}: {name!r}: tensor is not in {INDEX_NAME}")
            self._entries[name] = _entry(file, name, value, data_start, len(mapped))


def checkpoint_files(directory: Path) -> dict[Path, frozenset[str] | None]:
    """Files of a checkpoint with the names each must hold (None: any). ModelLoadError if none."""
    index = directory / INDEX_NAME
    if index.is_file():
        return _indexed_files(index)
    single = directory / SINGLE_NAME
    if single.is_file():
        return {single: None}
    found = sorted(directory.glob("*.safetensors"))
    if len(found) == 1:
        return {found[0]: None}
    raise ModelLoadError(
        f"{directory}: no weights: expected {SINGLE_NAME} or {INDEX_NAME}"
        + (" (several .safetensors files but no index)" if found else "")
    )


def _indexed_files(index: Path) -> dict[Path, frozenset[str] | None]:
    try:
        weight_map: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
        files = {name: index.parent / file for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index}: not an index with a weight map: {error}") from error
    names: dict[Path, set[str]] = {}
    for name, file in files.items():
        if file.parent != index.parent:
            raise ModelLoadError(f"{index}: {name!r}: file {file} is outside the directory")
        names.setdefault(file, set()).add(name)
    for file, held in names.items():
        if not file.is_file():
            raise ModelLoadError(f"{file}: file is missing ({sorted(held)[0]!r} is in it)")
    return {file: frozenset(held) for file, held in names.items()}


def _open_header(file: Path) -> tuple[mmap.mmap, dict[str, Any], int]:
    """Map a file; return (map, header, offset of the data)."""
    # Copy on write: torch wants a writable buffer, nothing ever writes to it.
    mapped = map_file(file, 8, mmap.ACCESS_COPY)
    size = len(mapped)
    length = int.from_bytes(mapped[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise ModelLoadError(f"{file}: not a safetensors file (header of {length} bytes)")
    if 8 + length > size:
        raise ModelLoadError(f"{file}: truncated inside the header ({size} bytes)")
    try:
        header = json.loads(mapped[8 : 8 + length])
    except ValueError as error:
        raise ModelLoadError(f"{file}: the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise ModelLoadError(f"{file}: the header is not an object")
    return mapped, header, 8 + length


def _entry(file: Path, name: str, value: Any, data_start: int, file_size: int) -> Entry:
    """Check one header entry against the file."""
    place = f"{file}: {name!r}"
    try:
        dtype, shape = value["dtype"], tuple(value["shape"])
        begin, end = value["data_offsets"]
        count = math.prod(shape)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"{place}: malformed header entry: {error}") from error
    if dtype not in DTYPES:
        raise ModelLoadError(f"{place}: dtype {dtype!r} is not supported")
    whole = all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end))
    if not whole or end - begin != count * DTYPES[dtype].itemsize:
        raise ModelLoadError(f"{place}: offsets {begin}..{end} do not fit {dtype} {list(shape)}")
    if data_start + end > file_size:
        raise ModelLoadError(
            f"{place}: truncated: the file has {file_size} bytes, "
            f"the tensor ends at {data_start + end}"
        )
    return Entry(file, dtype, shape, data_start + begin, end - begin)
