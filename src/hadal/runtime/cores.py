"""Choice of the cores of a host for a rank's computing threads (runtime/pinning binds them).

    2 threads a rank, 4 cores    prefill-0    cores 0 1
                                 decode-0     cores 2 3
                                 decode-1     cores 0 1      wraps around at the last core

A rank gets no cores if it has one thread, more threads than cores, a GPU, or plain torch instead of
our kernels. The operating system then places its threads. Works on Linux only.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Sequence
from pathlib import Path

from hadal.core.config import PREFILL, ROLES, Deployment, units_of
from hadal.kernels.build import runs_plain
from hadal.runtime.topology import unit_and_rank

_CPUS = Path("/sys/devices/system/cpu")


def allowed_cores(thread: int = 0) -> tuple[int, ...]:
    """Return the logical cores that a thread may use: first one of each physical core, then their
    siblings; empty if unknown. `thread`: its id (proc(5)); 0: the calling thread.
    """
    if not hasattr(os, "sched_getaffinity"):
        return ()
    return _in_order(frozenset(os.sched_getaffinity(thread)))


@functools.lru_cache(maxsize=8)
def _in_order(cores: frozenset[int]) -> tuple[int, ...]:
    num_seen: dict[str, int] = {}
    rounds = {}
    for core in sorted(cores):
        siblings = str(core)
        with contextlib.suppress(OSError):
            siblings = (_CPUS / f"cpu{core}/topology/thread_siblings_list").read_text()
        rounds[core] = num_seen[siblings] = num_seen.get(siblings, -1) + 1
    return tuple(sorted(cores, key=lambda core: (rounds[core], core)))


def cores_of(deployment: Deployment, process: str, allowed: Sequence[int]) -> tuple[int, ...]:
    """Return the cores of a rank's computing threads, one each; empty if the process gets none.

    `process` is its name at the supervisor. Its cores follow those of the earlier ranks on its
    host, with prefill ranks first.
    """
    unit, rank = unit_and_rank(process)
    role, _, number = unit.rpartition("-")
    if role not in ROLES or deployment.device == "cuda" or runs_plain():
        return ()
    units = units_of(deployment, role)
    if (rank is None) != (units.ranks == 1) or not 2 <= units.threads <= len(allowed):
        return ()
    first = 0 if role == PREFILL else _num_threads(deployment, PREFILL, deployment.prefill.units)
    first += _num_threads(deployment, role, int(number))
    first += (rank or 0) % units.ranks_per_node * units.threads
    return tuple(allowed[(first + index) % len(allowed)] for index in range(units.threads))


def _num_threads(deployment: Deployment, role: str, num_units: int) -> int:
    """Return the threads of the first `num_units` units of a role on one host."""
    units = units_of(deployment, role)
    return num_units * min(units.ranks, units.ranks_per_node) * units.threads
