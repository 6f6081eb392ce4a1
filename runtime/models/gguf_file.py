"""Open a GGUF file: metadata and where each tensor lies, in a fraction of a second.

The file is mapped; the header is walked once. Arrays are skipped over and read when asked for, so
that a process that needs only sizes does not decode a vocabulary of 262,144 strings. Every length
is checked against the file before it is believed: a truncated or foreign file gives a
`ModelLoadError` that names the file and the entry.

    "GGUF" | version u32 | tensors u64 | entries u64
    entry:  key string | type u32 | value          string: length u64 | bytes
    tensor: name string | dims u32 | dim u64 ... (innermost first) | type u32 | offset u64
    padding to `general.alignment` | data

This module does not interpret keys, and does not dequantise (`gguf_quants` does). No torch.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from statewise.runtime.errors import ModelLoadError
from statewise.runtime.models.mapped_file import map_file

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
STRING, ARRAY = 8, 9
SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "|b1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}


@dataclass(frozen=True)
class QuantType:
    """One storage type: `block_size` weights take `block_bytes` bytes."""

    name: str
    block_size: int
    block_bytes: int


QUANT_TYPES = {
    0: QuantType("F32", 1, 4),
    1: QuantType("F16", 1, 2),
    2: QuantType("Q4_0", 32, 18),
    3: QuantType("Q4_1", 32, 20),
    6: QuantType("Q5_0", 32, 22),
    7: QuantType("Q5_1", 32, 24),
    8: QuantType("Q8_0", 32, 34),
    12: QuantType("Q4_K", 256, 144),
    13: QuantType("Q5_K", 256, 176),
    14: QuantType("Q6_K", 256, 210),
    30: QuantType("BF16", 1, 2),
}


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies and how it is stored; `shape` has the outermost dimension first."""

    name: str
    shape: tuple[int, ...]
    type: QuantType
    start: int  # byte offset in the file
    size: int  # bytes


class GgufFile:
    """A mapped GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = map_file(path, len(MAGIC), mmap.ACCESS_READ)
        self._size = len(self._map)
        self._at = 0
        self._values: dict[str, Any] = {}
        self._arrays: dict[str, tuple[int, int, int]] = {}  # key -> (type, count, offset)
        self.tensors: dict[str, GgufTensor] = {}
        self._read_header()

    def __contains__(self, key: str) -> bool:
        return key in self._values or key in self._arrays

    def get(self, key: str, default: Any = None) -> Any:
        """Value of a metadata key: int, float, bool, str, numpy array, or list of str."""
        if key in self._arrays:
            self._values[key] = self._read_array(*self._arrays.pop(key), key)
        return self._values.get(key, default)

    def integer(self, key: str) -> int | None:
        """Value that must be an integer where it is there."""
        value = self.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise self.fail(f"metadata {key!r} must be an integer")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Value that must be true or false where it is there."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.fail(f"metadata {key!r} must be true or false")
        return value

    def text(self, key: str) -> str | None:
        """Value that must be a string where it is there."""
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.fail(f"metadata {key!r} must be a string")
        return value

    def strings(self, key: str) -> list[str] | None:
        """Value that must be an array of strings where it is there."""
        value = self.get(key)
        if value is not None and not isinstance(value, list):
            raise self.fail(f"metadata {key!r} must be an array of strings")
        return value

    def numbers(self, key: str, count: int) -> NDArray[Any] | None:
        """Value that must be an array of `count` numbers where it is there."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or len(value) != count:
            raise self.fail(f"metadata {key!r} must be an array of {count} numbers")
        return value

    def keys(self) -> list[str]:
        """All metadata keys."""
        return [*self._values, *self._arrays]

    def data(self, tensor: GgufTensor) -> NDArray[np.uint8]:
        """Bytes of a tensor as they are stored, without a copy."""
        return np.frombuffer(self._map, np.uint8, count=tensor.size, offset=tensor.start)

    def fail(self, message: str) -> ModelLoadError:
        """Error about this file."""
        return ModelLoadError(f"{self.path}: {message}")

    def _read_header(self) -> None:
        if self._map[:4] != MAGIC:
            raise self.fail("not a GGUF file")
        self._at = 4
        version = self._number("<u4", "version")
        if version not in VERSIONS:
            raise self.fail(f"GGUF version {version} is not supported; known: {VERSIONS}")
        num_tensors = self._count("number of tensors", 24)
        num_entries = self._count("number of metadata entries", 13)
        for _ in range(num_entries):
            self._read_entry()
        infos = [self._read_tensor_info() for _ in range(num_tensors)]
        alignment = self.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise self.fail(f"'general.alignment' is {alignment!r}")
        data_start = -(-self._at // alignment) * alignment
        for name, shape, type_id, offset in infos:
            self._add_tensor(name, shape, type_id, data_start + offset)

    def _read_entry(self) -> None:
        key = self._string("a metadata key")
        if key in self:
            raise self.fail(f"metadata key {key!r} occurs twice")
        type_id = int(self._number("<u4", key))
        if type_id == STRING:
            self._values[key] = self._string(key)
        elif type_id == ARRAY:
            self._skip_array(key)
        else:
            self._values[key] = self._number(self._scalar(type_id, key), key)

    def _skip_array(self, key: str) -> None:
        item = int(self._number("<u4", key))
        if item == STRING:
            count = self._count(key, 8)
            self._arrays[key] = (item, count, self._at)
            self._at = self._skip_strings(count, key)
            return
        size = np.dtype(self._scalar(item, key)).itemsize
        count = self._count(key, size)
        self._arrays[key] = (item, count, self._at)
        self._at += count * size

    def _skip_strings(self, count: int, key: str) -> int:
        """Offset after `count` strings."""
        at, unpack = self._at, struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                at += 8 + unpack(self._map, at)[0]
        except (struct.error, OverflowError) as error:
            raise self._truncated(key) from error
        if at > self._size:
            raise self._truncated(key)
        return at

    def _read_array(self, item: int, count: int, at: int, key: str) -> Any:
        if item != STRING:
            return np.frombuffer(self._map, SCALARS[item], count=count, offset=at).copy()
        unpack, data, strings = struct.Struct("<Q").unpack_from, self._map, []
        for _ in range(count):
            end = at + 8 + unpack(data, at)[0]
            strings.append(data[at + 8 : end])
            at = end
        try:
            return [s.decode() for s in strings]
        except UnicodeDecodeError as error:
            raise self.fail(f"metadata {key!r} is not UTF-8: {error}") from error

    def _read_tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string("a tensor's name")
        dims = int(self._number("<u4", name))
        if dims > MAX_DIMS:
            raise self.fail(f"tensor {name!r}: {dims} dimensions")
        shape = tuple(int(self._number("<u8", name)) for _ in range(dims))
        return name, shape[::-1], int(self._number("<u4", name)), int(self._number("<u8", name))

    def _add_tensor(self, name: str, shape: tuple[int, ...], type_id: int, start: int) -> None:
        quant = QUANT_TYPES.get(type_id)
        if quant is None:
            known = ", ".join(q.name for q in QUANT_TYPES.values())
            raise self.fail(f"tensor {name!r}: storage type {type_id} is not supported ({known})")
        if name in self.tensors:
            raise self.fail(f"tensor {name!r} occurs twice")
        if shape and shape[-1] % quant.block_size:
            raise self.fail(f"tensor {name!r}: {list(shape)} is not in whole {quant.name} blocks")
        size = math.prod(shape) // quant.block_size * quant.block_bytes
        if start + size > self._size:
            raise self.fail(
                f"tensor {name!r}: truncated: the file has {self._size} bytes, "
                f"the tensor ends at {start + size}"
            )
        self.tensors[name] = GgufTensor(name, shape, quant, start, size)

    def _scalar(self, type_id: int, key: str) -> str:
        if type_id not in SCALARS:
            raise self.fail(f"metadata {key!r}: value type {type_id} is not supported")
        return SCALARS[type_id]

    def _number(self, dtype: str, key: str) -> Any:
        size = np.dtype(dtype).itemsize
        if self._at + size > self._size:
            raise self._truncated(key)
        value = np.frombuffer(self._map, dtype, count=1, offset=self._at)[0].item()
        self._at += size
        return value

    def _count(self, key: str, item_bytes: int) -> int:
        """Read a count; a count of more items than the file could hold is a lie."""
        count = int(self._number("<u8", key))
        if count * item_bytes > self._size - self._at:
            raise self._truncated(key)
        return count

    def _string(self, key: str) -> str:
        length = self._count(key, 1)
        raw = self._map[self._at : self._at + length]
        self._at += length
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"{key}: not UTF-8: {error}") from error

    def _truncated(self, key: str) -> ModelLoadError:
        return self.fail(f"truncated or corrupt at {key!r} ({self._size} bytes)")
