"""Failure detection, for front, leaders and supervisor: decide if a silent process is frozen or
only starved of a processor.

Independent of messages and processes. The caller reports how long a process has been silent and
what the process's own host observed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

ASK_SHARE = 0.4
"""Share of the timeout after which a silent process is suspected and its host is asked about it."""
UNSEEN = 2.0
"""Timeouts granted while the process's host has not answered: the host itself may be late."""
TOGETHER = 4.0
"""Timeouts granted to processes that are all late at once: their host or network may be slow."""
MOST = 20.0
"""Maximum number of timeouts that a process is granted with any excuse for its silence."""
PAUSE_PERIODS = 2.5
"""A detector that was not called for more than this number of its periods did not run itself."""


@dataclass(frozen=True, slots=True)
class Silence:
    """Observations of one suspected process."""

    silent_s: float
    """Time since the last message or observed progress, less the time in which the detector itself
    did not run.
    """
    starved: float | None = None
    """Share of the time between its host's first and last sample in which the process was runnable
    without a processor; above 1 if several threads waited at once. None: no two samples yet.
    """
    is_stopped: bool = False
    """True if its host saw it stopped (SIGSTOP): it will not continue by itself."""


def is_frozen(silence: Silence, timeout_s: float, *, are_all_late: bool = False) -> bool:
    """Return True if a process that must report within `timeout_s` should be declared dead."""
    if silence.is_stopped or silence.silent_s > MOST * timeout_s:
        return silence.silent_s > timeout_s
    could_run_s = silence.silent_s * (1.0 - min(silence.starved or 0.0, 1.0))
    patience = UNSEEN if silence.starved is None else 1.0
    return could_run_s > timeout_s * max(patience, TOGETHER if are_all_late else 1.0)


def are_all_late(silent_s: Collection[float], timeout_s: float) -> bool:
    """Return True if several processes, given the seconds each is silent, are all suspected at once."""
    return len(silent_s) > 1 and min(silent_s) > ASK_SHARE * timeout_s


def pause_s(gap_s: float, period_s: float) -> float:
    """Return the seconds in which a detector with period `period_s` did not run, given the gap
    `gap_s` between two calls.
    """
    return gap_s if gap_s > PAUSE_PERIODS * period_s else 0.0


def start_is_over(elapsed_s: float, waited_s: float, timeout_s: float) -> bool:
    """Return True if a process should be ready by now and is not. The timeout does not count
    `waited_s`, its time without a processor; TOGETHER timeouts end any wait.
    """
    return elapsed_s - min(waited_s, elapsed_s) > timeout_s or elapsed_s > TOGETHER * timeout_s
