"""Live implementation of core.seams.Clock: the monotonic clock, shared by a host's processes."""

from __future__ import annotations

import time


class LiveClock:
    """Seconds since boot; comparable between processes of a host, never set back."""

    def now(self) -> float:
        return time.monotonic()
