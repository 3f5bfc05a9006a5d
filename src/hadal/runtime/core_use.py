"""Load of other processes on some cores, as Linux counts it.

    core 0    | own thread ##########| other process ####|  idle  |
    core 1    | own thread ##############|       idle             |      others: a fifth of both

`/proc/stat` has the time that a core was busy; `/proc/self/task` has the time that a thread ran, and
the core it ran on last (proc(5)).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

_STAT, _TASKS = Path("/proc/stat"), Path("/proc/self/task")
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


class CoreUse:
    """Sampler of core use; each answer covers the time since the last call."""

    def __init__(self) -> None:
        self._seen_s = 0.0
        self._busy_s: dict[int, float] = {}
        """Core -> busy seconds, at the last call."""
        self._ran_s: dict[int, float] = {}
        """Thread of this process -> seconds that it had run, at the last call."""

    def by_others(self, now_s: float, cores: Sequence[int]) -> float | None:
        """Return the share of the cores' time that other processes used since the last call, 0 to
        1. 0 on the first call; None if /proc has no such numbers.
        """
        try:
            busy_s, ran = core_seconds(_STAT), thread_seconds(_TASKS)
        except (OSError, ValueError, IndexError):
            return None
        if not busy_s.keys() >= set(cores):
            return None
        elapsed_s = (now_s - self._seen_s) * len(cores)
        used_s = sum(busy_s[core] - self._busy_s.get(core, busy_s[core]) for core in cores)
        own_s = sum(
            run_s - self._ran_s.get(thread, 0.0)
            for thread, (core, run_s) in ran.items()
            if core in cores
        )
        self._seen_s, self._busy_s = now_s, busy_s
        self._ran_s = {thread: run_s for thread, (_, run_s) in ran.items()}
        return min(max(0.0, (used_s - own_s) / elapsed_s), 1.0) if elapsed_s > 0.0 else 0.0


def core_seconds(stat: Path) -> dict[int, float]:
    """Return core -> busy seconds since the host started. Raises OSError and ValueError."""
    busy_s = {}
    for line in stat.read_text().splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name != "cpu":
            user, nice, system, _idle, _io, interrupts, soft, *_rest = map(int, fields)
            busy_s[int(name[3:])] = _TICK_S * (user + nice + system + interrupts + soft)
    return busy_s


def thread_seconds(tasks: Path) -> dict[int, tuple[int, float]]:
    """Return thread -> (core that it ran on last, seconds that it has run) for a process. Raises
    OSError, ValueError and IndexError.
    """
    found = {}
    for name in os.listdir(tasks):
        try:
            text = (tasks / name / "stat").read_text()
        except FileNotFoundError:
            continue  # The thread ended meanwhile.
        fields = text[text.rindex(")") + 2 :].split()
        found[int(name)] = int(fields[36]), _TICK_S * (int(fields[11]) + int(fields[12]))
    return found
