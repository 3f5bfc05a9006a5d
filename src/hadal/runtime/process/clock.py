"""The Clock seam, live: the machine's monotone clock. All processes of one host read the same one."""

from __future__ import annotations

import time


class LiveClock:
    """Seconds since boot; comparable between processes of a host, never set back."""

    def now(self) -> float:
        return time.monotonic()
