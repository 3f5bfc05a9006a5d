"""Both clocks of a gateway."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class GatewayClock:
    """Monotonic seconds for durations, and Unix time for days and dates."""

    now: Callable[[], float] = time.monotonic
    unix_time: Callable[[], float] = time.time
