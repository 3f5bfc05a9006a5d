"""Test how busy other processes keep cores, by Linux's counters."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from hadal.runtime import core_use
from hadal.runtime.core_use import CoreUse, core_seconds, thread_seconds

TICKS = os.sysconf("SC_CLK_TCK")
linux = pytest.mark.skipif(not Path("/proc/stat").exists(), reason="Linux alone counts this")


class Counters:
    """Files of a host of three cores and of a process, as a test writes them."""

    def __init__(self, folder: Path) -> None:
        self.stat, self.tasks = folder / "stat", folder / "task"
        self.tasks.mkdir()
        self.busy_s = [0.0] * 3
        self.ran: dict[int, tuple[int, float]] = {}
        self.write()

    def write(self) -> None:
        """Write the files: half of a core's busy time is system time, and half is user time."""
        halves = [int(busy_s * TICKS / 2) for busy_s in self.busy_s]
        rows = [f"cpu{core} {n} 0 {n} 77 5 0 0 9 0 0" for core, n in enumerate(halves)]
        self.stat.write_text("\n".join(["cpu 1 2 3 4 5 6 7 8 9 10", *rows, "intr 5 6", "btime 7"]))
        for thread, (core, run_s) in self.ran.items():
            (self.tasks / str(thread)).mkdir(exist_ok=True)
            before, behind = ["0"] * 10, ["0"] * 23
            fields = ["R", *before, str(int(run_s * TICKS)), "0", *behind, str(core), "0"]
            (self.tasks / str(thread) / "stat").write_text(f"{thread} (a) b) {' '.join(fields)}")


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Counters:
    made = Counters(tmp_path)
    monkeypatch.setattr(core_use, "_STAT", made.stat)
    monkeypatch.setattr(core_use, "_TASKS", made.tasks)
    return made


@linux
def test_what_own_threads_and_other_cores_do_is_not_counted(counters: Counters) -> None:
    use = CoreUse()
    counters.busy_s, counters.ran = [50.0, 60.0, 70.0], {7: (0, 40.0), 8: (2, 9.0)}
    counters.write()
    assert use.by_others(100.0, (0, 1)) == 0.0  # No earlier sample to compare with.
    # Core 0: the own thread ran 2 of 4 s, another process 1 s; core 1: others ran 2 s.
    counters.busy_s = [53.0, 62.0, 74.0]
    counters.ran = {7: (0, 42.0), 8: (2, 13.0)}
    counters.write()
    assert use.by_others(104.0, (0, 1)) == pytest.approx(3 / 8)
    assert use.by_others(108.0, (0, 1)) == 0.0
    # A thread that began since the last sample ran here for all its time.
    counters.busy_s, counters.ran = [55.0, 62.0, 74.0], {**counters.ran, 9: (1, 2.0)}
    counters.write()
    assert use.by_others(112.0, (0, 1)) == 0.0


@linux
@pytest.mark.parametrize("what", ["no file", "other words", "no such core"])
def test_what_is_not_counted_is_none(counters: Counters, what: str) -> None:
    if what == "no file":
        counters.stat.unlink()
    elif what == "other words":
        counters.stat.write_text("cpu0 a b c d e f g\n")
    assert CoreUse().by_others(1.0, (0, 5) if what == "no such core" else (0, 1)) is None


@linux
def test_this_host_counts() -> None:
    assert core_seconds(Path("/proc/stat")).keys() >= os.sched_getaffinity(0)
    core, run_s = thread_seconds(Path("/proc/self/task"))[threading.get_native_id()]
    assert core in core_seconds(Path("/proc/stat"))
    assert run_s >= 0.0
