"""What the fleet remembers of the demand: samples of the last minutes, and what each hour of a day
brought.

Made from the front's counters, so nothing is asked of the front but sums. Times are by the clock of
the day: seconds from some midnight on. Knows no units.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from hadal.core.config import DECODE, PREFILL, ROLES
from hadal.core.messages.fleet import Demand
from hadal.policy.demand import DAY_S, FLAT, DayShape, learned_shape

NUM_SAMPLES = 15
"""Samples of the window that level and trend are taken from."""
NUM_BINS = 24
"""Bins of a day's shape that is learned: narrower ones would learn noise."""
_BIN_S = DAY_S / NUM_BINS
_GAP_S = 0.1 * _BIN_S
"""How much of an hour may be missing."""


class DemandMeter:
    """`sample_s`: the time one sample is the mean of. `shape`: of a day, until a whole one was
    seen.
    """

    def __init__(self, sample_s: float, shape: DayShape = FLAT) -> None:
        self.times_s: deque[float] = deque(maxlen=NUM_SAMPLES)
        self.rates: dict[str, deque[float]] = {role: deque(maxlen=NUM_SAMPLES) for role in ROLES}
        self.backlog: dict[str, float] = dict.fromkeys(ROLES, 0.0)
        self._sample_s = sample_s
        self._last: tuple[float, Demand] | None = None
        self._open: dict[str, float] = dict.fromkeys(ROLES, 0.0)
        """Tokens of the sample that is being taken, which began at `_open_from_s`."""
        self._open_from_s = 0.0
        self._days: dict[str, list[float | None]] = {role: [None] * NUM_BINS for role in ROLES}
        """Tokens per second of each hour, as it was when it last passed."""
        self._hour: dict[str, float] = dict.fromkeys(ROLES, 0.0)
        self._hour_from_s: float | None = None
        self._shapes: dict[str, DayShape] = dict.fromkeys(ROLES, shape)

    def add(self, now_s: float, demand: Demand) -> None:
        """Take in what the front counted. The first message of a front says only where it begins to
        count.
        """
        last = self._last
        if last is not None and last[1].epoch == demand.epoch and _is_older(demand, last[1]):
            return  # It came late: all that it says was said.
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
                last  # There is no rate in no time: the next message counts from the last one on.
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
        """The shape of the last whole day that was seen; until there was one, of the day given."""
        return self._shapes[role]

    def _count_hour(self, last_s: float, now_s: float, more: Mapping[str, int]) -> None:
        """An hour counts if all of it was seen."""
        if last_s // _BIN_S != now_s // _BIN_S:
            index = int(last_s % DAY_S // _BIN_S)
            if self._hour_from_s is not None and last_s - self._hour_from_s > _BIN_S - _GAP_S:
                for role in ROLES:
                    self._days[role][index] = self._hour[role] / (last_s - self._hour_from_s)
                    self._learn(role)
            is_near = now_s - last_s < _GAP_S  # Else nobody knows which hour the tokens came in.
            self._hour_from_s = last_s if is_near else None
            self._hour = dict.fromkeys(ROLES, 0.0)
        for role in ROLES:
            self._hour[role] += more[role]

    def _learn(self, role: str) -> None:
        bins = [rate for rate in self._days[role] if rate is not None]
        if len(bins) == NUM_BINS and max(bins) > 0:
            self._shapes[role] = learned_shape(bins)


def _is_older(one: Demand, other: Demand) -> bool:
    """Whether one was said before the other by the same front, whose counters never fall."""
    return one.tokens_in < other.tokens_in or one.tokens_out < other.tokens_out
