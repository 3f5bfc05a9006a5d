"""Connections that were refused: counted by listener, and logged, seldom, since who
wants to can make many.

A process counts those of all its listeners together, whoever made them: its host tells the
gateway (core/messages, Refused), where operators see them.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

log = logging.getLogger("hadal.comm.mesh.link")
REFUSALS_S = 60.0
"""Seconds between two lines in the log."""
_of_process: Counter[str] = Counter()


def refused_here() -> dict[str, int]:
    """Connections that this process refused since it started, by what they asked for. 0 for what it
    listens for and refused none of: the first one is a rise.
    """
    return dict(_of_process)


class Refusals:
    """The refusals of one listener."""

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
        """One more. From any thread: at worst two lines are written instead of one."""
        self.num_refused += 1
        _of_process[self._kind] += 1
        now_s = self._clock()
        if now_s - self._logged_s >= REFUSALS_S:
            self._logged_s, num_logged, self._num_logged = now_s, self._num_logged, self.num_refused
            log.warning(
                "%s refused %d connections: %s", self._what, self.num_refused - num_logged, why
            )
