"""The time at which a process may start again, and the point at which it is given up.

Counts exits and failed starts. Independent of processes: starts and ends none.
"""

from __future__ import annotations

from collections import deque

EXITS_MAX = 20
EXITS_WINDOW_S = 60.0
"""More than EXITS_MAX exits in this window mean that starting the process again does not help."""
FAILED_STARTS_MAX = 3
"""Number of starts in a row without readiness at which a process is given up."""
_BACKOFF_S = (0.0, 0.2, 0.5, 1.0, 2.0, 5.0)
_STEADY_S = 10.0
"""After a run longer than this, in seconds, the back-off of a process begins anew."""
PUT_OFF_S = 15.0
"""Seconds that a process rests, while others serve, instead of being given up. Each further rest
without readiness in between takes twice as long, up to PUT_OFF_MAX_S.
"""
PUT_OFF_MAX_S = 240.0


class Backoff:
    """Exits of one process, and the time of its next start."""

    def __init__(self, name: str) -> None:
        self.start_at_s = 0.0
        """Earliest time of the next start."""
        self.num_failed_starts = 0
        """Number of starts in a row that did not become ready."""
        self._name = name
        self._exits_s: deque[float] = deque(maxlen=EXITS_MAX + 1)
        self._num_steps = 0
        self._put_off_s = PUT_OFF_S

    def start_at(self, time_s: float) -> None:
        """Plan the next start for this time."""
        self.start_at_s = time_s

    def start_by(self, time_s: float) -> None:
        """Plan the next start for this time at the latest."""
        self.start_at_s = min(self.start_at_s, time_s)

    def not_before(self, time_s: float) -> None:
        """Plan the next start for this time at the earliest."""
        self.start_at_s = max(self.start_at_s, time_s)

    def ready(self) -> None:
        """Note that the process works."""
        self.num_failed_starts = 0
        self._put_off_s = PUT_OFF_S

    def ended(self, now_s: float, lived_s: float, *, was_ready: bool) -> None:
        """Count an exit that is the process's own fault, and plan the next start."""
        self._exits_s.append(now_s)
        if not was_ready:
            self.num_failed_starts += 1
        self._num_steps = 0 if lived_s > _STEADY_S else self._num_steps + 1
        wait_s = _BACKOFF_S[min(max(self._num_steps - 1, 0), len(_BACKOFF_S) - 1)]
        self.start_at_s = now_s + wait_s

    def reset(self) -> None:
        """Forget failed starts: the process is not wanted now."""
        self.num_failed_starts = self._num_steps = 0

    def delay(self, now_s: float) -> float:
        """Plan the next try of a process that could not be started for lack of memory or
        descriptors. Return the delay in seconds.
        """
        self._num_steps += 1
        wait_s = _BACKOFF_S[min(self._num_steps, len(_BACKOFF_S) - 1)]
        self.start_at_s = now_s + wait_s
        return wait_s

    def put_off(self, now_s: float) -> float:
        """Rest instead of giving the process up; reset its counts. Return the rest in seconds."""
        rest_s, self._put_off_s = self._put_off_s, min(2.0 * self._put_off_s, PUT_OFF_MAX_S)
        self.start_at_s = now_s + rest_s
        self.num_failed_starts = 0
        self._exits_s.clear()
        return rest_s

    def why_give_up(self, now_s: float) -> str | None:
        """Return why the process should not be started again, None if it may be."""
        if self.num_failed_starts >= FAILED_STARTS_MAX:
            return f"{self._name} ended {self.num_failed_starts} times before it was ready"
        recent = [at_s for at_s in self._exits_s if now_s - at_s < EXITS_WINDOW_S]
        if len(recent) > EXITS_MAX:
            return f"{self._name} ended {len(recent)} times in {EXITS_WINDOW_S:.0f} s"
        return None
