"""Map a model file into memory, with errors that name it.

This module does not look into files.
"""

from __future__ import annotations

import mmap
from pathlib import Path

from statewise.runtime.errors import ModelLoadError


def map_file(path: Path, least_bytes: int, access: int) -> mmap.mmap:
    """Map a file of at least `least_bytes`; ModelLoadError where it is unreadable or shorter."""
    try:
        with path.open("rb") as handle:
            size = path.stat().st_size
            if size < least_bytes:
                raise ModelLoadError(f"{path}: truncated: {size} bytes are no header")
            return mmap.mmap(handle.fileno(), 0, access=access)
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from error
