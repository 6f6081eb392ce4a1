"""Run tests on each instruction set that this machine has, and on several thread counts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from statewise.kernels import native

INSTRUCTION_SETS = ("amx", "avx512bf16", "avx512", "avx2", "portable")

needs_native = pytest.mark.skipif(
    not native.is_available(), reason="no compiler: the native kernels cannot be built"
)


@contextlib.contextmanager
def native_setting(instruction_set: str, num_threads: int = 1) -> Iterator[None]:
    """Use one instruction set and thread count; skips where the machine has no such set."""
    threads = native.get_num_threads()
    if not native.set_instruction_set(instruction_set):
        pytest.skip(f"this machine has no {instruction_set}")
    native.set_num_threads(num_threads)
    try:
        yield
    finally:
        native.set_instruction_set("")
        native.set_num_threads(threads)
