"""Scripts start as the Makefile starts them: with -P, which leaves their folder out of the path."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    ["tools/demo.py", "tools/soak.py", "tools/mutants.py", "benchmarks/first_figures.py"],
)
def test_a_script_starts_from_anywhere(script: str, tmp_path: Path) -> None:
    command = [sys.executable, "-P", str(ROOT / script), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout
