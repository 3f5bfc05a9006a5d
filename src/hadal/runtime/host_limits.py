"""Cores and memory that this process may use: the machine's, or a lower limit of control groups.

Does not depend on a deployment.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

_GROUPS, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""Mount point of control groups, and file that lists the groups of this process: one (version 2),
or one per controller (version 1).
"""


def num_cores() -> int:
    """Return the number of usable cores: those of the affinity, or a lower control group limit."""
    cores = len(os.sched_getaffinity(0))
    for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        for said in _limits("cpu", files):
            with contextlib.suppress(ValueError):  # "max": no limit.
                quota, period = map(int, said.split())
                cores = min(cores, max(1, quota // period)) if quota > 0 else cores
    return cores


def available_bytes() -> int | None:
    """Return the memory available without swapping, at most the groups' limit; None if unknown."""
    return _at_most_the_limit(_meminfo("MemAvailable"))


def memory_bytes() -> int | None:
    """Return the machine's memory in bytes, or a lower control group limit; None if unknown."""
    return _at_most_the_limit(_meminfo("MemTotal"))


def _at_most_the_limit(there: int | None) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        for said in _limits("memory", (name,)):
            with contextlib.suppress(ValueError):
                there = int(said) if there is None else min(there, int(said))
    return there


def _limits(controller: str, names: Sequence[str]) -> Iterator[str]:
    """Yield the contents of files of these names, in the process's control group and all groups
    around it. In a container, its own group often appears as the outermost one.
    """
    try:
        lines = _OWN_GROUPS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = _GROUPS / controllers
        own = top / path.lstrip("/")
        for group in (own, *own.parents):
            if not group.is_relative_to(top):
                break
            with contextlib.suppress(OSError):
                yield " ".join((group / name).read_text(encoding="ascii") for name in names)


def _meminfo(name: str) -> int | None:
    """Return a value of /proc/meminfo (proc(5)), in bytes."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None
