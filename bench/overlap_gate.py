"""Who used the machine while something was timed: all busy time less that of the processes that
were measured.

A ratio of two times collapses when others use the cores, so a repetition in which they used more
than FOREIGN_MAX of the machine is dropped, by a rule fixed before the run, and counted. Knows
nothing of what was measured.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

FOREIGN_MAX = 0.08
"""Share of all cores' time."""
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Usage:
    """The whole machine's busy CPU seconds, at a time."""

    at_s: float
    busy_s: float


def read_usage() -> Usage:
    return parse_usage(Path("/proc/stat").read_text(), time.perf_counter())


def parse_usage(stat: str, at_s: float) -> Usage:
    """The first line of /proc/stat: user nice system idle iowait irq softirq steal. What a
    hypervisor stole is busy.
    """
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, stat.split("\n", 1)[0].split()[1:9]
    )
    return Usage(at_s, (user + nice + system + irq + softirq + steal) / CLOCK_TICKS)


def foreign_share(before: Usage, after: Usage, own_s: float, num_cores: int) -> float:
    """Part of the machine that others used between the two, when we used `own_s` CPU seconds."""
    return max(0.0, after.busy_s - before.busy_s - own_s) / (
        num_cores * max(after.at_s - before.at_s, 1e-3)
    )


def is_quiet(num_cores: int, seconds: float = 0.2) -> bool:
    """Whether others leave the machine alone just now. A round begun while they do not would be
    dropped anyway.
    """
    before = read_usage()
    time.sleep(seconds)
    return foreign_share(before, read_usage(), 0.0, num_cores) <= FOREIGN_MAX


@dataclass(frozen=True)
class Timed:
    """One run of one variant."""

    seconds: float
    foreign: float

    @property
    def is_clean(self) -> bool:
        return self.foreign <= FOREIGN_MAX


@dataclass
class Series:
    """All runs of a set of variants, in rounds: one run of each variant a round."""

    rounds: list[dict[str, Timed]] = field(default_factory=list)

    def seconds(self, variant: str) -> list[float]:
        """Clean runs only."""
        return [r[variant].seconds for r in self.rounds if variant in r and r[variant].is_clean]

    def median_s(self, variant: str) -> float | None:
        """None if no run was clean."""
        seconds = self.seconds(variant)
        return statistics.median(seconds) if seconds else None

    def ratios(self, over: str, under: str) -> list[float]:
        """`over` divided by `under`, of the rounds in which both were clean."""
        return [
            r[over].seconds / r[under].seconds
            for r in self.rounds
            if over in r and under in r and r[over].is_clean and r[under].is_clean
        ]

    def num_dropped(self, variants: Iterable[str]) -> int:
        """Runs of these variants in which others used too much."""
        wanted = set(variants)
        return sum(
            not timed.is_clean for r in self.rounds for name, timed in r.items() if name in wanted
        )


def spread(values: Sequence[float]) -> str:
    """Median and range, for people."""
    if not values:
        return "-"
    return f"{statistics.median(values):.2f} [{min(values):.2f}-{max(values):.2f}]"
