"""Distribution of a day's load over its hours, as a clock that runs faster when the load is higher.

    load clock   B(t) = 86,400 s x the part of a day's load that came in [0, t),  B(t + 1 day) = B(t) + 86,400 s

Arrivals at a constant rate by this clock follow the shape of the day in seconds. A pause drawn by
this clock ends when users are awake. Within an hour B is a monotone cubic (Fritsch and Carlson,
SIAM J. Numer. Anal. 17, 1980, with harmonic means as slopes), so its rate is continuous and every
hour has exactly its given share.

Second 0 is the start of the published window: 12:00 in Beijing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hadal.core.arrays import Floats, Ints
from hadal.lab.sim.day.published import FIRST_HOUR, HOUR_S, HOURLY_SHARES
from hadal.policy.demand import DAY_S

DEEPSEEK_SHARES = (*HOURLY_SHARES[FIRST_HOUR:], *HOURLY_SHARES[:FIRST_HOUR])
"""Shares of the published day, from second 0 on."""
STEP_S = 15.0
"""Seconds between two entries of the clock's table; the rate is constant between them."""


class DemandClock:
    """Load clock of a day that repeats."""

    def __init__(self, shares: Sequence[float] = DEEPSEEK_SHARES) -> None:
        """`shares`: load of each hour from second 0 on, scaled to a sum of 1. Raises ValueError
        unless there are 24, all positive.
        """
        if len(shares) != 24 or min(shares) <= 0:
            raise ValueError(
                f"the daily curve has {len(shares)} shares, the smallest {min(shares, default=0)}:"
                " give 24 shares above 0."
            )
        self.shares = np.asarray(shares, dtype=np.float64) / np.sum(shares)
        self._seconds = np.arange(0.0, DAY_S + STEP_S, STEP_S)
        self._loads = _cumulative(self.shares, self._seconds)

    def load_s(self, at_s: Floats | float) -> Floats:
        """Return the load clock's time at `at_s`."""
        day, second = np.divmod(np.asarray(at_s, dtype=np.float64), DAY_S)
        return np.asarray(day * DAY_S + np.interp(second, self._seconds, self._loads))

    def at_s(self, load_s: Floats | float) -> Floats:
        """Return the seconds at which the load clock shows `load_s`."""
        day, load = np.divmod(np.asarray(load_s, dtype=np.float64), DAY_S)
        return np.asarray(day * DAY_S + np.interp(load, self._loads, self._seconds))

    def rate(self, at_s: Floats | float) -> Floats:
        """Return the load per second, with a daily mean of 1; constant for STEP_S."""
        step = (np.asarray(at_s, dtype=np.float64) % DAY_S // STEP_S).astype(np.int64)
        return np.asarray(np.diff(self._loads)[step] / STEP_S)


def hour_index(at_s: Floats) -> Ints:
    """Return the hour of the day since second 0, from 0 to 23."""
    return (at_s % DAY_S // HOUR_S).astype(np.int64)


def hour_beijing(index: int) -> int:
    """Return the hour of day in Beijing that begins `index` hours after second 0."""
    return (FIRST_HOUR + index) % 24


def _cumulative(shares: Floats, seconds: Floats) -> Floats:
    """Return B at these seconds of a day."""
    edges = np.concatenate(([0.0], np.cumsum(shares))) * DAY_S
    edges[-1] = DAY_S
    secant = shares * 24  # Load per second within each hour.
    before = np.roll(secant, 1)
    # Rate where an hour begins: at most twice the smaller secant, so the cubic is monotone.
    slope = 2 * before * secant / (before + secant)
    hour = np.minimum(seconds // HOUR_S, 23).astype(np.int64)
    x = seconds / HOUR_S - hour
    first, last = slope[hour], np.roll(slope, -1)[hour]
    rise = (
        (first - 2 * secant[hour] + last) * x**3
        + (3 * secant[hour] - 2 * first - last) * x**2
        + first * x
    ) * HOUR_S
    return np.asarray(edges[hour] + rise)
