"""Threads beside the host's: jobs in, results out, what breaks comes out as well. In the background
their priority is lower and their own, and they rest as long as their share asks.
"""

import os
import subprocess
import sys
import threading
import time
from collections import deque

import pytest

from hadal.runtime.worker import MIN_REST_S, NICE, Pace, Worker, lower_priority


def work(seconds: float) -> float:
    """Take so much of a core; return how much it was."""
    begun_s = time.thread_time()
    while time.thread_time() - begun_s < seconds:
        sum(range(1000))
    return time.thread_time() - begun_s


def take(worker: Worker[int, int], count: int) -> list[int]:
    found, deadline_s = [], time.monotonic() + 10
    while len(found) < count:
        assert time.monotonic() < deadline_s
        found += worker.take()
        time.sleep(0.001)
    return found


def test_jobs_are_done_in_order_and_each_result_wakes_the_host() -> None:
    woken = threading.Semaphore(0)
    worker: Worker[int, int] = Worker(
        "test", lambda job: 10 * job if job % 2 else None, woken.release
    )
    worker.start()
    for job in range(10):
        worker.submit(job)
    assert take(worker, 5) == [10, 30, 50, 70, 90]
    assert all(woken.acquire(timeout=5) for _ in range(5))
    worker.put(7)
    assert worker.take() == [7]
    assert worker.stop(5)
    assert not woken.acquire(blocking=False)


def test_what_a_job_raises_is_raised_once_in_the_host_and_the_next_is_done() -> None:
    woken = threading.Semaphore(0)
    worker: Worker[int, int] = Worker("test", lambda job: 12 // job, woken.release)
    worker.start()
    worker.submit(0)
    assert woken.acquire(timeout=5)
    with pytest.raises(ZeroDivisionError):
        worker.take()
    worker.submit(3)
    assert take(worker, 1) == [4]
    assert worker.stop(5)


def test_several_threads_begin_what_may_run_beside_the_rest() -> None:
    """Of two jobs of the same parity one waits for the other."""
    go, begun, lock = threading.Event(), list[int](), threading.Lock()

    def do(job: int) -> int:
        with lock:
            begun.append(job)
        assert go.wait(10)
        return job

    def pick(waiting: deque[int], running: list[int]) -> int | None:
        fit = [job for job in waiting if all((job - one) % 2 for one in running)]
        if fit:
            waiting.remove(fit[0])
        return fit[0] if fit else None

    worker: Worker[int, int] = Worker("test", do, lambda: None, pick=pick, num_threads=3)
    worker.start()
    for job in (2, 4, 1, 6, 3):
        worker.submit(job)
    deadline_s = time.monotonic() + 10
    while len(begun) < 2 and time.monotonic() < deadline_s:
        time.sleep(0.001)
    time.sleep(0.05)
    assert sorted(begun) == [1, 2]
    go.set()
    worker.settle()
    assert sorted(worker.take()) == [1, 2, 3, 4, 6]
    assert [job for job in begun if job % 2 == 0] == [2, 4, 6]
    assert worker.stop(5)


@pytest.mark.parametrize("is_draining", [False, True])
def test_stopping_ends_what_runs_and_what_waits_if_asked(is_draining: bool) -> None:
    begun, go = threading.Event(), threading.Event()

    def do(job: int) -> int:
        begun.set()
        assert go.wait(10)
        return job

    worker: Worker[int, int] = Worker("test", do, lambda: None)
    worker.start()
    for job in range(3):
        worker.submit(job)
    assert begun.wait(10)
    assert not worker.stop(0.05, is_draining=is_draining), "it is in the middle of a job"
    go.set()
    assert worker.stop(10, is_draining=is_draining)
    assert worker.take() == ([0, 1, 2] if is_draining else [0])


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
        "import os; from hadal.runtime.worker import lower_priority;"
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


def test_threads_share_one_pace() -> None:
    pace, begun_s, worked = Pace(0.25), time.monotonic(), list[float]()

    def run() -> None:
        pace.owed_s()
        for _ in range(3):
            worked.append(work(0.01))
            time.sleep(pace.owed_s())

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(worked) == 9
    assert time.monotonic() - begun_s >= sum(worked) / 0.25 - 6 * MIN_REST_S
