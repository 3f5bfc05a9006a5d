"""Series of the last minutes: rates from counters, and percentiles of recent values."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from hadal.core import cache
from hadal.core.balance import shown
from hadal.core.messages.snapshot import Totals
from hadal.core.overview import Buckets, Overview
from hadal.gateway.desk.frames import ConsoleFrame

NUM_POINTS = 450
"""Points per series: 15 minutes at one every two seconds."""
_WINDOW = 30
"""Window of percentiles, in points."""
QUANTILES = (0.5, 0.95, 0.99)


class Series:
    """Times (Unix seconds), and values by series name; a value is None if unknown."""

    def __init__(self) -> None:
        self.times_s: deque[float] = deque(maxlen=NUM_POINTS)
        self.values: dict[str, deque[float | None]] = {}
        self._totals: tuple[float, Totals] | None = None
        self._latencies: deque[Mapping[str, Buckets]] = deque(maxlen=_WINDOW)
        self._hits: dict[str, int] = {}

    def add(self, frame: ConsoleFrame) -> None:
        """Add the next frame. A frame from an earlier time restarts the series."""
        overview = frame.overview
        if overview is None:
            return
        if self.times_s and overview.unix_s <= self.times_s[-1]:
            if overview.unix_s == self.times_s[-1]:
                return
            self.times_s.clear()
            self.values.clear()
            self.pause()
        found = {**self._states(overview), **self._rates(overview), **self._cache(overview)}
        found |= self._percentiles(overview) | _balance(overview) | _kv(overview)
        self.times_s.append(overview.unix_s)
        for name in found.keys() | self.values.keys():
            points = self.values.setdefault(
                name, deque([None] * (len(self.times_s) - 1), maxlen=NUM_POINTS)
            )
            points.append(found.get(name))

    def pause(self) -> None:
        """Forget the last counts: after a gap without frames, a difference to them is not a current
        rate.
        """
        self._totals = None
        self._latencies.clear()
        self._hits = {}

    def last(self, name: str) -> float | None:
        """Return the latest value of a series; None if it is unknown."""
        points = self.values.get(name)
        return points[-1] if points else None

    def of(self, prefix: str) -> dict[str, list[float | None]]:
        """Return the series with this name prefix, as rest of the name -> values."""
        return {
            name.removeprefix(prefix): list(points)
            for name, points in sorted(self.values.items())
            if name.startswith(prefix)
        }

    def _states(self, overview: Overview) -> dict[str, float]:
        return {
            f"state {state}": float(number)
            for state, number in overview.snapshot.state_to_count.items()
        }

    def _rates(self, overview: Overview) -> dict[str, float]:
        before, now = self._totals, overview.snapshot.totals
        self._totals = overview.unix_s, now
        if before is None:
            return {}
        took_s = overview.unix_s - before[0]
        pairs = {
            "rate in": (before[1].tokens_in, now.tokens_in),
            "rate out": (before[1].tokens_out, now.tokens_out),
        }
        return {name: max(0.0, (b - a) / took_s) for name, (a, b) in pairs.items()}

    def _cache(self, overview: Overview) -> dict[str, float]:
        """Return prompt tokens per second, by source of their KV."""
        reports = overview.snapshot.unit_to_report.values()
        now = {
            name: sum(report.cache.get(field, 0) for report in reports)
            for name, field in (
                ("memory", cache.MEMORY_HIT_TOKENS),
                ("disk", cache.DISK_HIT_TOKENS),
                ("computed", cache.MISS_TOKENS),
            )
        }
        before, self._hits = self._hits, now
        if not before or not self.times_s:
            return {}
        took_s = overview.unix_s - self.times_s[-1]
        return {f"cache {name}": max(0.0, (now[name] - before[name]) / took_s) for name in now}

    def _percentiles(self, overview: Overview) -> dict[str, float]:
        first = self._latencies[0] if self._latencies else {}
        self._latencies.append(overview.latency)
        found = {}
        for name, buckets in overview.latency.items():
            for quantile in QUANTILES:
                value = percentile(first.get(name), buckets, quantile)
                if value is not None:
                    found[f"{name} p{quantile * 100:g}"] = value * 1e3
        return found


def _balance(overview: Overview) -> dict[str, float]:
    """Return the mean balance over the units that report it, by role and objective."""
    sums: dict[str, list[float]] = {}
    for unit, report in overview.snapshot.unit_to_report.items():
        for objective, value in shown(report.balance).items():
            sums.setdefault(f"balance {unit.split('-')[0]} {objective}", []).append(value)
    return {name: sum(values) / len(values) for name, values in sums.items()}


def _kv(overview: Overview) -> dict[str, float]:
    """Return the percentage of each role's blocks in use."""
    sums: dict[str, list[int]] = {}
    for unit, report in overview.snapshot.unit_to_report.items():
        of_role = sums.setdefault(f"kv {unit.split('-')[0]}", [0, 0])
        of_role[0] += report.num_blocks_used
        of_role[1] += report.num_blocks
    return {name: 100 * used / total for name, (used, total) in sums.items() if total}


def percentile(before: Buckets | None, after: Buckets, quantile: float) -> float | None:
    """Return a quantile of the values added between two states of a histogram. None if there are no
    new values, or no earlier state with the same buckets.
    """
    if before is None or len(before.counts) != len(after.counts):
        return None
    counts = [b - a for a, b in zip(before.counts, after.counts, strict=True)]
    if not counts or counts[-1] <= 0:
        return None
    wanted, low, below = quantile * counts[-1], 0.0, 0.0
    for bound, count in zip(after.bounds, counts, strict=False):
        if count >= wanted:
            return low + (bound - low) * (wanted - below) / max(count - below, 1e-12)
        low, below = bound, count
    return after.bounds[-1]
