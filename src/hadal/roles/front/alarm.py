"""The front's only timer: the next heartbeat, or an earlier end of a request's back-off.

Gets times from its caller and reads no clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from hadal.core.seams import WakeAt


class Alarm:
    """A single timer. Spurious wake-ups are harmless."""

    def __init__(self, heartbeat_s: float) -> None:
        self._period_s = heartbeat_s
        self._heartbeat_s = -math.inf
        self._wake_s = math.inf
        """Wake-up time requested last."""
        self._retry_s = math.inf
        """End of the next back-off."""

    def retry_at(self, time_s: float) -> None:
        """Wake up when a request's back-off ends at `time_s`."""
        self._retry_s = min(self._retry_s, time_s)

    def set(self, now_s: float, next_retry_s: Callable[[float], float]) -> list[WakeAt]:
        """Return the wake-up to request after an event; empty if the pending one is early enough.
        `next_retry_s` returns the end of the next back-off after a time.
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
