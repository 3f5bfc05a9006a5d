"""DeepSeek's published day: how much of it each hour asked for, and what it came to.

The hourly shares were read off the bars of theoretical income by hour in "One More Thing:
DeepSeek-V3/R1 Inference System Overview" (deepseek-ai/open-infra-index, day 6 of the open-source
week, 2025), to +-$115 of about $23,400, for a constant mix of input, hits and output. The totals
are stated there.

Knows no load clock (lab/sim/day/clock) and draws nothing.
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
"""Shares of the day's tokens, by hour in Beijing from 00:00 on."""
SHAPE = DayShape(HOURLY_SHARES)
FIRST_HOUR = 12
"""The published day is 2025-02-27 12:00 to 02-28 12:00 in Beijing."""
TOKENS_IN = 608e9
TOKENS_OUT = 168e9


@dataclass(frozen=True)
class DemandCurve:
    """Tokens per second that users ask for, at any time of any day. Its hours have exactly the
    shares of `shape`.
    """

    tokens_in: float = TOKENS_IN
    """Tokens in of a day."""
    tokens_out: float = TOKENS_OUT
    tokens_in_request: float = 3_800.0
    """Mean of a request. Not published; 3.4 to 3.9 thousand by the published mean KV length of
    4,989, whatever the spread of lengths (E[O (I + O/2)] / E[O] with I/O = 608/168).
    """
    shape: DayShape = SHAPE
    rate: Callable[[float], Any] | None = None
    """Seconds since noon in Beijing -> load per second, where a day's mean is 1. None: as `shape`
    has it, which is what a fleet may know.
    """

    def requests_per_s(self, time_s: float) -> float:
        """Return the rate at a time by the clock of the day."""
        at = self.shape.at(time_s) if self.rate is None else self.rate(time_s - FIRST_HOUR * HOUR_S)
        return self.tokens_in / self.tokens_in_request / DAY_S * float(at)

    @property
    def tokens_out_request(self) -> float:
        """Mean of a request."""
        return self.tokens_in_request * self.tokens_out / self.tokens_in
