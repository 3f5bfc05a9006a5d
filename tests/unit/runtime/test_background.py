"""Background threads: their priority is lower and their own, and they rest as long as their share
asks.
"""

import os
import subprocess
import sys
import threading
import time

import pytest

from hadal.runtime.background import MIN_REST_S, NICE, Pace, lower_priority


def work(seconds: float) -> float:
    """Take so much of a core; return how much it was."""
    begun_s = time.thread_time()
    while time.thread_time() - begun_s < seconds:
        sum(range(1000))
    return time.thread_time() - begun_s


def test_a_priority_is_a_threads_own() -> None:
    before, found = os.getpriority(os.PRIO_PROCESS, 0), []

    def run() -> None:
        lower_priority()
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(5)
    assert found == [min(before + NICE, 19)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


@pytest.mark.parametrize(("own", "background"), [(10, 15), (19, 19)])
def test_a_process_of_low_priority_keeps_its_order(own: int, background: int) -> None:
    """Where others than the superuser run it, a priority above the process's own would be
    refused.
    """
    code = (
        "import os; from hadal.runtime.background import lower_priority;"
        f" os.setpriority(os.PRIO_PROCESS, 0, {own}); from threading import Thread; t ="
        " Thread(target=lambda: (lower_priority(), print(os.getpriority(os.PRIO_PROCESS, 0))));"
        " t.start(); t.join()"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout.split() == [str(background)], found.stderr


def test_what_was_worked_is_rested_for() -> None:
    pace, begun_s, worked_s = Pace(0.25), time.monotonic(), 0.0
    assert pace.owed_s() == 0.0
    for _ in range(3):
        worked_s += work(0.01)
        owed_s = pace.owed_s()
        elapsed_s = time.monotonic() - begun_s
        assert owed_s >= worked_s / 0.25 - elapsed_s - 2 * MIN_REST_S
        time.sleep(owed_s)
        assert pace.owed_s() == 0.0
    assert time.monotonic() - begun_s >= worked_s / 0.25 - 2 * MIN_REST_S


def test_idle_time_is_not_saved_up() -> None:
    pace = Pace(0.25)
    pace.owed_s()
    time.sleep(0.2)
    pace.owed_s()
    begun_s = time.monotonic()
    worked_s = work(0.02)
    owed_s = pace.owed_s()
    assert owed_s >= worked_s / 0.25 - (time.monotonic() - begun_s) - 2 * MIN_REST_S


def test_short_rests_add_up() -> None:
    pace = Pace(0.5)
    rests = [pace.owed_s()]
    for _ in range(20):
        work(MIN_REST_S / 5)
        rests.append(pace.owed_s())
    assert all(rest == 0.0 or rest >= MIN_REST_S for rest in rests)
