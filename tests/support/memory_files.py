"""Folders on files in memory, for tests that read or sync thousands of times."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MEMORY = Path("/dev/shm")


@contextmanager
def quick_folder(otherwise: Path) -> Iterator[Path]:
    """Give a folder in memory that is removed afterwards; `otherwise` where there is none."""
    if not os.access(MEMORY, os.W_OK):
        yield otherwise
        return
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        yield Path(name)
