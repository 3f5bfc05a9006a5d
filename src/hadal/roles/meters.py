"""Smoothed measurements that roles report, computed from what their events say. No clock of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping


class StepMeter:
    """Steps so far, and the smoothed time of one in the Runner."""

    def __init__(self, smoothing: float = 0.1) -> None:
        self._smoothing = smoothing
        self.num_steps = 0
        self.step_ms = 0.0

    def done(self, elapsed_s: float) -> None:
        """A step took `elapsed_s` in the Runner."""
        weight = self._smoothing if self.num_steps else 1.0
        self.step_ms += weight * (elapsed_s * 1e3 - self.step_ms)
        self.num_steps += 1


class BalanceMeter:
    """Smooths what each step says of the balance between ranks, by objective (core/balance)."""

    def __init__(self, smoothed: dict[str, float], smoothing: float = 0.05) -> None:
        """`smoothed` is kept up to date in place; an objective that no step spoke of yet is not in it."""
        self._smoothed = smoothed
        self._smoothing = smoothing

    def add(self, balance: Mapping[str, float]) -> None:
        """A step was balanced like this."""
        for name, value in balance.items():
            before = self._smoothed.get(name, value)
            self._smoothed[name] = before + self._smoothing * (value - before)

    def reset(self) -> None:
        """Other ranks share the work now."""
        self._smoothed.clear()


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
