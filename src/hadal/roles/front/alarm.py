"""The front's one timer: its next heartbeat, or earlier the end of a request's back-off.

Knows times and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from hadal.core.seams import WakeAt


class Alarm:
    """One timer. To be woken too early does no harm."""

    def __init__(self, heartbeat_s: float) -> None:
        self._period_s = heartbeat_s
        self._heartbeat_s = -math.inf
        self._wake_s = math.inf
        """What was asked for last."""
        self._retry_s = math.inf
        """When the next back-off ends."""

    def retry_at(self, time_s: float) -> None:
        """A request backs off until then."""
        self._retry_s = min(self._retry_s, time_s)

    def set(self, now_s: float, next_retry_s: Callable[[float], float]) -> list[WakeAt]:
        """What to ask for after an event; nothing where it stands already. `next_retry_s`: the end
        of the next back-off after a time.
        """
        if self._heartbeat_s <= now_s:
            self._heartbeat_s = now_s + self._period_s
        if self._retry_s <= now_s:
            self._retry_s = next_retry_s(now_s)
        wake_s = min(self._heartbeat_s, self._retry_s)
        if self._wake_s > now_s and wake_s >= self._wake_s:
            return []
        self._wake_s = wake_s
        return [WakeAt(wake_s)]
