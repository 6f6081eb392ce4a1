"""Compile the native library: `python -m statewise.kernels.build`.

The sources are plain C++20 with a C ABI, so building is a handful of compiler runs and one link;
it takes some seconds and needs no torch. Each instruction set's file has its own flags, and the
library chooses among them when it is loaded: one build serves every machine of an architecture.
The digest of sources and flags is compiled in, so that a library that does not match the sources
beside it is noticed and rebuilt instead of used.

This module does not load the library, and never fails an installation: the caller decides.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

SOURCE_DIR = Path(__file__).resolve().parent / "csrc"
LIBRARY_NAME = "_native.so"

_COMMON = (
    *("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast"),
    *("-fno-math-errno", "-fno-exceptions", "-fno-rtti", "-pthread"),
    *("-Wall", "-Wextra", "-Wno-psabi", "-Wno-uninitialized", "-Wno-maybe-uninitialized"),
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl")
_SHARED_SOURCES = (
    "isa",
    "pool",
    "work",
    "top",
    "tiles",
    "coded",
    "library",
    "layers",
    "records",
    "sparse_library",
    "isa_portable",
)
_X86_SOURCES: dict[str, tuple[str, ...]] = {
    "isa_avx2": _AVX2,
    "isa_avx512": _AVX512,
    "isa_avx512bf16": (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
}


class BuildError(RuntimeError):
    """No usable compiler, or it failed; the message holds its output."""


def is_x86() -> bool:
    """Whether this machine is x86-64."""
    return platform.machine().lower() in ("x86_64", "amd64")


def source_flags() -> dict[str, tuple[str, ...]]:
    """Source file stem -> its own compiler flags, on this architecture."""
    files: dict[str, tuple[str, ...]] = dict.fromkeys(_SHARED_SOURCES, ())
    if is_x86():
        files.update(_X86_SOURCES)
    return files


def source_digest(source_dir: Path = SOURCE_DIR) -> str:
    """Digest of every source file, the flags and the architecture."""
    digest = hashlib.sha256(repr((_COMMON, sorted(source_flags().items()))).encode())
    digest.update(platform.machine().encode())
    for path in sorted(source_dir.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def find_compiler() -> str:
    """Path of a C++ compiler ($CXX first); BuildError names what to install."""
    for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise BuildError("no C++ compiler found; install g++ (Debian: apt install g++) or set CXX")


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{result.stderr.strip()}")


def compile_library(target: Path, source_dir: Path = SOURCE_DIR) -> Path:
    """Compile into `target` (replaced in one step, so a running process keeps its own copy)."""
    compiler = find_compiler()
    define = f'-DSW_SOURCE_DIGEST="{source_digest(source_dir)}"'
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as folder:
        jobs = []
        for stem, flags in source_flags().items():
            output = Path(folder, f"{stem}.o")
            source = str(source_dir / f"{stem}.cpp")
            jobs.append([compiler, *_COMMON, *flags, define, "-c", source, "-o", str(output)])
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(_run, jobs))
        objects = [job[-1] for job in jobs]
        linked = Path(folder, LIBRARY_NAME)
        _run([compiler, "-shared", "-pthread", "-o", str(linked), *objects])
        os.replace(linked, target)
    return target


@contextlib.contextmanager
def _build_lock(target: Path) -> Iterator[None]:
    """One build at a time per target, across processes."""
    import fcntl

    with open(target.with_suffix(".lock"), "w", encoding="utf-8") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def modified_ns(target: Path) -> int | None:
    """When `target` was built, in ns; None where it is not there."""
    try:
        return target.stat().st_mtime_ns
    except OSError:
        return None


def build_if_needed(target: Path, built_before: int | None) -> None:
    """Compile unless another process has built `target` meanwhile.

    `built_before` is `modified_ns(target)` from when the caller found it missing or stale.
    """
    with _build_lock(target):
        if modified_ns(target) == built_before:
            compile_library(target)


def main() -> int:
    """Build beside this module; the exit status says whether it worked."""
    target = Path(__file__).resolve().parent / LIBRARY_NAME
    try:
        compile_library(target)
    except BuildError as error:
        print(f"native kernels not built: {error}", file=sys.stderr)
        return 1
    print(f"built {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
