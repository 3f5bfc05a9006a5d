"""Test the failure detector: silence that counts, and silence with another cause."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

from hadal.runtime.process.watch import ProcessState, Watch, look_at
from tests.needs import skip_unless
from tests.waiting import DEADLINE_S, wait_until

TIMEOUT_S, PERIOD_S = 2.0, 0.5
PIDS = {"gateway": 7, "gateway-1": 8}


def frozen_at(
    watch: Watch, start_s: float, limit_s: float, *, speaks: tuple[str, ...] = ()
) -> dict[str, float]:
    """Return process -> delay until it was first found frozen; the detector looks every PERIOD_S."""
    found: dict[str, float] = {}
    now_s = start_s
    while now_s <= start_s + limit_s:
        for name in speaks:
            watch.note_alive(now_s, name)
        for name in watch.frozen(now_s, PIDS):
            found.setdefault(name, now_s - start_s)
        now_s += PERIOD_S
    return found


def watching(look: ProcessState | None = None) -> Watch:
    watch = Watch(TIMEOUT_S, PERIOD_S, lambda name: look or ProcessState(3.0, is_stopped=False))
    for name in PIDS:
        watch.note_alive(0.0, name)
    return watch


def test_one_that_says_nothing_though_it_could_is_frozen() -> None:
    assert frozen_at(watching(), 0.0, 10.0, speaks=("gateway",)) == {
        "gateway-1": TIMEOUT_S + PERIOD_S
    }


def test_a_stopped_one_is_frozen() -> None:
    stopped = ProcessState(0.0, is_stopped=True)
    assert frozen_at(watching(stopped), 0.0, 10.0, speaks=("gateway",)) == {
        "gateway-1": TIMEOUT_S + PERIOD_S
    }


def test_one_that_gets_no_processor_is_waited_for() -> None:
    waited_s = count(0.0, TIMEOUT_S)
    watch = Watch(TIMEOUT_S, PERIOD_S, lambda name: ProcessState(next(waited_s), is_stopped=False))
    for name in PIDS:
        watch.note_alive(0.0, name)
    assert frozen_at(watch, 0.0, 10.0, speaks=("gateway",)) == {}


@pytest.mark.promise(
    "Time without a processor does not count, nor does time in which the failure "
    "detector itself did not run."
)
def test_a_judge_who_stood_still_begins_to_count_where_it_left() -> None:
    """The detector itself did not run for an hour: heartbeats of that time may not be received yet."""
    watch = watching()
    assert frozen_at(watch, 0.0, 1.0) == {}
    assert frozen_at(watch, 3600.0, TIMEOUT_S - 1.0) == {}
    watch.note_alive(3602.0, "gateway")
    watch.note_alive(3602.0, "gateway-1")
    assert frozen_at(watch, 3602.0, TIMEOUT_S) == {}


@skip_unless(
    Path("/proc/self/schedstat").exists(),
    "this kernel does not count waits",
    "a kernel with CONFIG_SCHED_INFO",
)
def test_a_stopped_process_is_found_out_and_a_crowded_one_waited_for() -> None:
    """Simulated time advances only when the crowded process has waited for as long."""
    cpu = min(os.sched_getaffinity(0))
    spinning = [
        subprocess.Popen(
            [sys.executable, "-c", "while True: pass"],
            preexec_fn=lambda: os.sched_setaffinity(0, {cpu}),
        )
        for _ in range(4)
    ]
    try:
        stopped, crowded = (process.pid for process in spinning[:2])
        pids = {"crowded": crowded, "stopped": stopped}
        watch = Watch(0.4, 0.1, lambda name: look_at(pids[name]))
        now_s = 0.0
        for name in pids:
            watch.note_alive(now_s, name)
        os.kill(stopped, signal.SIGSTOP)
        os.waitpid(stopped, os.WUNTRACED)
        found: list[str] = []
        while not found:
            until_s = look_at(crowded).waited_s + 0.1
            wait_until(lambda until_s=until_s: look_at(crowded).waited_s > until_s, "it waits")
            now_s += 0.1
            found = watch.frozen(now_s, pids)
        assert found == ["stopped"]
        assert watch.why("stopped") == ", stopped"
    finally:
        for process in spinning:
            process.kill()
            process.wait(DEADLINE_S)
