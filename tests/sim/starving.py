"""An overloaded host: for a while every process runs only in short slices, far apart."""

from __future__ import annotations

import math
from dataclasses import dataclass
from zlib import crc32


@dataclass(frozen=True)
class Starving:
    """Overload of a host from `from_s` to `to_s`. `apart_s`: longest time between two slices of a process."""

    from_s: float = math.inf
    to_s: float = math.inf
    apart_s: float = 1.0

    def waited_s(self, now_s: float) -> float:
        """Return how long a process that always had work was without a processor until `now_s`."""
        return max(0.0, min(now_s, self.to_s) - self.from_s)

    def next_s(self, name: str, now_s: float) -> float:
        """Return when a process that has work runs next."""
        if not self.from_s <= now_s < self.to_s:
            return now_s
        period_s = self.apart_s * (0.5 + crc32(name.encode()) / 2**33)
        # The 1e-6 keeps rounding errors from beginning the same slice again and again.
        return min(
            self.to_s, self.from_s + math.ceil((now_s - self.from_s) / period_s - 1e-6) * period_s
        )
