"""Demand on the fleet: samples of the last minutes, and the demand of each hour of a day.

It is computed from the front's counters, so the front only has to report sums. Times are seconds
since a midnight. Independent of units.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from hadal.core.config import DECODE, PREFILL, ROLES
from hadal.core.messages.fleet import Demand
from hadal.policy.demand import DAY_S, FLAT, DayShape, learned_shape

NUM_SAMPLES = 15
"""Samples in the window from which level and trend are computed."""
NUM_BINS = 24
"""Bins of a learned daily demand curve: narrower ones would learn noise."""
_BIN_S = DAY_S / NUM_BINS
_GAP_S = 0.1 * _BIN_S
"""Part of an hour that may be unobserved, seconds."""


class DemandMeter:
    """Meter of the demand. `sample_s`: averaging window of one sample, seconds. `shape`: assumed
    daily demand curve until a full day has been observed.
    """

    def __init__(self, sample_s: float, shape: DayShape = FLAT) -> None:
        self.times_s: deque[float] = deque(maxlen=NUM_SAMPLES)
        self.rates: dict[str, deque[float]] = {role: deque(maxlen=NUM_SAMPLES) for role in ROLES}
        self.backlog: dict[str, float] = dict.fromkeys(ROLES, 0.0)
        self._sample_s = sample_s
        self._last: tuple[float, Demand] | None = None
        self._open: dict[str, float] = dict.fromkeys(ROLES, 0.0)
        """Role -> tokens of the sample under way, which began at `_open_from_s`."""
        self._open_from_s = 0.0
        self._days: dict[str, list[float | None]] = {role: [None] * NUM_BINS for role in ROLES}
        """Role -> tokens/s of each hour of the day, when last observed; None: not observed yet."""
        self._hour: dict[str, float] = dict.fromkeys(ROLES, 0.0)
        self._hour_from_s: float | None = None
        self._shapes: dict[str, DayShape] = dict.fromkeys(ROLES, shape)

    def add(self, now_s: float, demand: Demand) -> None:
        """Add the front's counters. A front's first message only sets the backlog, and the values
        from which its tokens are counted.
        """
        last = self._last
        if last is not None and last[1].epoch == demand.epoch and _is_older(demand, last[1]):
            return  # A late message; a newer one has already been counted.
        self.backlog = {
            PREFILL: float(demand.tokens_waiting),
            DECODE: float(demand.outputs_waiting),
        }
        self._last = now_s, demand
        if last is None or last[1].epoch != demand.epoch:
            self._open = dict.fromkeys(ROLES, 0.0)
            self._open_from_s = now_s
            self._hour_from_s = None
            return
        if now_s <= last[0]:
            self._last = (
                last  # No time has passed, so there is no rate: count from the last message on.
            )
            return
        more = {
            PREFILL: demand.tokens_in - last[1].tokens_in,
            DECODE: demand.tokens_out - last[1].tokens_out,
        }
        self._count_hour(last[0], now_s, more)
        for role in ROLES:
            self._open[role] += more[role]
        took_s = now_s - self._open_from_s
        if took_s >= self._sample_s:
            self.times_s.append(now_s - 0.5 * took_s)
            for role in ROLES:
                self.rates[role].append(self._open[role] / took_s)
            self._open = dict.fromkeys(ROLES, 0.0)
            self._open_from_s = now_s

    def shape(self, role: str) -> DayShape:
        """Return the demand curve of the last observed day; before a full day, the assumed one."""
        return self._shapes[role]

    def _count_hour(self, last_s: float, now_s: float, more: Mapping[str, int]) -> None:
        """Add tokens to the present hour. A finished hour counts if nearly all was observed."""
        if last_s // _BIN_S != now_s // _BIN_S:
            index = int(last_s % DAY_S // _BIN_S)
            if self._hour_from_s is not None and last_s - self._hour_from_s > _BIN_S - _GAP_S:
                for role in ROLES:
                    self._days[role][index] = self._hour[role] / (last_s - self._hour_from_s)
                    self._learn(role)
            is_near = now_s - last_s < _GAP_S  # Otherwise the tokens' hour is unknown.
            self._hour_from_s = last_s if is_near else None
            self._hour = dict.fromkeys(ROLES, 0.0)
        for role in ROLES:
            self._hour[role] += more[role]

    def _learn(self, role: str) -> None:
        bins = [rate for rate in self._days[role] if rate is not None]
        if len(bins) == NUM_BINS and max(bins) > 0:
            self._shapes[role] = learned_shape(bins)


def _is_older(one: Demand, other: Demand) -> bool:
    """Return whether the front sent `one` before `other`: one front's counters never fall."""
    return one.tokens_in < other.tokens_in or one.tokens_out < other.tokens_out
