"""The prefix tree's inner modules compiled, where somebody has compiled them: the same source.

    radix/*.py  --mypyc, by tools/compile_tree.py-->  radix/_compiled/*.so, digest of the source

Importing `statewise` makes Python find those instead of the sources, if they were made by this
Python from exactly these sources; otherwise the modules are read as they are. Nothing else
changes: the same names, the same tests. What is compiled is what every request runs through; the
planner and what is asked for rarely stay as they are.

    STATEWISE_COMPILED    0: never    1: ImportError where it cannot be used    unset: where it can

This module does not compile, and imports nothing of the package.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

PACKAGE = "statewise.radix"
MODULES = (
    "key",
    "lease",
    "match",
    "need",
    "node",
    "order",
    "publication",
    "results",
    "rows",
    "segment",
    "topology",
    "trailing",
    "tree",
    "validation",
)
GROUP = "statewise_radix"
LIBRARY = f"{GROUP}__mypyc"  # holds the code; the modules' own files only name it
FOLDER = "_compiled"


class CompiledFinder(MetaPathFinder):
    """Finds the compiled modules of a folder under the names of their sources."""

    def __init__(self, folder: Path) -> None:
        suffix = EXTENSION_SUFFIXES[0]
        self.files = {f"{PACKAGE}.{name}": folder / (name + suffix) for name in MODULES}
        self.files[LIBRARY] = folder / (LIBRARY + suffix)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Describe the module's file; None for every other name."""
        file = self.files.get(fullname)
        return None if file is None else spec_from_file_location(fullname, file)


def digest(sources: Path) -> str:
    """Digest of what would be compiled, and of what it is compiled for."""
    state = hashlib.sha256(f"{sys.implementation.cache_tag} {EXTENSION_SUFFIXES[0]}".encode())
    for name in MODULES:
        state.update((sources / f"{name}.py").read_bytes())
    return state.hexdigest()


def problem(sources: Path) -> str:
    """Why the compiled modules cannot be used; empty where they can."""
    made_from = sources / FOLDER / "digest"
    if not made_from.exists():
        return "the tree is not compiled (tools/compile_tree.py does it)"
    if made_from.read_text() != digest(sources):
        return "the compiled tree was made from other sources, or by another Python"
    return ""


def find(sources: Path) -> CompiledFinder | None:
    """Finder of what was compiled from `sources`; None where it is not to be used.

    Raises ImportError where it must be used and cannot.
    """
    wish = os.environ.get("STATEWISE_COMPILED", "")
    if wish == "0":
        return None
    why_not = problem(sources)
    if why_not:
        if wish == "1":
            raise ImportError(why_not)
        return None
    return CompiledFinder(sources / FOLDER)


def use() -> None:
    """Let Python find compiled modules first, where there are any."""
    finder = find(Path(__file__).with_name("radix"))
    if finder is not None:
        sys.meta_path.insert(0, finder)
