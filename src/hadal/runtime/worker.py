"""Threads beside the host's: what they are given to do, and how what comes of it gets back.

    host's thread    submit(job) ...................... take() -> results
    worker's thread          do(job) -> result, wake()

This file also says how a thread keeps out of the way of the one that computes: by a lower priority,
and by a share of a core at most. Knows nothing of what the threads do.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

WAIT_S = 1.0
"""A thread that nobody wakes looks again after so long."""
NICE = 5
"""What a background thread adds to the niceness of its process: it then has a third of the others'
weight where cores are short (sched(7)). It adds no more, for a thread that is put aside while it
holds the interpreter holds up the computing thread as well.
"""
NICE_MAX = 19
"""Highest niceness of any thread (sched(7))."""
SHARE = 0.1
"""Share of one core that background work may take. A rank's step waits for its slowest peer, so
what one rank loses all lose, and ranks that share cores stage side by side: at a quarter, four of
them on two cores made steps 1.5 times as long (bench/balance_live). A tenth of a core still moves
an expert of 44 MB several times a second (LOG.md).
"""
MIN_REST_S = 0.001
"""Shorter rests are put off until they add up: waking takes a good part of it."""
J = TypeVar("J")
R = TypeVar("R")


def first_waiting(waiting: deque[J], running: list[J]) -> J | None:
    """Take the jobs in the order in which they came."""
    return waiting.popleft() if waiting else None


class Worker(Generic[J, R]):
    """Threads that do jobs. `put` may be called from any thread, all other methods from the one
    that the jobs come from: the host's, or a worker's that has another as its helper.
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
        """`do` does a job, from one of the threads, and returns what is to be handed over; then
        `wake` is called. `pick` takes the job that is begun next out of those that wait, given
        those that run; None: none of them yet. It is called under `changed`, again and again.
        `in_background`: the threads give way to all others. `begin` is called first in each thread.
        """
        self.changed = threading.Condition()
        """Guards `waiting`, `running` and whatever else its user wants to be guarded."""
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
        """Add a result that no thread had to work for to what `take` returns. Wakes nobody."""
        self._results.append(result)

    def take(self) -> list[R]:
        """Return the results that are there. Raises what `do` raised: the worker's user knows
        whether that is a bug.
        """
        done = []
        while self._results:
            result = self._results.popleft()
            if isinstance(result, BaseException):
                raise result
            done.append(result)
        return done

    def settle(self) -> None:
        """Wait until nothing waits or runs: for ever, if a job hangs."""
        with self.changed:
            while self.waiting or self.running:
                self.changed.wait(WAIT_S)

    def stop(self, timeout_s: float, *, is_draining: bool = False) -> bool:
        """Let what runs finish and end the threads; what waits is not begun, or done before if
        `is_draining`. False if a thread has not ended within `timeout_s`.
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
        """Wait for the next job and return it; None: the thread is to end."""
        with self.changed:
            while not self.is_stopping or (self._is_draining and self.waiting):
                job = self._pick(self.waiting, self.running)
                if job is not None:
                    self.running.append(job)
                    return job
                self.changed.wait(WAIT_S)
            return None


def lower_priority() -> None:
    """Make the calling thread, and threads that it starts from now on, yield to the others. Linux:
    a priority is a thread's own, and only the superuser may raise one.
    """
    nice = min(os.getpriority(os.PRIO_PROCESS, os.getpid()) + NICE, NICE_MAX)
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


class Pace:
    """Tells threads when to rest, so that together they take `share` of a core over any stretch of
    work. Idle time before the work is not saved up.
    """

    def __init__(self, share: float = SHARE) -> None:
        self._share = share
        self._lock = threading.Lock()
        self._rested_at_s = 0.0
        """When all that was worked until now has been rested for."""
        self._of_thread = threading.local()

    def owed_s(self) -> float:
        """How long the calling thread is to rest now; 0: go on. What it worked before its first
        call does not count.
        """
        worked_s, now_s = time.thread_time(), time.monotonic()
        new_s = worked_s - getattr(self._of_thread, "worked_s", worked_s)
        self._of_thread.worked_s = worked_s
        with self._lock:
            self._rested_at_s = max(self._rested_at_s + new_s / self._share, now_s)
            owed_s = self._rested_at_s - now_s
        return owed_s if owed_s >= MIN_REST_S else 0.0
