"""DeepSeek's published day: hourly shares of the load, and totals.

The hourly shares were read off the bars of theoretical income by hour in "One More Thing:
DeepSeek-V3/R1 Inference System Overview" (deepseek-ai/open-infra-index, day 6 of the open-source
week, 2025), to +-$115 of about $23,400. A constant mix of input, hits and output is assumed. That
article states the totals.

Does not depend on the load clock (lab/sim/day/clock); nothing is random.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hadal.policy.demand import DAY_S, DayShape

HOUR_S = 3600.0
HOURLY_SHARES = (
    0.03869,
    0.03195,
    0.02338,
    0.01419,
    0.01133,
    0.01133,
    0.01419,
    0.02440,
    0.04114,
    0.05237,
    0.05421,
    0.05318,
    0.04808,
    0.05073,
    0.05421,
    0.05502,
    0.05421,
    0.04951,
    0.04767,
    0.05257,
    0.05461,
    0.05482,
    0.05523,
    0.05298,
)
"""Shares of the day's tokens by hour, from 00:00 Beijing time."""
SHAPE = DayShape(HOURLY_SHARES)
FIRST_HOUR = 12
"""First hour: the published day is 2025-02-27 12:00 to 02-28 12:00 Beijing time."""
TOKENS_IN = 608e9
TOKENS_OUT = 168e9


@dataclass(frozen=True)
class DemandCurve:
    """Demand in requests/s at any time of any day. Hours have exactly the shares of `shape`."""

    tokens_in: float = TOKENS_IN
    """Prompt tokens per day."""
    tokens_out: float = TOKENS_OUT
    """Output tokens per day."""
    tokens_in_request: float = 3_800.0
    """Mean prompt tokens per request, not published. The published mean KV length of 4,989 implies
    3,400 to 3,900 if outputs deviate by 1.5 to 1 times their mean (E[O (I + O/2)] / E[O], I/O =
    608/168).
    """
    shape: DayShape = SHAPE
    rate: Callable[[float], Any] | None = None
    """Seconds since noon in Beijing -> load per second, with a daily mean of 1. None: the rate of
    `shape`, the only curve that a fleet role may see.
    """

    def requests_per_s(self, time_s: float) -> float:
        """Return the requests/s at `time_s`, seconds since midnight in Beijing."""
        at = self.shape.at(time_s) if self.rate is None else self.rate(time_s - FIRST_HOUR * HOUR_S)
        return self.tokens_in / self.tokens_in_request / DAY_S * float(at)

    @property
    def tokens_out_request(self) -> float:
        """Mean output tokens per request."""
        return self.tokens_in_request * self.tokens_out / self.tokens_in
