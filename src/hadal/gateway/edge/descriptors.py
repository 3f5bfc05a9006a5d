"""Refuse connections before the process has no descriptor (open file) left.

The kernel gives a new connection the lowest free descriptor, so that number shows how many are
open. With none left, uvloop accepts a connection and closes it without a callback: the client gets
no answer, and neither log nor metric shows it. Independent of protocols and sockets.
"""

from __future__ import annotations

import logging
import resource
import sys
from collections.abc import Callable

log = logging.getLogger("hadal.gateway")

MIN_RESERVED = 16
"""Descriptors that connections never use. They serve the ledger, key files, links to units, and
connections that are being refused.
"""
RESERVED_SHARE = 1 / 8
"""Share of the descriptor limit that connections never use, if that is more than MIN_RESERVED."""
LOG_PERIOD_S = 10.0
"""Shortest time between two log lines about refused connections."""


def descriptor_limit() -> int:
    """Return the process's limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


class ConnectionLimit:
    """Admission of connections by free descriptors, with a count of the refused ones."""

    def __init__(self, max_descriptors: int, now: Callable[[], float]) -> None:
        """`max_descriptors`: the process's limit of open files. `now`: monotonic clock, seconds."""
        self._max_descriptors = max_descriptors
        self._num_usable = max_descriptors - max(
            MIN_RESERVED, int(max_descriptors * RESERVED_SHARE)
        )
        self._now = now
        self._log_at_s = 0.0
        self._num_unlogged = 0
        self.num_refused = 0
        """Connections refused since the process started."""

    def admits(self, descriptor: int) -> bool:
        """Return True if the connection with this descriptor is served. Count and log a refusal."""
        if descriptor < self._num_usable:
            return True
        self.num_refused += 1
        self._num_unlogged += 1
        if (now_s := self._now()) >= self._log_at_s:
            log.warning(
                "connections refused, as %d of %d descriptors are open: refused=%d. Raise the limit"
                " of open files (`ulimit -n`, LimitNOFILE in a systemd unit) or add a gateway.",
                descriptor + 1,
                self._max_descriptors,
                self._num_unlogged,
            )
            self._log_at_s, self._num_unlogged = now_s + LOG_PERIOD_S, 0
        return False
