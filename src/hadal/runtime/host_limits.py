"""Cores and memory that this process may use: the machine's, or fewer where its control groups set a
limit.

Knows no deployment.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

_GROUPS, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""Control groups, of which a process is in one (version 2) or in one for each controller (version 1)."""


def num_cores() -> int:
    """Cores this process may use: its affinity, or fewer where its control groups have less time."""
    cores = len(os.sched_getaffinity(0))
    for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        for said in _limits("cpu", files):
            with contextlib.suppress(ValueError):  # "max".
                quota, period = map(int, said.split())
                cores = min(cores, max(1, quota // period)) if quota > 0 else cores
    return cores


def available_bytes() -> int | None:
    """Memory that can be had without swapping; None where that is not known."""
    return _at_most_the_limit(_meminfo("MemAvailable"))


def memory_bytes() -> int | None:
    """All memory of this machine, or as much as the process's control groups may use; None where
    that is not known.
    """
    return _at_most_the_limit(_meminfo("MemTotal"))


def _at_most_the_limit(there: int | None) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        for said in _limits("memory", (name,)):
            with contextlib.suppress(ValueError):
                there = int(said) if there is None else min(there, int(said))
    return there


def _limits(controller: str, names: Sequence[str]) -> Iterator[str]:
    """What files of these names say, of the process's control group and of those around it. Seen from
    a container, its own is often the outermost one.
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
    """A line of proc(5)'s meminfo, in bytes."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None
