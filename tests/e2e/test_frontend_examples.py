"""Every example runs, as a user would start it, against a toy service."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.fake_service import FakeService

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(p.name for p in FOLDER.glob("*.py") if p.name != "connect.py")


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str) -> None:
    with FakeService() as service:
        service.script["as JSON: "] = '{"name": "Paris", "continent": "Europe", "is_capital": true}'
        service.script["in a day is "] = "24 hours"
        service.script["of a date is "] = "1999-12-31"
        run = subprocess.run(
            [sys.executable, str(FOLDER / name), "--url", service.url],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert run.returncode == 0, run.stderr
        assert run.stdout.strip()
        assert "nobody read" not in run.stderr
        assert service.bodies()
