"""A writer killed with SIGKILL at random moments leaves each page whole or absent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
KILLS = int(os.environ.get("STATEWISE_TEST_KILLS", "30"))


@pytest.mark.slow
def test_kill_nine_at_random_moments() -> None:
    command = [sys.executable, "-P", str(ROOT / "tools" / "torture_disk.py")]
    command += ["--count", str(KILLS), "--longest-s", "0.3"]
    if os.access("/dev/shm", os.W_OK):
        command += ["--directory", "/dev/shm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["kills"] == KILLS
    assert report["loaded"] == report["whole"] > KILLS, "the writers got something done"
    assert "wrong" not in report
    assert not [word for word in report if word.startswith("damaged")]
