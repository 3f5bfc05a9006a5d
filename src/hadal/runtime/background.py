"""How a thread keeps out of the way of the one that computes: a lower priority, and a share of a
core at most.

Knows nothing of what the threads do.
"""

from __future__ import annotations

import os
import threading
import time

NICE = 5
"""Niceness of background threads, above the process's own, which is everybody else's. A third of
the others' weight where cores are short (sched(7)). Not more: a thread that is put aside while it
holds the interpreter holds up the computing thread as well.
"""
NICE_MAX = 19
"""Highest niceness of any thread (sched(7))."""
SHARE = 0.1
"""Share of one core that background work may take. A rank's step waits for its slowest peer, so
what one rank loses all lose, and ranks that share cores stage side by side: at a quarter, four of
them on two cores made steps 1.5 times as long (bench/balance_live). A tenth of a core still moves
an expert of 44 MB several times a second (bench/staging).
"""
MIN_REST_S = 0.001
"""Shorter rests are put off until they add up: waking takes a good part of it."""


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
