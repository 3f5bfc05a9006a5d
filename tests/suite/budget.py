"""Budget of the suite: processor time that each folder of tests may use. The unit is the time of a
loop that runs beside the suite, so a slow or busy machine gets more seconds.

`tests/budget.toml` has the budgets of each level. A change that needs more time must raise them there.
"""

from __future__ import annotations

import threading
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np

PATH = Path(__file__).resolve().parents[1] / "budget.toml"
PERIOD_S = 20.0
MARGIN = 1.25
LEAST = 100.0
"""Smallest budget of a folder, in units: smaller amounts are noise."""
_ABOUT = (
    "# Processor time by folder of tests and level, in units of the loop of tests/suite/budget.py: about",
    "# 0.1 s of a core of an AMD EPYC. `python -m tests.suite LEVEL --write-budget` writes what a run used;",
    "# run it on a fresh machine, since that builds kernels too.",
)
_ROUNDS = 40
_SIZE = 200_000


class Budget:
    """Budgets of one level: folder -> units."""

    SLACK: ClassVar[float] = 3.0
    """Multiple of its budget above which a folder counts as over it. Unchanged code took up to 2.3
    times its budget on a machine where other work shared caches and memory, which slows the loop
    less than tests.
    """

    def __init__(self, level: str) -> None:
        self._units: dict[str, float] = tomllib.loads(PATH.read_text())["units"].get(level, {})

    def of(self, folder: str) -> float | None:
        """Return the units of a folder; None if it has no budget at this level."""
        return self._units.get(folder)

    @staticmethod
    def write(level: str, folder_to_units: Mapping[str, float]) -> None:
        """Set a level's budget to a run's use, with MARGIN for cache misses on a busy machine."""
        tables: dict[str, Mapping[str, float]] = tomllib.loads(PATH.read_text())["units"]
        tables[level] = {
            folder: max(LEAST, MARGIN * units) for folder, units in folder_to_units.items()
        }
        lines = [*_ABOUT]
        for name, units in tables.items():
            lines += ["", f"[units.{name}]"]
            lines += [f'"{folder}" = {units[folder]:.0f}' for folder in sorted(units)]
        PATH.write_text("\n".join(lines) + "\n")


def loop_s() -> float:
    """Run the loop once, about half in the interpreter and half in numpy. Return its processor seconds."""
    values = np.arange(_SIZE, dtype=np.float64)
    start_s = time.thread_time()
    total = 0
    for number in range(_ROUNDS * 10_000):
        total += number & 7
    for _ in range(_ROUNDS):
        np.sort(values[::-1] * 1.0001)
    return time.thread_time() - start_s


class Loop:
    """Thread that times the loop every PERIOD_S seconds. Use as a context manager."""

    def __init__(self) -> None:
        self._times_s: list[float] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="budget", daemon=True)

    @property
    def mean_s(self) -> float:
        """Mean processor seconds of the loop during this run."""
        return float(np.mean(self._times_s))

    def __enter__(self) -> Loop:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._times_s.append(loop_s())
            if self._end.wait(PERIOD_S):
                return
