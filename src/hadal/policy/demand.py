"""Forecast the fleet's demand for the next minutes: recent level and trend, times the shape of a
day.

    rate(now + h) = (level + slope h) x shape(now + h),      level, slope: of rate / shape over a short window

The day's shape predicts the morning before it starts; the trend adds how today differs. Only the
part of a slope beyond noise counts, so that noise moves no nodes. Independent of units: rates are
tokens per second of one role.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from hadal.core.arrays import Floats

DAY_S = 86_400.0
NUM_SLOPE_MIN = 5
"""Minimum number of samples that show a trend."""
DOUBT = 3.0
"""Standard errors subtracted from a slope: noise alone rarely exceeds them, and then only slightly."""
CHANGE_MAX = 2.0
"""Limit of the trend: it multiplies the level by at most CHANGE_MAX and at least 1 / CHANGE_MAX."""


@dataclass(frozen=True)
class DayShape:
    """Relative demand over a day, with mean 1: the mean of each of equally long bins, from midnight
    on.

    The curve is linear from the edge of a bin to its middle and on to the next edge, so that every
    bin has exactly its mean. Raises ValueError for shapes that would be zero or less somewhere.
    """

    bins: tuple[float, ...]
    """Demand in each bin, in any unit; only ratios matter."""

    def __post_init__(self) -> None:
        if not self.bins or min(self.bins) <= 0 or not np.all(np.isfinite(self.bins)):
            raise ValueError(
                "a day's shape needs at least one bin, and each must be finite and above 0."
            )
        if self._values.min() <= 0:
            raise ValueError(
                "a day's shape rises too steeply between two bins; take wider ones, or smooth them."
            )

    @cached_property
    def _values(self) -> Floats:
        """Return the shape at edge 0, middle 0, edge 1, ... and at the next midnight: [2 bins + 1]."""
        means = np.asarray(self.bins, np.float64) / np.mean(self.bins)
        edges = 0.5 * (means + np.roll(means, 1))
        # A bin's mean is (edge + 2 middle + next edge) / 4.
        middles = 2.0 * means - 0.5 * (edges + np.roll(edges, -1))
        return np.append(np.stack([edges, middles], 1).ravel(), edges[0])

    @cached_property
    def _times_s(self) -> Floats:
        return np.linspace(0.0, DAY_S, self._values.size)

    def at(self, time_s: ArrayLike) -> Floats:
        """Return the shape at these times of day, seconds from midnight; days repeat."""
        return np.asarray(np.interp(np.mod(time_s, DAY_S), self._times_s, self._values), np.float64)


FLAT = DayShape((1.0,))
"""Shape of a day without measurements."""


def forecast(
    times_s: Sequence[float],
    rates: Sequence[float],
    shape: DayShape,
    now_s: float,
    ahead_s: ArrayLike,
) -> Floats:
    """Return the expected rates at `now_s + ahead_s`.

    Args:
        times_s: when each sample was taken, by the clock of the day (seconds from some midnight),
            ascending, <= now_s.
        rates: tokens per second at those times. Without samples the forecast is 0.
        ahead_s: [points], not negative.
    """
    ahead = np.atleast_1d(np.asarray(ahead_s, np.float64))
    if not len(rates):
        return np.zeros(ahead.shape)
    times = np.asarray(times_s, np.float64) - now_s
    residuals = np.asarray(rates, np.float64) / shape.at(times_s)
    level, slope = _line(times, residuals)
    reach_s = -float(times[0])  # A trend is extrapolated no further than it was observed.
    trend = level + slope * np.minimum(ahead, reach_s)
    return np.clip(trend, level / CHANGE_MAX, level * CHANGE_MAX) * shape.at(now_s + ahead)


def _line(times: Floats, values: Floats) -> tuple[float, float]:
    """Return (value at time 0, slope) of the samples; the slope is reduced by the part that may be noise."""
    mean = float(values.mean())
    spread = times - times.mean()
    weight = float(spread @ spread)
    if times.size < NUM_SLOPE_MIN or weight <= 0.0:
        return mean, 0.0
    fitted = float(spread @ values) / weight
    rest = values - mean - fitted * spread
    error = float(np.sqrt(rest @ rest / (times.size - 2) / weight))
    slope = float(np.sign(fitted)) * max(0.0, abs(fitted) - DOUBT * error)
    return max(0.0, mean - slope * float(times.mean())), slope


def learned_shape(bins: Sequence[float]) -> DayShape:
    """Return the shape of a day from measured bins. A day too steep or too empty for a DayShape is
    smoothed until it fits.

    Raises ValueError without bins, or if every bin is 0.
    """
    means = np.asarray(bins, np.float64)
    if means.size == 0 or means.max() <= 0:
        raise ValueError("nothing was counted, so there is no shape to learn.")
    while True:
        try:
            return DayShape(tuple(means.tolist()))
        except ValueError:  # Each pass gets closer to a flat day, which is valid.
            means = 0.5 * means + 0.25 * (np.roll(means, 1) + np.roll(means, -1))
