"""Load the native library, once, and say why where it cannot be.

The library lies beside this module. In a source tree one that is missing or does not match the
sources is compiled at first use (some seconds); an installed package brings its own.

This module does not choose a backend and does not fall back to anything.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from pathlib import Path

from statewise.kernels import build
from statewise.kernels.abi import ABI_VERSION, STRUCTS
from statewise.kernels.sparse_abi import SPARSE_STRUCTS

logger = logging.getLogger(__name__)

LIBRARY_PATH = Path(__file__).resolve().parent / build.LIBRARY_NAME
_OPERATIONS = (
    *("sw_attention", "sw_append", "sw_rms_norm", "sw_rope", "sw_gated_act"),
    *("sw_linear", "sw_pack_tiles", "sw_unpack_rows", "sw_digest", "sw_block_rows"),
    "sw_read_records",
    *("sw_quantise", "sw_pack_codes", "sw_unpack_coded_rows", "sw_coded_bytes"),
    *("sw_sparse_attend", "sw_select", "sw_pool_windows"),
    *("sw_layers", "sw_layers_arena"),
    *("sw_delta_rule", "sw_causal_conv", "sw_sinkhorn"),
)


class NativeUnavailableError(RuntimeError):
    """The native library cannot be loaded here; the message says why and what to do."""


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.sw_abi_version.restype = ctypes.c_int32
    library.sw_source_digest.restype = ctypes.c_char_p
    library.sw_isa.restype = ctypes.c_char_p
    library.sw_set_isa.argtypes = [ctypes.c_char_p]
    library.sw_struct_size.restype = ctypes.c_int64
    library.sw_sparse_struct_size.restype = ctypes.c_int64
    library.sw_coded_bytes.restype = ctypes.c_int64
    library.sw_layers_arena.restype = ctypes.c_int64
    for name in _OPERATIONS:
        getattr(library, name).argtypes = [ctypes.c_void_p]
    return library


def _is_current(path: Path) -> bool:
    """Whether the library at `path` was built from the sources beside it.

    Reads the file instead of loading it: a loaded library could not be replaced.
    """
    try:
        return build.source_digest().encode() + b"\0" in path.read_bytes()
    except OSError:
        return False


def _refresh(path: Path) -> None:
    """In a writable source tree, compile what is missing or out of date."""
    in_source_tree = build.SOURCE_DIR.is_dir() and os.access(path.parent, os.W_OK)
    if not in_source_tree:
        return
    built = build.modified_ns(path)
    if _is_current(path):
        return
    logger.info("compiling the native kernels (some seconds, once)")
    build.build_if_needed(path, built)


@functools.cache
def load_library() -> ctypes.CDLL:
    """Load the library, its functions typed; NativeUnavailableError if it cannot be had."""
    try:
        _refresh(LIBRARY_PATH)
        library = _open(LIBRARY_PATH)
    except (OSError, build.BuildError) as error:
        raise NativeUnavailableError(
            f"native kernels: {error}; build them with: python -m statewise.kernels.build"
        ) from error
    if library.sw_abi_version() != ABI_VERSION:
        raise NativeUnavailableError(
            f"native kernels have ABI {library.sw_abi_version()}, expected {ABI_VERSION}; "
            "rebuild them with: python -m statewise.kernels.build"
        )
    sizes = [library.sw_struct_size(i) for i in range(len(STRUCTS))]
    sizes += [library.sw_sparse_struct_size(i) for i in range(len(SPARSE_STRUCTS))]
    structs = (*STRUCTS, *SPARSE_STRUCTS)
    assert sizes == [ctypes.sizeof(s) for s in structs], "parameter structs differ from abi.h"
    return library


@functools.cache
def is_available() -> bool:
    """Whether the library loads (compiling it first where needed)."""
    try:
        load_library()
    except NativeUnavailableError:
        return False
    return True


def set_num_threads(num_threads: int) -> None:
    """Threads of every native operation, the caller included (at least 1)."""
    load_library().sw_set_num_threads(num_threads)


def get_num_threads() -> int:
    """Threads of every native operation."""
    return int(load_library().sw_num_threads())


def set_spin(iterations: int) -> None:
    """How long an idle thread polls before it sleeps (0: sleeps at once)."""
    load_library().sw_set_spin(iterations)


def instruction_set() -> str:
    """Word for the kernels in use: amx, avx512bf16, avx512, avx2 or portable."""
    return bytes(load_library().sw_isa()).decode()


def set_instruction_set(name: str) -> bool:
    """Use the named kernels ("" for the best); False where this machine cannot run them."""
    return bool(load_library().sw_set_isa(name.encode()))
