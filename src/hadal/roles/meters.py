"""Smoothed measurements that roles report, computed from the times of their events. No clock of their own."""

from __future__ import annotations

import math


class StepMeter:
    """Duration of a step, and how long the Runner stood idle before it though the plan was there.

    A step can begin when its plan was handed over and the step before it was done; what passes from then to its
    completion beyond the Runner's own time is overhead: messages, thread switches, delivery.
    """

    def __init__(self, smoothing: float = 0.1) -> None:
        self._smoothing = smoothing
        self._done_s = -math.inf
        self.num_steps = 0
        self.step_ms = 0.0
        self.overhead_ms = 0.0

    def done(self, now_s: float, emitted_s: float, elapsed_s: float) -> None:
        """A step that was emitted at `emitted_s` and took `elapsed_s` in the Runner was reported at `now_s`."""
        overhead_ms = max(0.0, now_s - max(emitted_s, self._done_s) - elapsed_s) * 1e3
        weight = self._smoothing if self.num_steps else 1.0
        self.step_ms += weight * (elapsed_s * 1e3 - self.step_ms)
        self.overhead_ms += weight * (overhead_ms - self.overhead_ms)
        self.num_steps += 1
        self._done_s = now_s


class RateMeter:
    """Events per second, with exponentially fading memory."""

    def __init__(self, time_constant_s: float = 30.0) -> None:
        self._time_constant_s = time_constant_s
        self._weight = 0.0
        self._began_s: float | None = None
        self._last_s = 0.0

    def count(self, now_s: float) -> None:
        if self._began_s is None:
            self._began_s = self._last_s = now_s
        self._weight = self._faded(now_s) + 1.0
        self._last_s = now_s

    def per_s(self, now_s: float) -> float:
        """0 until something was counted."""
        if self._began_s is None:
            return 0.0
        # Divide by the memory's effective length, which is shorter than the time constant at first.
        seen_s = self._time_constant_s * (1.0 - math.exp(-(now_s - self._began_s) / self._time_constant_s))
        return self._faded(now_s) / max(seen_s, 1.0)

    def _faded(self, now_s: float) -> float:
        return self._weight * math.exp(-(now_s - self._last_s) / self._time_constant_s)
