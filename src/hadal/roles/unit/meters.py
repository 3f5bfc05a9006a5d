"""Smoothed measurements that roles report, computed from their events. They read no clock."""

from __future__ import annotations

import math
from collections.abc import Mapping

_FALLS, _RISES = 0.03, 0.0003
"""Largest fractions by which one step lowers or raises the estimated step time of a single request.
Their ratio makes the estimate the time that about 1 step in 100 undercuts. Steps of costlier
requests, or delayed by other work on the host, hardly count.
"""
_LINE_VARIANCE = 2.0
"""Minimum variance of the number of requests per step for which a fitted line is meaningful."""
_CROWD = 2.0
"""Minimum mean requests per step for a meaningful line from a single request to that mean."""


class StepMeter:
    """Number of steps, and the smoothed time of one in the Runner."""

    def __init__(self, smoothing: float = 0.1) -> None:
        self._smoothing = smoothing
        self.num_steps = 0
        self.step_ms = 0.0

    def done(self, elapsed_s: float) -> None:
        """Count a step that took `elapsed_s` in the Runner."""
        weight = self._smoothing if self.num_steps else 1.0
        self.step_ms += weight * (elapsed_s * 1e3 - self.step_ms)
        self.num_steps += 1


class LineMeter:
    """Line of step seconds over the number of requests: from steps of a single request to the
    recent mean.

    Steps of many requests do not show what one alone would take: on a CPU the second request needs
    experts of its own, the twelfth hardly any. If no step had a single request, it is the
    least-squares line through the observed steps.
    """

    def __init__(self, memory: float = 256.0) -> None:
        """`memory`: number of steps in which an observation's weight falls to 1/e."""
        self._keeps = 1.0 - 1.0 / memory
        self._weight = self._mean_x = self._mean_y = self._var_x = self._cov = 0.0
        self._alone_s = 0.0
        """Estimated step seconds of a single request; 0: none was observed."""
        self.line = (0.0, 0.0)
        """Seconds of a step without requests, and seconds per request, neither negative; 0 while
        steps were too alike.
        """

    def add(self, num: int, seconds: float) -> None:
        """Add a step of `num` requests that took `seconds`."""
        self._weight = self._weight * self._keeps + 1.0
        share = 1.0 / self._weight
        from_x, from_y = num - self._mean_x, seconds - self._mean_y
        self._mean_x += share * from_x
        self._mean_y += share * from_y
        self._var_x = (1.0 - share) * (self._var_x + share * from_x * from_x)
        self._cov = (1.0 - share) * (self._cov + share * from_x * from_y)
        if num == 1:
            alone_s = self._alone_s or seconds
            self._alone_s = min(max(seconds, alone_s * (1.0 - _FALLS)), alone_s * (1.0 + _RISES))
        if self._alone_s > 0.0 and self._mean_x >= _CROWD:
            slope = (self._mean_y - self._alone_s) / (self._mean_x - 1.0)
            slope = min(max(slope, 0.0), self._alone_s * (1.0 - _FALLS))
            self.line = (self._alone_s - slope, slope)
        elif self._alone_s == 0.0 and self._var_x >= _LINE_VARIANCE:
            slope = min(max(self._cov / self._var_x, 0.0), self._mean_y / self._mean_x)
            self.line = (self._mean_y - slope * self._mean_x, slope)


class BalanceMeter:
    """Smoothed balance between ranks, by objective (core/balance)."""

    def __init__(self, smoothing: float = 0.05) -> None:
        self.smoothed: dict[str, float] = {}
        """Objective -> mean over maximum of the ranks; objectives without a step are left out."""
        self._smoothing = smoothing

    def add(self, balance: Mapping[str, float]) -> None:
        """Add the balance of one step."""
        for name, value in balance.items():
            before = self.smoothed.get(name, value)
            self.smoothed[name] = before + self._smoothing * (value - before)

    def reset(self) -> None:
        """Forget the balance: other ranks share the work now."""
        self.smoothed.clear()


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
        """Return the rate; 0 before the first event."""
        if self._began_s is None:
            return 0.0
        # Divide by the memory's effective length, which is shorter than the time constant at first.
        seen_s = self._time_constant_s * (
            1.0 - math.exp(-(now_s - self._began_s) / self._time_constant_s)
        )
        return self._faded(now_s) / max(seen_s, 1.0)

    def _faded(self, now_s: float) -> float:
        return self._weight * math.exp(-(now_s - self._last_s) / self._time_constant_s)
