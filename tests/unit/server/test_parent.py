"""A watch on another process: told once when it ends, also where it was gone before."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from statewise.runtime.server import parent


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def no_pidfd(_pid: int) -> int:
    raise OSError("not here")


async def watch(child: subprocess.Popen[bytes], *, gone: bool) -> list[str]:
    """Watch a child that ends before or after; what was called, with the order of events."""
    seen: list[str] = []
    ended = asyncio.Event()

    def on_end() -> None:
        seen.append("ended")
        ended.set()

    if gone:
        child.kill()
        child.wait()
    parent.ParentWatch(child.pid, on_end)
    await asyncio.sleep(0)
    if not gone:
        await asyncio.sleep(0.05)
        seen.append("alive")
        child.kill()
        child.wait()
    await asyncio.wait_for(ended.wait(), 10)
    await asyncio.sleep(0.05)
    return seen


@pytest.mark.parametrize("has_pidfd", [True, False])
@pytest.mark.parametrize("gone", [True, False])
def test_the_end_is_told_once(monkeypatch: pytest.MonkeyPatch, has_pidfd: bool, gone: bool) -> None:
    monkeypatch.setattr(parent, "POLL_S", 0.02)
    if not has_pidfd:
        monkeypatch.setattr(os, "pidfd_open", no_pidfd, raising=False)
    with sleeper() as child:
        seen = asyncio.run(watch(child, gone=gone))
    assert seen == (["ended"] if gone else ["alive", "ended"])


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_a_closed_watch_is_silent(monkeypatch: pytest.MonkeyPatch, has_pidfd: bool) -> None:
    monkeypatch.setattr(parent, "POLL_S", 0.02)
    if not has_pidfd:
        monkeypatch.setattr(os, "pidfd_open", no_pidfd, raising=False)

    async def run(child: subprocess.Popen[bytes]) -> list[str]:
        seen: list[str] = []
        watch = parent.ParentWatch(child.pid, lambda: seen.append("ended"))
        watch.close()
        watch.close()
        child.kill()
        child.wait()
        await asyncio.sleep(0.1)
        return seen

    with sleeper() as child:
        assert asyncio.run(run(child)) == []
