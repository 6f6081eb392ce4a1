"""Device blocks as transfers see them: bytes that are copied out, and in.

This module does not know which blocks may be touched, and copies nothing itself (`device_io`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from statewise.runtime.tiers.buffers import Bytes, Row

Digests = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class FileRun:
    """Neighbouring records of an open file: of each a head, then a row, then padding. Bytes."""

    fd: int
    offset: int
    head_bytes: int
    record_bytes: int


class BlockIO(Protocol):
    """Bytes of device blocks. Called from I/O threads, for blocks that are leased."""

    def read(self, group: int, blocks: Sequence[int], rows: Sequence[Row]) -> Digests:
        """Copy blocks into rows; [n, num_layers] digests of the blocks."""
        ...

    def write(self, group: int, blocks: Sequence[int], rows: Sequence[Row]) -> Digests:
        """Copy rows into blocks; [n, num_layers] digests of what went into them."""
        ...

    def write_from_file(
        self, group: int, blocks: Sequence[int], run: FileRun, buffer: Bytes, heads: Bytes
    ) -> Digests | None:
        """Copy the rows of a file's records into blocks, and their heads to `heads` [n, bytes].

        `buffer` holds what is read at a time, at least a record. [m, num_layers] digests of what
        went into the first m blocks; m < n where the file ended before. OSError as the system gave
        it. None, and nothing is done, where this device takes rows from memory alone.
        """
        ...
