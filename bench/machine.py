"""Limits of this machine, and other load on it: memory bandwidth, FP32 GEMM rate, CPU time of other processes.

Benchmarks print their figures beside these limits. The limits are measured in the same run, because a shared
machine's speed varies.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from hadal.kernels.products import linear
from hadal.reference.params import Matrix

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Limits:
    """Roofline of the machine: the highest rates of reading and multiplying."""

    threads: int
    read_bytes_per_s: float
    gemm_flops_per_s: float


def measure_limits(threads: int, *, quick: bool = False) -> Limits:
    """Measure the limits as the best of several rounds: a limit is not an average."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rounds = 5 if quick else 15
        return Limits(threads, _read_bytes_per_s(rounds), _gemm_flops_per_s(rounds))
    finally:
        torch.set_num_threads(before)


def _best_seconds(work: Callable[[], object], rounds: int) -> float:
    work()
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def _read_bytes_per_s(rounds: int) -> float:
    # 512 MiB: far larger than any cache. These readers do little besides reading; the fastest sets
    # the limit.
    matrix = torch.ones(16384, 8192)
    vector = torch.ones(8192)
    readers: list[Callable[[], object]] = [
        lambda: matrix @ vector,
        lambda: matrix.sum(),
        lambda: linear(vector[None], Matrix(matrix)),
    ]
    return (
        matrix.numel()
        * matrix.element_size()
        / min(_best_seconds(read, rounds) for read in readers)
    )


def _gemm_flops_per_s(rounds: int) -> float:
    # torch's own GEMM is not always the fastest: its library has slow paths for other vendors'
    # CPUs.
    rates = []
    for size in (512, 1024, 2048):
        a, b = torch.randn(size, size), torch.randn(size, size)
        multipliers: list[Callable[[], object]] = [
            partial(torch.mm, a, b),
            partial(linear, a, Matrix(b)),
        ]
        rates += [2 * size**3 / _best_seconds(multiply, rounds) for multiply in multipliers]
    return max(rates)


def describe() -> dict[str, str | int | float]:
    """Return a short description of the machine, for the results file."""
    model = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {
        "cpu": model,
        "cores": os.cpu_count() or 1,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load_1min": round(os.getloadavg()[0], 2),
    }


FOREIGN_MAX = 0.08
"""Largest share of all cores' time that other processes may use in a clean run."""


@dataclass(frozen=True)
class Usage:
    """Reading of the whole machine's busy CPU seconds since boot."""

    at_s: float
    busy_s: float


def read_usage() -> Usage:
    return parse_usage(Path("/proc/stat").read_text(), time.perf_counter())


def parse_usage(stat: str, at_s: float) -> Usage:
    """Parse the first line of /proc/stat: user nice system idle iowait irq softirq steal. Time
    stolen by a hypervisor counts as busy.
    """
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, stat.split("\n", 1)[0].split()[1:9]
    )
    return Usage(at_s, (user + nice + system + irq + softirq + steal) / CLOCK_TICKS)


def foreign_share(before: Usage, after: Usage, own_s: float, num_cores: int) -> float:
    """Return the share of all cores' time that other processes used between two readings; ours used `own_s`."""
    return max(0.0, after.busy_s - before.busy_s - own_s) / (
        num_cores * max(after.at_s - before.at_s, 1e-3)
    )


def is_quiet(num_cores: int, seconds: float = 0.2) -> bool:
    """Return True if other processes hardly use the machine now. A round begun on a busy machine
    would be dropped anyway.
    """
    before = read_usage()
    time.sleep(seconds)
    return foreign_share(before, read_usage(), 0.0, num_cores) <= FOREIGN_MAX


class CpuWatch:
    """Meter of the cores that other processes kept busy between `start` and `stop`: all busy time
    minus that of the watched processes.
    """

    def __init__(self) -> None:
        self._watched: tuple[int, ...] = ()
        self._at_start = (0.0, 0.0, 0.0)

    def start(self, watched: Iterable[int]) -> None:
        """Watch these processes, their descendants and this one."""
        self._watched = (os.getpid(), *watched)
        self._at_start = self._read()

    def stop(self) -> float:
        """Return the mean number of cores that other processes kept busy since `start`."""
        seconds, busy, own = (
            now - then for now, then in zip(self._read(), self._at_start, strict=True)
        )
        return max(0.0, (busy - own) / max(seconds, 1e-3))

    def _read(self) -> tuple[float, float, float]:
        ours = {pid for root in self._watched for pid in tree_of(root)}
        usage = read_usage()
        return usage.at_s, usage.busy_s, cpu_seconds(ours)


def tree_of(root: int, without: Collection[int] = ()) -> set[int]:
    """Return a process and all its descendants, except `without` and their descendants."""
    parents = {pid: int(fields[1]) for pid, fields in _stats().items() if pid not in without}
    found, grew = {root}, True
    while grew:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        found |= more
        grew = bool(more)
    return found


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time of these processes and of their children that have ended."""
    stats = _stats()
    return sum(sum(map(int, stats[pid][11:15])) for pid in pids if pid in stats) / CLOCK_TICKS


def _stats() -> dict[int, list[str]]:
    """Return every process's fields of /proc/PID/stat (proc(5)), starting with its state."""
    stats = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            # The process may have just ended.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                stats[int(entry.name)] = (entry / "stat").read_text().rsplit(")", 1)[1].split()
    return stats
