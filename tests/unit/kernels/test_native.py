"""Loading the library: structs agree, instruction sets and threads are chosen, builds are fresh."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from statewise.kernels import abi, build, native
from statewise.kernels.cpu_backend import CpuOps
from support.native_kernels import INSTRUCTION_SETS, native_setting, needs_native


@needs_native
def test_structs_have_the_sizes_that_the_library_compiled() -> None:
    library = native.load_library()
    sizes = [library.sw_struct_size(i) for i in range(len(abi.STRUCTS) + 1)]
    assert sizes == [*(ctypes.sizeof(s) for s in abi.STRUCTS), 0]
    assert library.sw_abi_version() == abi.ABI_VERSION


@needs_native
def test_instruction_sets_are_chosen_by_name() -> None:
    best = native.instruction_set()
    assert best in INSTRUCTION_SETS
    assert native.set_instruction_set("portable")
    assert native.instruction_set() == "portable"
    assert not native.set_instruction_set("avx1024")
    assert native.instruction_set() == "portable"
    assert native.set_instruction_set("")
    assert native.instruction_set() == best


@needs_native
def test_thread_counts_are_at_least_one() -> None:
    before = native.get_num_threads()
    try:
        for wanted, got in ((3, 3), (1, 1), (0, 1), (-5, 1)):
            native.set_num_threads(wanted)
            assert native.get_num_threads() == got
    finally:
        native.set_num_threads(before)


@needs_native
def test_the_pool_survives_resizing_sleeping_and_callers_in_several_threads() -> None:
    ops = CpuOps()
    x, weight = torch.randn(256, 640), torch.randn(640)
    expected = ops.rms_norm(x, weight, 1e-5)
    wrong: list[int] = []

    def call(times: int) -> None:
        for i in range(times):
            native.set_num_threads(1 + i % 4)
            native.set_spin(0 if i % 3 else 400)
            if not torch.equal(ops.rms_norm(x, weight, 1e-5), expected):
                wrong.append(i)

    with native_setting("", num_threads=2):
        callers = [threading.Thread(target=call, args=(60,)) for _ in range(3)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        native.set_spin(400)
    assert wrong == []


FORKED = """
import os
import torch
from statewise.kernels import native
from statewise.kernels.cpu_backend import CpuOps
torch.set_num_threads(1)
native.set_num_threads(2)
ops, x, weight = CpuOps(), torch.ones(256, 640), torch.ones(640)
expected = ops.rms_norm(x, weight, 0.0)
pid = os.fork()
equal = torch.equal(ops.rms_norm(x, weight, 0.0), expected)
if pid == 0:
    os._exit(0 if equal else 1)
assert equal
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
print("both right")
"""


@needs_native
@pytest.mark.slow
def test_the_pool_works_on_both_sides_of_a_fork() -> None:
    result = subprocess.run(
        [sys.executable, "-P", "-c", FORKED],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.stdout.strip() == "both right", result.stderr


def test_without_a_compiler_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(build.BuildError, match="install g\\+\\+"):
        build.compile_library(tmp_path / "out.so")
    monkeypatch.setattr(native, "LIBRARY_PATH", tmp_path / "missing.so")
    with pytest.raises(native.NativeUnavailableError, match=r"no C\+\+ compiler.*kernels\.build"):
        native.load_library.__wrapped__()


def test_a_compiler_that_fails_shows_its_output(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "broken-compiler"
    compiler.write_text("#!/bin/sh\necho 'no such flag' >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(build.BuildError, match="no such flag"):
        build.compile_library(tmp_path / "out.so")
    assert not (tmp_path / "out.so").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["broken-compiler"]


def test_a_library_of_other_sources_is_rebuilt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = tmp_path / build.LIBRARY_NAME
    built: list[Path] = []
    monkeypatch.setattr(build, "compile_library", built.append)
    native._refresh(target)
    assert built == [target], "missing"
    target.write_bytes(b"digest of something else\0")
    native._refresh(target)
    assert built == [target, target], "out of date"
    target.write_bytes(b"..." + build.source_digest().encode() + b"\0...")
    native._refresh(target)
    assert built == [target, target], "up to date"


def test_two_processes_do_not_build_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = tmp_path / build.LIBRARY_NAME
    target.write_bytes(b"old")
    seen = target.stat().st_mtime_ns
    target.write_bytes(b"new, from another process")
    os.utime(target, ns=(seen + 10**9, seen + 10**9))
    built: list[Path] = []
    monkeypatch.setattr(build, "compile_library", built.append)
    build.build_if_needed(target, built_before=seen)
    assert built == []
    build.build_if_needed(target, built_before=seen + 10**9)
    assert built == [target]


def test_the_digest_follows_every_source_file(tmp_path: Path) -> None:
    copy = tmp_path / "csrc"
    shutil.copytree(build.SOURCE_DIR, copy)
    before = build.source_digest(copy)
    assert before == build.source_digest()
    for path in sorted(copy.iterdir()):
        content = path.read_bytes()
        path.write_bytes(content + b"\n// more\n")
        assert build.source_digest(copy) != before, path.name
        path.write_bytes(content)
    assert build.source_digest(copy) == before


def test_every_source_is_compiled_or_included() -> None:
    stems = {p.stem for p in build.SOURCE_DIR.glob("*.cpp")}
    x86 = {"isa_avx2", "isa_avx512", "isa_avx512bf16"}
    assert stems == set(build.source_flags()) | x86
    text = "".join(p.read_text() for p in build.SOURCE_DIR.iterdir())
    for header in build.SOURCE_DIR.glob("*.h"):
        assert f'#include "{header.name}"' in text, header.name
