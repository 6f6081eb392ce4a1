"""What holds for every test: passive threads, replayable examples, no process left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator

# Before anything imports torch: a spinning thread pool starves the others on a shared machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import psutil
import pytest

# Examples replay the same way everywhere; `--hypothesis-profile=explore` looks for new ones.
hypothesis.settings.register_profile(
    "fixed",
    derandomize=True,
    deadline=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile("explore", deadline=None, print_blob=True, max_examples=1000)
hypothesis.settings.load_profile("fixed")


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need a device where there is none; torch loads only if one asks."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_cuda():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="module", autouse=True)
def no_process_left_behind() -> Iterator[None]:
    """Every process that a module's tests start has ended, and is reaped, when they are done."""
    me = psutil.Process()
    before = {child.pid for child in me.children(recursive=True)}
    yield
    started = [c for c in me.children(recursive=True) if c.pid not in before]
    _gone, alive = psutil.wait_procs(started, timeout=5)
    left = [f"{c.pid} {c.cmdline()}" for c in alive if c.is_running()]
    for child in alive:
        child.kill()
    psutil.wait_procs(alive, timeout=5)
    assert not left, f"processes left behind: {left}"
