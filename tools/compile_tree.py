#!/usr/bin/env python
"""Compile the tree's inner modules with mypyc; optional. See src/statewise/compiled.py.

Needs the development packages (mypy) and a C compiler, and takes a minute or two. A change of the
sources makes what was compiled unused, until this runs again.

    usage: python tools/compile_tree.py [--remove]
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "radix"
SETUP = """
from mypyc.build import mypycify
from setuptools import setup

setup(
    name={group!r},
    ext_modules=mypycify(["--strict", *{files!r}], opt_level="3", group_name={group!r}),
)
"""


def load_description() -> ModuleType:
    """Load src/statewise/compiled.py alone: the package would load what it describes."""
    file = ROOT / "src" / "statewise" / "compiled.py"
    spec = importlib.util.spec_from_file_location("_compiled_tree", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


compiled = load_description()


def lay_out(folder: Path) -> list[str]:
    """Copy the sources where a compiler finds them as a package; the files to compile."""
    package = folder / "statewise" / "radix"
    package.mkdir(parents=True)
    for name in ("__init__.py", "py.typed"):
        (package.parent / name).touch()
    for source in SOURCES.glob("*.py"):
        shutil.copy(source, package)
    return [f"statewise/radix/{name}.py" for name in compiled.MODULES]


def build(folder: Path, files: list[str]) -> None:
    """Compile in `folder`; the results stand beside the sources."""
    (folder / "setup.py").write_text(SETUP.format(files=files, group=compiled.GROUP))
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(command, cwd=folder, check=True)


def install(folder: Path, made_from: str) -> int:
    """Move what was built into the package; returns the number of files."""
    target = SOURCES / compiled.FOLDER
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    suffix = EXTENSION_SUFFIXES[0]
    built = [folder / (compiled.LIBRARY + suffix)]
    built += [folder / "statewise" / "radix" / (name + suffix) for name in compiled.MODULES]
    for file in built:
        shutil.move(file, target / file.name)
    (target / "digest").write_text(made_from)
    return len(built)


def main() -> None:
    """Compile, or remove what was compiled."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--remove", action="store_true", help="go back to the sources")
    if parser.parse_args().remove:
        shutil.rmtree(SOURCES / compiled.FOLDER, ignore_errors=True)
        return
    made_from = compiled.digest(SOURCES)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build(folder, lay_out(folder))
        print(f"{install(folder, made_from)} files in {SOURCES / compiled.FOLDER}")


if __name__ == "__main__":
    main()
