"""What /proc tells of a process: stopped, starved, gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hadal.runtime.process.child import look_at

SPIN = "while True: pass"


@contextmanager
def running(*sources: str, cpu: int) -> Iterator[list[int]]:
    """Processes that share one processor."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", source], preexec_fn=lambda: os.sched_setaffinity(0, {cpu})
        )
        for source in sources
    ]
    try:
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_stopped_process_is_seen_to_be() -> None:
    with running("import time; time.sleep(60)", cpu=min(os.sched_getaffinity(0))) as (pid,):
        assert not look_at(pid).is_stopped
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        assert look_at(pid).is_stopped


@pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="this kernel does not count waits"
)
def test_those_that_share_a_processor_wait_for_it() -> None:
    with running(*[SPIN] * 3, cpu=min(os.sched_getaffinity(0))) as pids:
        time.sleep(0.5)
        before = [look_at(pid).waited_s for pid in pids]
        time.sleep(1.0)
        waited_s = sum(look_at(pid).waited_s for pid in pids) - sum(before)
    assert (
        waited_s > 1.0
    )  # Each waits for the other two: 2 s in all, or more where others run as well.


def test_one_that_is_gone_has_waited_for_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    assert (look_at(process.pid).waited_s, look_at(process.pid).is_stopped) == (0.0, False)
