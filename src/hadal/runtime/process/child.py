"""One process of a run as its supervisor sees it: its starts, their progress, and its ends.

process/backoff decides when it may start again, process/relay moves its output. Does not depend on
roles, messages or other processes.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from enum import StrEnum

from hadal.runtime.process.backoff import Backoff
from hadal.runtime.process.forks import Started
from hadal.runtime.process.logs import Doing
from hadal.runtime.process.relay import OutputRelay
from hadal.runtime.process.status import ProcessStatus

START_TIMEOUT_S = 600.0
"""Longest time without progress in a first start: a big checkpoint is read from a disk."""
RESTART_TIMEOUT_S = 60.0
"""Smallest timeout of a restart, which gets RESTART_FACTOR times the longest start, but at most
START_TIMEOUT_S.
"""
RESTART_FACTOR = 4.0


class ProcessPhase(StrEnum):
    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting"
    """Phase before the next start of a wanted process."""
    RESTING = "resting"
    """Phase of a process that is not wanted now; it may be later."""
    ENDED = "ended"


class StartProgress:
    """Progress of a process's present start, and its longest start so far."""

    def __init__(self) -> None:
        self.started_s = 0.0
        self.ready_s = 0.0
        self.moved_s = 0.0
        """Time at which the present start began or last reported progress."""
        self.doing: Doing | None = None
        """Activity that the present start last reported; None before its first report."""
        self._took_s = 0.0
        """Duration of the longest start that became ready; 0 before the first one."""

    def begin(self, now_s: float) -> None:
        """Begin another start."""
        self.started_s = self.moved_s = now_s
        self.doing = None

    def report(self, doing: Doing) -> None:
        """Note the present activity of the start. From any thread."""
        self.doing, self.moved_s = doing, time.monotonic()

    def ready(self, now_s: float) -> None:
        """End the start: the process works."""
        self.ready_s = now_s
        self._took_s = max(self._took_s, now_s - self.started_s)

    @property
    def timeout_s(self) -> float:
        """Longest time that the present start may take without progress, not counting time in which
        it had no processor. A restart that freezes gets less time than a first, cold start.
        """
        if not self._took_s:
            return START_TIMEOUT_S
        return min(START_TIMEOUT_S, max(RESTART_TIMEOUT_S, RESTART_FACTOR * self._took_s))


class Child:
    """A named process. The supervisor's loop calls `poll` and `start`; only `wait` blocks."""

    def __init__(
        self,
        name: str,
        role: str,
        arguments: Sequence[str],
        relay: OutputRelay,
        first_epoch_number: int = 1,
    ) -> None:
        """`arguments`: a module and its arguments. `first_epoch_number`: epoch number of the first
        start; later starts count up from it.
        """
        self.name = name
        self.role = role
        self.phase = ProcessPhase.WAITING
        self.progress = StartProgress()
        self.backoff = Backoff(name)
        """Plan of the next start, while WAITING."""
        self.num_starts = 0
        self.epoch_number = first_epoch_number - 1
        """Epoch number of the last start."""
        self.is_adopted = False
        """True if another supervisor started the process that runs now or ran last."""
        self.last_end = ""
        """Description of its last end, written by its supervisor; empty before the first one."""
        self.more_arguments: tuple[str, ...] = ()
        """Arguments added to the fixed ones from its next start on."""
        self._arguments = tuple(arguments)
        self._relay = relay
        self._process: Started | None = None
        self._is_replaced = False
        self._is_wanted = True

    def start(
        self,
        now_s: float,
        start: Callable[[tuple[str, ...], int], Started],
    ) -> None:
        """Start the process by calling `start` with its arguments and its epoch number."""
        self.epoch_number += 1
        self._begin(now_s, start((*self._arguments, *self.more_arguments), self.epoch_number))

    def adopt(self, now_s: float, process: Started) -> None:
        """Take over a process that another supervisor started; it counts as STARTING at first."""
        self._begin(now_s, process)
        self.is_adopted = True

    def _begin(self, now_s: float, process: Started) -> None:
        self.num_starts += 1
        self._process = process
        self.is_adopted = False
        self.phase = ProcessPhase.STARTING
        self._is_replaced = False
        self.progress.begin(now_s)
        assert process.stdout is not None
        self._relay.start(process.stdout, self.progress.report)

    @property
    def pid(self) -> int:
        """Process id; 0 while it does not run."""
        return self._process.pid if self._process else 0

    def is_ready(self, now_s: float) -> None:
        """Mark the process as ready: from now on its end is a crash, not a failed start."""
        if self.phase is ProcessPhase.STARTING:
            self.phase = ProcessPhase.READY
            self.progress.ready(now_s)
            self.backoff.ready()

    def status(self, host: str = "", cores: tuple[int, ...] = ()) -> ProcessStatus:
        return ProcessStatus(
            self.role, self.phase.value, self.pid, self.num_starts, self.last_end, host, cores
        )

    def poll(self, now_s: float) -> int | None:
        """Return the exit code if the process has just ended (-N: killed by signal N), and plan the
        next start. None otherwise.
        """
        if self._process is None:
            return None
        code = self._process.poll()
        if code is None:
            return None
        self._process = None
        self.backoff.start_at(now_s)
        if not self._is_wanted:
            self.phase = ProcessPhase.RESTING
            self.backoff.reset()
            return code
        if not self._is_replaced:
            was_ready = self.phase is not ProcessPhase.STARTING
            self.backoff.ended(now_s, now_s - self.progress.started_s, was_ready=was_ready)
        self.phase = ProcessPhase.WAITING
        return code

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if it runs."""
        if self._process is not None:
            self._process.send_signal(number)

    def replace(self) -> None:
        """Kill the process so that its successor starts immediately. That is not the process's own
        fault and does not count as a crash.
        """
        if self._process is not None:
            self.excuse()
            self._process.kill()

    def excuse(self) -> None:
        """Do not count the process's next end as its own fault."""
        self._is_replaced = True

    @property
    def is_wanted(self) -> bool:
        """True if the process is started again when it ends."""
        return self._is_wanted

    def dismiss(self) -> None:
        """Do not start the process again. If it runs, it goes on until it ends by itself."""
        self._is_wanted = False
        if self.phase is ProcessPhase.WAITING:
            self.phase = ProcessPhase.RESTING

    def want(self, now_s: float) -> None:
        """Have the process run: start it now if it rests, and again whenever it has ended."""
        self._is_wanted = True
        if self.phase is ProcessPhase.RESTING:
            self.phase = ProcessPhase.WAITING
            self.backoff.not_before(now_s)

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end. Return False if it still runs after `timeout_s`."""
        if self._process is None:
            return True
        try:
            self._process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            return False
        self._process = None
        self.phase = ProcessPhase.ENDED
        return True
