"""Latency SLO in text form: `ttft=2s,tpot=50ms`, or `ttft_p99=4s,tpot=50ms`.

Independent of units and load.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

MEAN = 0.0
"""Quantile value for an SLO on the mean over requests."""
_UNITS_S = {"s": 1.0, "ms": 1e-3}
_QUANTITIES = ("ttft", "tpot")
_PART = r"([a-z][a-z0-9]*)(?:_p([0-9]+(?:\.[0-9]+)?))?\s*=\s*([0-9.]+)\s*([a-z]*)"
_KNOWN = "ttft and tpot, each as a mean or with a percentile behind it, such as ttft_p99"


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency targets for the busiest hour, in seconds. Quantiles lie between 0 and 1; MEAN is the mean."""

    ttft_s: float
    """Time from a request's arrival to its first token."""
    tpot_s: float
    """Time per output token after the first."""
    ttft_quantile: float = MEAN
    tpot_quantile: float = MEAN

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s"):
            if not (getattr(self, name) > 0.0 and math.isfinite(getattr(self, name))):
                raise ValueError(
                    f"{name} is {getattr(self, name):g}; it must be above 0 s and finite."
                )
        if not (0.0 <= self.ttft_quantile < 1.0 and 0.0 <= self.tpot_quantile < 1.0):
            raise ValueError("quantiles must be at least 0 and below 1.")

    def __str__(self) -> str:
        return (
            f"{_name('TTFT', self.ttft_quantile)} {self.ttft_s:g} s, "
            f"{_name('TPOT', self.tpot_quantile)} {self.tpot_s * 1e3:g} ms"
        )


def parse_slo(text: str) -> Slo:
    """Parse an SLO. Raises ValueError that lists the valid forms."""
    seconds: dict[str, float] = {}
    quantiles: dict[str, float] = {}
    for part in text.split(","):
        found = re.fullmatch(_PART, part.strip().lower())
        if found is None:
            raise ValueError(f"{part.strip()!r} is not an SLO; write ttft=2s,tpot=50ms.")
        name, percentile, number, unit = found.groups()
        if name not in _QUANTITIES:
            raise ValueError(f"{name!r} is not a quantity of an SLO; use {_KNOWN}.")
        if name in seconds:
            raise ValueError(f"{name} is given twice; give it once.")
        if unit not in _UNITS_S:
            raise ValueError(f"{part.strip()!r} needs the unit s or ms, as in ttft=2s,tpot=50ms.")
        try:
            seconds[name] = float(number) * _UNITS_S[unit]
        except ValueError:
            raise ValueError(f"{number!r} in {part.strip()!r} is not a number.") from None
        quantiles[name] = float(percentile) / 100.0 if percentile else MEAN
        if percentile and not 0.0 < quantiles[name] < 1.0:
            raise ValueError(
                f"{part.strip()!r}: a percentile lies between 0 and 100, such as ttft_p99."
            )
    for name in _QUANTITIES:
        if name not in seconds:
            raise ValueError(f"{name} has no limit; write ttft=2s,tpot=50ms.")
    return Slo(seconds["ttft"], seconds["tpot"], quantiles["ttft"], quantiles["tpot"])


def _name(what: str, quantile: float) -> str:
    return f"mean {what}" if quantile == MEAN else f"{what} p{100 * quantile:g}"
