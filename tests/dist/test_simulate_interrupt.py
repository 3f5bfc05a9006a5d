"""Ctrl-C of `hadal simulate`, as a terminal sends it: to every process at once, at any moment.

All processes end with the exit code of an interrupted command and without error output.
`HADAL_LEVEL=all`: 40 moments.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from hadal.lab.simulate.files import study_toml
from tests.levels import FULL
from tests.unit.lab.sim.studies import WORKLOAD, small
from tests.waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.more("unit tests have Ctrl-C at the processes of a simulation")
ROOT = Path(__file__).resolve().parents[2]
EXIT_INTERRUPTED = 128 + signal.SIGINT
NUM_JOBS = 2
DELAYS_S = (0.0, 0.2, 0.7, 2.5)
"""Seconds after the simulation's first process appears: while it starts, imports, receives its
part, and works.
"""
MOMENTS_S = tuple(0.1 * index for index in range(40)) if FULL else DELAYS_S


@dataclass(frozen=True)
class Running:
    """One `hadal simulate` in its own session."""

    process: subprocess.Popen[bytes]
    said: Path

    def members(self) -> list[int]:
        """Return the living processes of its group."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, _, group = path.read_text().rpartition(")")[2].split()[:3]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(group) == self.process.pid and state != "Z":
                found.append(int(path.parent.name))
        return found

    def workers(self) -> list[int]:
        """Return the processes that simulate a part of the day."""
        found = []
        for pid in self.members():
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if b"spawn_main" in words:
                found.append(pid)
        return found

    def interrupt(self) -> None:
        """Send SIGINT to its group, like Ctrl-C in its terminal."""
        os.killpg(self.process.pid, signal.SIGINT)

    def check_end(self) -> None:
        """Assert that all processes end, with an interrupted command's code and no error output."""
        code = self.process.wait(DEADLINE_S)
        wait_until(lambda: not self.members(), "every process of the command has ended")
        said = self.said.read_text(errors="replace")
        assert code == EXIT_INTERRUPTED, said
        for word in ("Traceback", "KeyboardInterrupt", "Error", "leaked", "Exception"):
            assert word not in said, said


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    """Start a simulated day without a cache. Each worker takes minutes, more than the end may take
    after Ctrl-C.
    """
    config = tmp_path / "day.toml"
    window = replace(small().window, seconds=3000.0, prefill_seconds=3000.0)
    study = small(
        workload=replace(WORKLOAD, sessions_per_day=1e5),
        window=window,
        cache=replace(small().cache, disk_pb=0.0),
    )
    config.write_text(study_toml(study), encoding="utf-8")
    command = [sys.executable, "-m", "hadal.cli", "simulate", "--config", str(config)]
    command += ["--out", str(tmp_path / "day"), "--no-what-ifs", "--jobs", str(NUM_JOBS)]
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    said = tmp_path / "said"
    with said.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=ROOT,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path},
            # A shell that runs the tests in the background ignores SIGINT, and the child would
            # inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    made = Running(process, said)
    try:
        yield made
    finally:
        if made.members():
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(DEADLINE_S)


@pytest.mark.parametrize("delay_s", MOMENTS_S)
def test_ctrl_c_ends_all_of_it_at_any_moment(running: Running, delay_s: float) -> None:
    wait_until(running.workers, "a process of the simulation is there")
    time.sleep(delay_s)
    assert running.process.poll() is None, running.said.read_text()
    running.interrupt()
    running.check_end()


def test_whoever_presses_it_again_and_again_is_not_told_more(running: Running) -> None:
    wait_until(running.workers, "a process of the simulation is there")
    for _ in range(5):
        running.interrupt()
        time.sleep(0.01)
    running.check_end()
