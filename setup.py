"""Compile the native kernels into wheels; everything else is declared in pyproject.toml.

The compiler's work is done by kernels/build.py, which needs the standard library alone and is
loaded from its file, because the package's dependencies may not be there while it is built. Where
no compiler is found the wheel is built without the library, and plain torch computes. An editable
install compiles nothing here: the library is built in the source tree, by tools/setup or at first
use.

    STATEWISE_NATIVE=0    build without the library
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

PACKAGE = Path(__file__).resolve().parent / "src" / "statewise"


def load_builder() -> ModuleType:
    """Load kernels/build.py without importing the package."""
    spec = importlib.util.spec_from_file_location("_native_build", PACKAGE / "kernels" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BUILDER = load_builder()


def can_compile() -> bool:
    """Whether a wheel should carry the library, and a compiler is there to make it."""
    if os.environ.get("STATEWISE_NATIVE", "1") == "0":
        return False
    try:
        BUILDER.find_compiler()
    except BUILDER.BuildError as error:
        print(f"statewise: native kernels are left out: {error}", file=sys.stderr)
        return False
    return True


class NativeDistribution(Distribution):
    """Holds files for one platform where the library is compiled."""

    def has_ext_modules(self) -> bool:
        """Make the wheel's root platform-specific."""
        return can_compile()


class BuildWithNative(build_py):
    """Copies the sources, then adds the compiled library beside them."""

    def run(self) -> None:
        """Build; a compiler that fails ends the build with its output."""
        super().run()
        if not self.editable_mode and can_compile():
            BUILDER.compile_library(
                Path(self.build_lib) / "statewise" / "kernels" / BUILDER.LIBRARY_NAME
            )


class WheelForAnyPython(bdist_wheel):
    """Names no Python version or ABI: the library is called through ctypes."""

    def get_tag(self) -> tuple[str, str, str]:
        """Keep only the platform."""
        return "py3", "none", super().get_tag()[2]


setup(
    distclass=NativeDistribution,
    cmdclass={"build_py": BuildWithNative, "bdist_wheel": WheelForAnyPython},
)
