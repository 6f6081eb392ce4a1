"""What this machine lets this process use: memory, physical cores, fast number types.

Read from /proc, /sys and the cgroup, because a container's limit is the one that kills. Imports no
torch, so that threads can be made passive before torch starts its own pool.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
from pathlib import Path

_FAST_BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}  # the last one on ARM

_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def _read_int(path: str) -> int | None:
    try:
        return int(Path(path).read_text(encoding="ascii"))
    except (OSError, ValueError):  # absent, or the word "max"
        return None


def _meminfo_available() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def available_memory_bytes() -> int:
    """Bytes that can be taken without swapping or crossing the cgroup's limit."""
    free = _meminfo_available()
    for limit_path, used_path in _CGROUP_FILES:
        limit, used = _read_int(limit_path), _read_int(used_path)
        if limit is not None and used is not None:
            free = min(free, max(0, limit - used))
    return free


def settle_memory() -> None:
    """Take note that what is alive now stays, and give back what is not.

    Worth it once, after a model was loaded. Later collections of cycles leave the survivors alone
    (a process with torch has some 200,000 objects, and looking at all of them stalls a step), and
    what temporary objects have freed returns to the system; glibc keeps it otherwise.
    """
    gc.collect()
    gc.freeze()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def num_physical_cores() -> int:
    """Physical cores among the CPUs this process may run on; at least 1."""
    cores = set()
    cpus = os.sched_getaffinity(0)
    for cpu in cpus:
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            cores.add(topology.read_text(encoding="ascii").strip())
        except OSError:
            return max(1, len(cpus))
    return max(1, len(cores))


@functools.cache
def has_fast_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 in hardware; elsewhere float32 is faster."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    lines = (x for x in text.splitlines() if x.lower().startswith(("flags", "features")))
    words = set(next(lines, "").split())
    return bool(words & _FAST_BFLOAT16)


def wait_passively() -> None:
    """Make OpenMP threads sleep while they wait, unless the environment says otherwise.

    Spinning threads lose 5-20x where cores are shared. Only works before torch is imported.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
