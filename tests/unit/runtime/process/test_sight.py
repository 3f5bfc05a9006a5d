"""Test what /proc shows of a process: stopped, starved, gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hadal.runtime.process.watch import look_at
from tests.needs import skip_unless
from tests.waiting import wait_until

SPIN = "while True: pass"


@contextmanager
def running(*sources: str, cpu: int) -> Iterator[list[int]]:
    """Run processes that share one processor; yield their pids."""
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
    with running("import time; time.sleep(600)", cpu=min(os.sched_getaffinity(0))) as (pid,):
        assert not look_at(pid).is_stopped
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        assert look_at(pid).is_stopped


@skip_unless(
    Path("/proc/self/schedstat").exists(),
    "this kernel does not count waits",
    "a kernel with CONFIG_SCHED_INFO",
)
def test_those_that_share_a_processor_wait_for_it() -> None:
    with running(*[SPIN] * 3, cpu=min(os.sched_getaffinity(0))) as pids:
        before = [look_at(pid).waited_s for pid in pids]
        wait_until(
            lambda: all(look_at(pid).waited_s > was for pid, was in zip(pids, before, strict=True)),
            "each has waited for the other two",
        )


def test_one_that_is_gone_has_waited_for_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    assert (look_at(process.pid).waited_s, look_at(process.pid).is_stopped) == (0.0, False)
