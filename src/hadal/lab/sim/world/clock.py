"""Simulated time: a queue of actions ordered by time, then by insertion. Independent of roles."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

Action = Callable[[], None]


class SimClock:
    """Clock seam with a simulated time that `run` advances."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._queue: list[tuple[float, int, Action]] = []
        self._numbers = count()

    def now(self) -> float:
        return self._now_s

    def at(self, time_s: float, action: Action) -> None:
        heappush(
            self._queue,
            (time_s if time_s > self._now_s else self._now_s, next(self._numbers), action),
        )

    def after(self, delay_s: float, action: Action) -> None:
        self.at(self._now_s + delay_s, action)

    def run(self, until_s: float, is_done: Callable[[], bool] | None = None) -> None:
        """Run the actions due up to `until_s`; stop early once `is_done` returns True."""
        queue = self._queue
        while queue and queue[0][0] <= until_s and not (is_done is not None and is_done()):
            self._now_s, _, action = heappop(queue)
            action()
