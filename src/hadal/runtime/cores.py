"""Which core each thread that computes runs on, and when it gives way.

    the members of a kernel team    a core each, while nobody else wants these cores
    all other threads               where the kernel puts them

Members wait for each other dozens of times in a step. Two of them on one core take turns, and the
kernel moves neither, as both sleep often: a step then takes twice as long beside a core that is idle.
Where others work on their cores, members would wait for these instead. They are let go then, for a
while that doubles each time, and go where the kernel puts them.

Linux alone has what this needs; elsewhere nobody gets a core.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from hadal.core.config import PREFILL, ROLES, Deployment, units_of
from hadal.runtime.topology import unit_and_rank

log = logging.getLogger("hadal.cores")

LOOK_S = 0.25
"""How often a process looks whether its members get their cores."""
TAKEN = 0.3
"""Share of the time in which a member wants to run and may not, from which on its core is taken."""
FREE_S, FREE_MAX_S = 0.25, 64.0
"""How long members are let go, at first, and at most where each look finds their cores taken: another
unit's prompt takes them for a moment, other programs for long.
"""
_CPUS = Path("/sys/devices/system/cpu")
_TASKS = Path("/proc/self/task")


def allowed_cores() -> tuple[int, ...]:
    """Return the logical cores that this thread may use: of each physical core one first."""
    if not hasattr(os, "sched_getaffinity"):
        return ()
    cores = sorted(os.sched_getaffinity(0))
    seen: dict[str, int] = {}
    turn = {}
    for core in cores:
        siblings = str(core)
        with contextlib.suppress(OSError):
            siblings = (_CPUS / f"cpu{core}/topology/thread_siblings_list").read_text()
        turn[core] = seen[siblings] = seen.get(siblings, -1) + 1
    return tuple(sorted(cores, key=lambda core: (turn[core], core)))


def cores_of(deployment: Deployment, process: str, allowed: Sequence[int]) -> tuple[int, ...]:
    """Return the cores of a rank's members, the caller's first: those behind the cores of the ranks
    before it on its host, prefill's first. Empty if there are fewer cores than members, and for
    processes that are no ranks.
    """
    unit, rank = unit_and_rank(process)
    role, _, number = unit.rpartition("-")
    if role not in ROLES or deployment.device == "cuda":
        return ()
    units = units_of(deployment, role)
    if (rank is None) != (units.ranks == 1) or not 1 <= units.threads <= len(allowed):
        return ()
    first = 0 if role == PREFILL else _num_threads(deployment, PREFILL, deployment.prefill.units)
    first += _num_threads(deployment, role, int(number))
    first += (rank or 0) % units.ranks_per_node * units.threads
    return tuple(allowed[(first + index) % len(allowed)] for index in range(units.threads))


def _num_threads(deployment: Deployment, role: str, num_units: int) -> int:
    units = units_of(deployment, role)
    return num_units * min(units.ranks, units.ranks_per_node) * units.threads


class Cores:
    """The members of one process's team, and where they run. `enter` is called from the thread that
    computes, all else from the host's.
    """

    def __init__(
        self,
        choose: Callable[[Sequence[int]], Sequence[int]],
        members: Callable[[], Sequence[int]],
        tell: Callable[[bool], None],
    ) -> None:
        """`choose` picks cores out of those that the process may use. `members` returns the threads
        of the team, the caller left out; it is called from the thread that computes. `tell` says
        whether each has a core of its own.
        """
        self._tell = tell
        self._choose = choose
        self._members = members
        self._allowed: tuple[int, ...] = ()
        self._threads: tuple[int, ...] = ()
        """The caller's first; empty before it computes."""
        self._is_pinned = False
        self._next_s = 0.0
        self._free_s = FREE_S
        self._looked_s = 0.0
        self._waited_ns: dict[int, int] = {}
        """How long each thread had waited to run, at the last look."""

    def enter(self) -> None:
        """The calling thread is the one that computes."""
        members = tuple(self._members())
        self._threads = (threading.get_native_id(), *members) if members else ()

    def look(self, now_s: float) -> None:
        """Pin members, or let them go, if it is time to look."""
        if now_s < self._next_s or not self._threads:
            return
        self._next_s = now_s + LOOK_S
        allowed = allowed_cores()
        if self._is_pinned and allowed == self._allowed:
            if self._share_taken(now_s) > TAKEN:
                self._let_go(now_s)
            else:
                self._free_s = FREE_S
            return
        self._pin(now_s, allowed)

    def _pin(self, now_s: float, allowed: tuple[int, ...]) -> None:
        cores = self._choose(allowed)
        is_pinned = bool(cores) and len(allowed) > 1
        try:
            for index, thread in enumerate(self._threads):
                os.sched_setaffinity(thread, {cores[index]} if is_pinned else allowed)
        except OSError:  # The cores that may be used are others by now: the next look tells.
            return
        self._allowed, self._is_pinned = allowed, is_pinned
        self._tell(is_pinned)
        self._share_taken(now_s)
        log.debug("computes on cores %s", ", ".join(map(str, cores)))

    def _let_go(self, now_s: float) -> None:
        with contextlib.suppress(OSError):
            for thread in self._threads:
                os.sched_setaffinity(thread, self._allowed)
        self._is_pinned = False
        self._tell(False)
        self._next_s = now_s + self._free_s
        log.debug("others work on its cores; any core will do for %g s", self._free_s)
        self._free_s = min(2 * self._free_s, FREE_MAX_S)

    def _share_taken(self, now_s: float) -> float:
        """Return the largest share of the time since the last look in which a thread might not run."""
        elapsed_s, self._looked_s = now_s - self._looked_s, now_s
        most_ns = 0
        for thread in self._threads:
            try:
                waited_ns = int((_TASKS / str(thread) / "schedstat").read_text().split()[1])
            except (OSError, ValueError, IndexError):  # This kernel does not count it.
                return 0.0
            most_ns = max(most_ns, waited_ns - self._waited_ns.get(thread, waited_ns))
            self._waited_ns[thread] = waited_ns
        return most_ns / 1e9 / elapsed_s if elapsed_s > 0.0 else 0.0
