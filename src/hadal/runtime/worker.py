"""Threads other than the host's: how they get jobs, and how results return.

    host's thread    submit(job) ...................... take() -> results
    worker's thread          do(job) -> result, wake()

Also limits how much a thread disturbs the computing thread: by a lower priority, and by a largest
share of a core. Does not depend on the jobs.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

WAIT_S = 1.0
"""Longest sleep of a thread before it checks for jobs again."""
NICE = 5
"""Niceness added to a background thread: it then has a third of the others' weight if cores are
short (sched(7)). No more, because a thread that is preempted while it holds the interpreter delays
the computing thread too.
"""
NICE_MAX = 19
"""Highest niceness of any thread (sched(7))."""
SHARE = 0.1
"""Share of one core for background work. A rank's step waits for its slowest peer, so a delay of
one rank delays all, and ranks that share cores stage at the same time: at 0.25, four of them on two
cores made steps 1.5x as long (bench/balance_live). A tenth of a core still moves an expert of 44 MB
several times a second.
"""
MIN_REST_S = 0.001
"""Shortest rest; shorter ones add up first, because a wake-up costs much of that time."""
J = TypeVar("J")
R = TypeVar("R")


def first_waiting(waiting: deque[J], running: list[J]) -> J | None:
    """Return the oldest waiting job, None if none waits: the default choice of a Worker."""
    return waiting.popleft() if waiting else None


class Worker(Generic[J, R]):
    """Threads that do jobs. `put` may be called from any thread. All other methods are called from
    the thread that submits jobs: the host's, or that of a worker with another worker as helper.
    """

    def __init__(
        self,
        name: str,
        do: Callable[[J], R | None],
        wake: Callable[[], None],
        *,
        pick: Callable[[deque[J], list[J]], J | None] = first_waiting,
        num_threads: int = 1,
        in_background: bool = False,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        """`do` does a job, in one of the threads, and returns a result or None; after a result
        `wake` is called. `pick` chooses the next job among waiting ones, given the running ones;
        None: none of them yet. It is called repeatedly, with `changed` locked. `in_background`: the
        threads have a lower priority. `begin` is called first in each thread.
        """
        self.changed = threading.Condition()
        """Lock of `waiting`, `running` and further state of the worker's user."""
        self.waiting: deque[J] = deque()
        self.running: list[J] = []
        self.is_stopping = False
        self._is_draining = False
        self._do = do
        self._wake = wake
        self._pick = pick
        self._in_background = in_background
        self._begin = begin
        self._results: deque[R | BaseException] = deque()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True)
            for index in range(num_threads)
        ]

    def start(self) -> None:
        """Start the threads: from now on `do`, `pick` and `wake` are called."""
        for thread in self._threads:
            thread.start()

    def submit(self, job: J) -> None:
        with self.changed:
            self.waiting.append(job)
            self.changed.notify()

    def put(self, result: R) -> None:
        """Add a result without a job, for `take` to return. Does not call `wake`."""
        self._results.append(result)

    def take(self) -> list[R]:
        """Return the available results. Raises the exception of `do` or `begin`; the worker's user
        decides whether it is a bug.
        """
        done = []
        while self._results:
            result = self._results.popleft()
            if isinstance(result, BaseException):
                raise result
            done.append(result)
        return done

    def settle(self) -> None:
        """Wait until no job waits or runs; for ever, if a job hangs."""
        with self.changed:
            while self.waiting or self.running:
                self.changed.wait(WAIT_S)

    def stop(self, timeout_s: float, *, is_draining: bool = False) -> bool:
        """Let running jobs finish and end the threads. Waiting jobs are dropped, or done first if
        `is_draining`. Return False if a thread has not ended within `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        with self.changed:
            self.is_stopping, self._is_draining = True, is_draining
            self.changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    # ---- in the threads ----
    def _run(self) -> None:
        if self._in_background:
            lower_priority()
        try:
            self._begin()
        except BaseException as error:
            self._results.append(error)
            self._wake()
        while (job := self._next()) is not None:
            result: R | BaseException | None
            try:
                result = self._do(job)
            except BaseException as error:
                result = error
            if result is not None:
                self._results.append(result)
            with self.changed:
                index = next(i for i, running in enumerate(self.running) if running is job)
                del self.running[index]
                self.changed.notify_all()
            if result is not None:
                self._wake()

    def _next(self) -> J | None:
        """Wait for the next job and return it; None: the thread should end."""
        with self.changed:
            while not self.is_stopping or (self._is_draining and self.waiting):
                job = self._pick(self.waiting, self.running)
                if job is not None:
                    self.running.append(job)
                    return job
                self.changed.wait(WAIT_S)
            return None


def lower_priority() -> None:
    """Lower the priority of the calling thread and of threads it starts from now on. On Linux each
    thread has its own priority, and only the superuser may raise one.
    """
    nice = min(os.getpriority(os.PRIO_PROCESS, os.getpid()) + NICE, NICE_MAX)
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


class Pace:
    """Limit on background threads: together they use `share` of a core over any stretch of work.
    Idle time before the work is not credited.
    """

    def __init__(self, share: float = SHARE) -> None:
        self._share = share
        self._lock = threading.Lock()
        self._rested_at_s = 0.0
        """Time until which threads must rest to bring their work so far down to the share."""
        self._of_thread = threading.local()

    def owed_s(self) -> float:
        """Return the seconds that the calling thread should rest now; 0: none. Its work before its
        first call does not count.
        """
        worked_s, now_s = time.thread_time(), time.monotonic()
        new_s = worked_s - getattr(self._of_thread, "worked_s", worked_s)
        self._of_thread.worked_s = worked_s
        with self._lock:
            self._rested_at_s = max(self._rested_at_s + new_s / self._share, now_s)
            owed_s = self._rested_at_s - now_s
        return owed_s if owed_s >= MIN_REST_S else 0.0
