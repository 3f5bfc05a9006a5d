"""What a host sees of a process of its own, in /proc: whether it could run. Linux; elsewhere
nothing is seen.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_STOPPED = ("T", "t")


@dataclass(frozen=True)
class Sight:
    """Seconds count from the process's start, over all threads that it has now."""

    waited_s: float
    """A thread was ready to run and had no processor (proc(5), schedstat)."""
    is_stopped: bool


def look_at(pid: int) -> Sight:
    """See how a process fares. One that is gone has waited for nothing."""
    waited_ns = 0
    try:
        is_stopped = _state(_PROC / str(pid) / "stat") in _STOPPED
        for thread in os.scandir(_PROC / str(pid) / "task"):
            waited_ns += _waited_ns(Path(thread.path) / "schedstat")
    except OSError:
        return Sight(0.0, is_stopped=False)
    return Sight(waited_ns / 1e9, is_stopped)


def _state(path: Path) -> str:
    """The letter behind the command, which stands in brackets and may hold any character."""
    return path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]


def _waited_ns(path: Path) -> int:
    try:
        return int(path.read_text(encoding="ascii").split()[1])
    except (
        OSError,
        IndexError,
        ValueError,
    ):  # The thread has ended, or this kernel does not count it.
        return 0
