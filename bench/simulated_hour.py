"""What a simulated hour at full size costs: the day's busiest, every request one, under the roles
that serve.

    python -m bench.simulated_hour [--quick] [--seconds N]

29 prefill units of 32 ranks and 9 decode units of 144, as many requests at the start as are there
at 20 tokens/s for a user, and the seconds that `hadal simulate` looks at of every hour. In a
process of its own, whose memory is told; the day's cache is made before and does not count.
`--quick`: a third of the units and of the load.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.day_parts import cache_of, placed
from hadal.commands.processes import processes
from hadal.policy.scaling import Units
from hadal.sim.day.cache import CacheDay
from hadal.sim.day.hour_window import HourSetting, HourWindow, run_hour
from hadal.sim.day.study import Study

HOUR = 10
"""Since second 0: 22:00 in Beijing, when most is asked for."""
UNITS = Units(29, 9)
THIRD, THIRD_UNITS = 3.0, Units(10, 3)
TOKEN_S = 1 / 20
"""Published: 20 to 22 tokens/s for a user."""


@dataclass(frozen=True)
class Cost:
    """What an hour took."""

    window: HourWindow
    cpu_s: float
    memory_bytes: int
    """Of the process, at most."""


def measured(
    study: Study, placed: Mapping[str, float], setting: HourSetting, cache: CacheDay | None
) -> Cost:
    """Simulate it here."""
    begun_s = time.process_time()
    window = run_hour(study, placed, setting, cache)
    return Cost(window, time.process_time() - begun_s, peak_bytes())


def apart(study: Study, setting: HourSetting, cache: CacheDay | None) -> Cost:
    """Simulate it in a process of its own."""
    with processes(1) as pool:
        return pool.submit(measured, study, placed(study), setting, cache).result()


def peak_bytes() -> int:
    """Of this process so far. Not getrusage's figure, which a parent leaves to its children."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * next(
        int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")
    )


def table(study: Study, cost: Cost) -> Table:
    """What was simulated, and what it cost."""
    window, cpu_s = cost.window, cost.cpu_s
    settle_s, seconds = study.window.settle_s, study.window.seconds
    units = window.setting.units
    title = (
        f"{units.prefill} + {units.decode} units, {settle_s:g} + {seconds:g} s simulated in"
        f" {cpu_s:.1f} s of a core"
    )
    found = Table("", "", title=title, title_justify="left")
    for name, value in (
        ("seconds of a core for one simulated", f"{cpu_s / (settle_s + seconds):.2f}"),
        ("requests at the start, that came", f"{window.num_running:,}, {window.num_came:,}"),
        ("events, steps of units", f"{window.num_events:,}, {window.num_steps:,}"),
        ("events/s of a core, their steps among them", f"{window.num_events / cpu_s:,.0f}"),
        ("memory at most", f"{cost.memory_bytes / 1e9:.2f} GB"),
        ("tokens/s for a user", f"{1.0 / window.reading.decode.token_s:.1f}"),
        ("problems of the ledgers", str(len(window.problems))),
    ):
        found.add_row(name, value)
    return found


def main(arguments: Sequence[str] = ()) -> None:
    """Run, and print one table."""
    parser = argparse.ArgumentParser(
        prog="bench simulated_hour",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="10 + 3 units and a third of the load")
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="measured, after those in which all settle"
    )
    options = parser.parse_args(arguments)
    study, units = Study(), UNITS
    if options.seconds:
        study = replace(study, window=replace(study.window, seconds=options.seconds))
    cache = cache_of(study, quick=options.quick)
    if options.quick:
        sessions = study.workload.sessions_per_day / THIRD
        study, units = (
            replace(study, workload=replace(study.workload, sessions_per_day=sessions)),
            THIRD_UNITS,
        )
    setting = HourSetting(HOUR, units, TOKEN_S, study.window.first_token_s)
    Console(highlight=False).print(table(study, apart(study, setting, cache)))


if __name__ == "__main__":
    main(sys.argv[1:])
