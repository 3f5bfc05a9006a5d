"""Refused connections, counted by kind of listener and logged rarely, since an attacker can make
many.

Counts are summed over all listeners of a process. The process reports them to the gateway
(core/messages/units, Refused), which shows them to operators.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

log = logging.getLogger("hadal.comm.mesh.link")
REFUSALS_S = 60.0
"""Minimum seconds between two log lines of a listener."""
_of_process: Counter[str] = Counter()


def refused_here() -> dict[str, int]:
    """Return the number of connections that this process refused since it started, by kind. A kind
    with a listener but no refusals is 0, so that the first refusal shows as a rise.
    """
    return dict(_of_process)


class Refusals:
    """Refusals of one listener."""

    def __init__(self, kind: str, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`kind`: "kv", "experts" or "mesh"; `what` names the listener in the log."""
        self.num_refused = 0
        _of_process[kind] += 0
        self._kind = kind
        self._what = what
        self._clock = clock
        self._logged_s = -REFUSALS_S
        self._num_logged = 0

    def count(self, why: object) -> None:
        """Count a refusal. Thread-safe enough: at worst two lines are logged instead of one."""
        self.num_refused += 1
        _of_process[self._kind] += 1
        now_s = self._clock()
        if now_s - self._logged_s >= REFUSALS_S:
            self._logged_s, num_logged, self._num_logged = now_s, self._num_logged, self.num_refused
            log.warning(
                "%s refused %d connections: %s", self._what, self.num_refused - num_logged, why
            )
