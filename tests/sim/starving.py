"""An overloaded host: for a while every process runs in short slices only, far apart."""

from __future__ import annotations

import math
from dataclasses import dataclass
from zlib import crc32


@dataclass(frozen=True)
class Starving:
    """`apart_s`: longest time between two slices of a process; its name sets its own."""

    from_s: float = math.inf
    to_s: float = math.inf
    apart_s: float = 1.0

    def waited_s(self, now_s: float) -> float:
        """How long a process that always had something to do was without a processor by then."""
        return max(0.0, min(now_s, self.to_s) - self.from_s)

    def next_s(self, name: str, now_s: float) -> float:
        """When a process that has something to do runs."""
        if not self.from_s <= now_s < self.to_s:
            return now_s
        period_s = self.apart_s * (0.5 + crc32(name.encode()) / 2**33)
        # A little less, or a slice would begin again and again by the rounding of its own time.
        return min(
            self.to_s, self.from_s + math.ceil((now_s - self.from_s) / period_s - 1e-6) * period_s
        )
