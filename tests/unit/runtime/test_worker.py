"""Test worker threads: they return results and exceptions of jobs. Background threads have a lower
priority, and pause so as to use only their share of a core.
"""

import os
import subprocess
import sys
import threading
from collections import deque

import pytest

from hadal.runtime.worker import MIN_REST_S, NICE, Pace, Worker, lower_priority
from tests.waiting import DEADLINE_S, join, wait_until


class Clock:
    """Clock for a Pace, in place of `time`: time passes only as the test says."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._of_thread = threading.local()

    def monotonic(self) -> float:
        return self.now_s

    def thread_time(self) -> float:
        return getattr(self._of_thread, "worked_s", 0.0)

    def work(self, seconds: float) -> None:
        """Let the calling thread use a core for this long."""
        self._of_thread.worked_s = self.thread_time() + seconds
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("hadal.runtime.worker.time", made)
    return made


def take(worker: Worker[int, int], count: int) -> list[int]:
    found: list[int] = []
    wait_until(lambda: found.extend(worker.take()) or len(found) >= count, "the results are there")
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
    assert all(woken.acquire(timeout=DEADLINE_S) for _ in range(5))
    worker.put(7)
    assert worker.take() == [7]
    assert worker.stop(DEADLINE_S)
    assert not woken.acquire(blocking=False)


def test_what_a_job_raises_is_raised_once_in_the_host_and_the_next_is_done() -> None:
    woken = threading.Semaphore(0)
    worker: Worker[int, int] = Worker("test", lambda job: 12 // job, woken.release)
    worker.start()
    worker.submit(0)
    assert woken.acquire(timeout=DEADLINE_S)
    with pytest.raises(ZeroDivisionError):
        worker.take()
    worker.submit(3)
    assert take(worker, 1) == [4]
    assert worker.stop(DEADLINE_S)


def test_several_threads_begin_what_may_run_beside_the_rest() -> None:
    """Two jobs of the same parity must not run at once."""
    go, begun, lock = threading.Event(), list[int](), threading.Lock()
    was_asked = threading.Event()

    def do(job: int) -> int:
        with lock:
            begun.append(job)
        assert go.wait(DEADLINE_S)
        return job

    def pick(waiting: deque[int], running: list[int]) -> int | None:
        fit = [job for job in waiting if all((job - one) % 2 for one in running)]
        if fit:
            waiting.remove(fit[0])
        elif len(running) == 2 and len(waiting) == 3:
            was_asked.set()  # The third thread asked when all jobs were queued.
        return fit[0] if fit else None

    worker: Worker[int, int] = Worker("test", do, lambda: None, pick=pick, num_threads=3)
    worker.start()
    for job in (2, 4, 1, 6, 3):
        worker.submit(job)
    wait_until(lambda: len(begun) == 2, "two have begun")
    assert was_asked.wait(DEADLINE_S)
    assert sorted(begun) == [1, 2]
    go.set()
    worker.settle()
    assert sorted(worker.take()) == [1, 2, 3, 4, 6]
    assert [job for job in begun if job % 2 == 0] == [2, 4, 6]
    assert worker.stop(DEADLINE_S)


@pytest.mark.parametrize("is_draining", [False, True])
def test_stopping_ends_what_runs_and_what_waits_if_asked(is_draining: bool) -> None:
    begun, go = threading.Event(), threading.Event()

    def do(job: int) -> int:
        begun.set()
        assert go.wait(DEADLINE_S)
        return job

    worker: Worker[int, int] = Worker("test", do, lambda: None)
    worker.start()
    for job in range(3):
        worker.submit(job)
    assert begun.wait(DEADLINE_S)
    assert not worker.stop(0.05, is_draining=is_draining), "it is in the middle of a job"
    go.set()
    assert worker.stop(DEADLINE_S, is_draining=is_draining)
    assert worker.take() == ([0, 1, 2] if is_draining else [0])


def test_a_priority_is_a_threads_own() -> None:
    before, found = os.getpriority(os.PRIO_PROCESS, 0), []

    def run() -> None:
        lower_priority()
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=run)
    thread.start()
    join(thread)
    assert found == [min(before + NICE, 19)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


@pytest.mark.parametrize(("own", "background"), [(10, 15), (19, 19)])
def test_a_process_of_low_priority_keeps_its_order(own: int, background: int) -> None:
    """A background thread's priority is never above the process's own, which only root may exceed."""
    code = (
        "import os; from hadal.runtime.worker import lower_priority;"
        f" os.setpriority(os.PRIO_PROCESS, 0, {own}); from threading import Thread; t ="
        " Thread(target=lambda: (lower_priority(), print(os.getpriority(os.PRIO_PROCESS, 0))));"
        " t.start(); t.join()"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert found.stdout.split() == [str(background)], found.stderr


def test_what_was_worked_is_rested_for(clock: Clock) -> None:
    pace = Pace(0.25)
    assert pace.owed_s() == 0.0
    for _ in range(3):
        clock.work(0.01)
        assert pace.owed_s() == pytest.approx(0.03)
        clock.now_s += 0.03
        assert pace.owed_s() == 0.0


def test_idle_time_is_not_saved_up(clock: Clock) -> None:
    pace = Pace(0.25)
    pace.owed_s()
    clock.now_s += 0.2
    pace.owed_s()
    clock.work(0.02)
    assert pace.owed_s() == pytest.approx(0.06)


def test_short_rests_add_up(clock: Clock) -> None:
    pace = Pace(0.5)
    rests = [pace.owed_s()]
    for _ in range(8):
        clock.work(MIN_REST_S / 4)
        rests.append(pace.owed_s())
    assert rests[:4] == [0.0] * 4
    assert rests[4:] == pytest.approx([MIN_REST_S * (1 + n / 4) for n in range(5)])


def test_threads_share_one_pace(clock: Clock) -> None:
    pace, owed_s = Pace(0.25), list[float]()

    def run() -> None:
        pace.owed_s()
        clock.work(0.01)
        owed_s.append(pace.owed_s())

    for _ in range(3):
        thread = threading.Thread(target=run)
        thread.start()
        join(thread)
    assert owed_s == pytest.approx([0.03, 0.06, 0.09])
