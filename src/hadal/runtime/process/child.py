"""One process of a run as its supervisor sees it: how it starts, how far its start is, and how it
ends.

When it may start again is in backoff, where its output goes in relay. Knows no role, no message and
no other process.
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
"""A process that is not ready by then is killed. Generous: a big checkpoint is read from a disk."""
RESTART_TIMEOUT_S = 60.0
"""Time that one which was ready before has at least, and at least RESTART_FACTOR times what it took
then.
"""
RESTART_FACTOR = 4.0


class ProcessPhase(StrEnum):
    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting"
    """The process is to be started again."""
    RESTING = "resting"
    """The process is not wanted now; it may be later."""
    ENDED = "ended"


class StartProgress:
    """Progress of a process's present start, measured by its longest one."""

    def __init__(self) -> None:
        self.started_s = 0.0
        self.ready_s = 0.0
        self.moved_s = 0.0
        """When the present start was last heard to come nearer to its end."""
        self.doing: Doing | None = None
        """What it said it does; None since it was started."""
        self._took_s = 0.0
        """The longest start that ended well; 0 before there was one."""

    def begin(self, now_s: float) -> None:
        """Begin another start."""
        self.started_s = self.moved_s = now_s
        self.doing = None

    def report(self, doing: Doing) -> None:
        """Take in what the start does now. From any thread."""
        self.doing, self.moved_s = doing, time.monotonic()

    def ready(self, now_s: float) -> None:
        """End the start: the process works."""
        self.ready_s = now_s
        self._took_s = max(self._took_s, now_s - self.started_s)

    @property
    def timeout_s(self) -> float:
        """How long the present start may take, on a processor, without a word of how far it is. One
        that freezes must not be waited for as for a first, cold one.
        """
        if not self._took_s:
            return START_TIMEOUT_S
        return min(START_TIMEOUT_S, max(RESTART_TIMEOUT_S, RESTART_FACTOR * self._took_s))


class Child:
    """A named process. The supervisor's loop calls `poll` and `start`; nothing here waits except
    `wait`.
    """

    def __init__(
        self,
        name: str,
        role: str,
        arguments: Sequence[str],
        relay: OutputRelay,
        first_epoch_number: int = 1,
    ) -> None:
        """`arguments`: a module and what it is given. `first_epoch_number`: number of its first start; the
        following count on.
        """
        self.name = name
        self.role = role
        self.phase = ProcessPhase.WAITING
        self.progress = StartProgress()
        self.backoff = Backoff(name)
        """When it may start again, while WAITING."""
        self.num_starts = 0
        self.epoch_number = first_epoch_number - 1
        """Of its last start."""
        self.is_adopted = False
        """Another supervisor started what runs now."""
        self.last_end = ""
        """How it ended last, as its supervisor says it."""
        self.more_arguments: tuple[str, ...] = ()
        """What it is given beside its arguments from its next start on."""
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
        """Start the process by `start`, which is given its arguments and its epoch number."""
        self.epoch_number += 1
        self._begin(now_s, start((*self._arguments, *self.more_arguments), self.epoch_number))

    def adopt(self, now_s: float, process: Started) -> None:
        """Take over a process that another supervisor started. Whether it works it says again."""
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
        """0 while it does not run."""
        return self._process.pid if self._process else 0

    def is_ready(self, now_s: float) -> None:
        """The process works: from now on its end is a crash, not a failed start."""
        if self.phase is ProcessPhase.STARTING:
            self.phase = ProcessPhase.READY
            self.progress.ready(now_s)
            self.backoff.ready()

    def status(self, host: str = "", cores: tuple[int, ...] = ()) -> ProcessStatus:
        return ProcessStatus(
            self.role, self.phase.value, self.pid, self.num_starts, self.last_end, host, cores
        )

    def poll(self, now_s: float) -> int | None:
        """Return the exit code if it has just ended (negative: by that signal), else None. Plans
        the next start.
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
        """Kill it so that another starts at once: not its own fault, so it does not count as a
        crash.
        """
        if self._process is not None:
            self.excuse()
            self._process.kill()

    def excuse(self) -> None:
        """What ends it now is not its own fault."""
        self._is_replaced = True

    @property
    def is_wanted(self) -> bool:
        """Whether it is to be started again when it ends."""
        return self._is_wanted

    def dismiss(self) -> None:
        """The process need not run. If it does, it runs until it ends, and is not started again."""
        self._is_wanted = False
        if self.phase is ProcessPhase.WAITING:
            self.phase = ProcessPhase.RESTING

    def want(self, now_s: float) -> None:
        """The process is to run: at once if it does not, else again when it has ended."""
        self._is_wanted = True
        if self.phase is ProcessPhase.RESTING:
            self.phase = ProcessPhase.WAITING
            self.backoff.not_before(now_s)

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end. False if it still runs after `timeout_s`."""
        if self._process is None:
            return True
        try:
            self._process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            return False
        self._process = None
        self.phase = ProcessPhase.ENDED
        return True
