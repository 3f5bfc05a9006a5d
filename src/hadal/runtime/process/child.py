"""One process of a run as its supervisor sees it: how it starts, what it says, how it ends, and when
it may start again.

Knows no role, no message and no other process.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path

from hadal.runtime.process.forks import Output, Started
from hadal.runtime.process.logs import TEXT, Doing, KeptLines, as_line, doing_of, write_line
from hadal.runtime.process.private import append_private
from hadal.runtime.process.status import ProcessStatus

log = logging.getLogger(__name__)

EXITS_MAX = 20
EXITS_WINDOW_S = 60.0
"""More exits than this in the window, and starting it again is no help."""
FAILED_STARTS_MAX = 3
"""Exits in a row before it was ever ready."""
START_TIMEOUT_S = 600.0
"""A process that is not ready by then is killed. Generous: a big checkpoint is read from a disk."""
RESTART_TIMEOUT_S = 60.0
"""Time that one which was ready before has at least, and at least RESTART_FACTOR times what it took
then.
"""
RESTART_FACTOR = 4.0
_BACKOFF_S = (0.0, 0.2, 0.5, 1.0, 2.0, 5.0)
_STEADY_S = 10.0
"""A process that lived this long starts its back-off anew."""
PUT_OFF_S = 15.0
"""How long a process that should be given up rests while the others serve, before it is tried
again. Each time that it was not ready in between it rests twice as long, up to PUT_OFF_MAX_S.
"""
PUT_OFF_MAX_S = 240.0


class ProcessPhase(StrEnum):
    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting"
    """The process is to be started again."""
    RESTING = "resting"
    """The process is not wanted now; it may be later."""
    ENDED = "ended"


class Child:
    """A named process. The supervisor's loop calls `poll` and `start`; nothing here waits except
    `wait`.
    """

    def __init__(
        self,
        name: str,
        role: str,
        arguments: Sequence[str],
        log_path: Path | None,
        log_format: str = TEXT,
        kept: KeptLines | None = None,
        first_life: int = 1,
    ) -> None:
        """`arguments`: a module and what it is given. Output goes to `log_path`, or to the
        supervisor's stderr; `kept` gets it as well. `first_life`: number of its first start; the
        following count on.
        """
        self.name = name
        self.role = role
        self.phase = ProcessPhase.WAITING
        self.num_starts = 0
        self.life = first_life - 1
        """Of its last start."""
        self.is_adopted = False
        """Another supervisor started what runs now."""
        self.start_at_s = 0.0
        """When WAITING: not before."""
        self.started_s = 0.0
        self.moved_s = 0.0
        """When its present start was last heard to come nearer to its end."""
        self.doing: Doing | None = None
        """What it said it does; None since it was started."""
        self.ready_s = 0.0
        self.last_end = ""
        """How it ended last, as its supervisor says it."""
        self.more_arguments: tuple[str, ...] = ()
        """What it is given beside its arguments from its next start on."""
        self._arguments = tuple(arguments)
        self._log_path = log_path
        self._log_format = log_format
        self._kept = kept
        self._process: Started | None = None
        self._exits_s: deque[float] = deque(maxlen=EXITS_MAX + 1)
        self._failed_starts = 0
        self._backoff = 0
        self._put_off_s = PUT_OFF_S
        self._is_replaced = False
        self._is_wanted = True
        self._start_took_s = 0.0
        """The longest start that ended well; 0 before there was one."""

    def start(
        self,
        now_s: float,
        start: Callable[[tuple[str, ...], int], Started],
    ) -> None:
        """Start the process by `start`, which is given its arguments and the number of this
        life.
        """
        self.life += 1
        self._begin(now_s, start((*self._arguments, *self.more_arguments), self.life))

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
        self.started_s = self.moved_s = now_s
        self.doing = None
        assert process.stdout is not None
        threading.Thread(
            target=self._relay, args=(process.stdout,), name=f"log-{self.name}", daemon=True
        ).start()

    @property
    def pid(self) -> int:
        """0 while it does not run."""
        return self._process.pid if self._process else 0

    def is_ready(self, now_s: float) -> None:
        """The process works: from now on its end is a crash, not a failed start."""
        if self.phase is ProcessPhase.STARTING:
            self.phase = ProcessPhase.READY
            self.ready_s = now_s
            self._start_took_s = max(self._start_took_s, now_s - self.started_s)
            self._failed_starts = 0
            self._put_off_s = PUT_OFF_S

    @property
    def start_timeout_s(self) -> float:
        """How long the present start may take, on a processor, without a word of how far it is. One
        that freezes must not be waited for as for a first, cold one.
        """
        if not self._start_took_s:
            return START_TIMEOUT_S
        return min(START_TIMEOUT_S, max(RESTART_TIMEOUT_S, RESTART_FACTOR * self._start_took_s))

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
        self.start_at_s = now_s
        if not self._is_wanted:
            self.phase = ProcessPhase.RESTING
            self._failed_starts = self._backoff = 0
            return code
        if not self._is_replaced:
            self._exits_s.append(now_s)
            if self.phase is ProcessPhase.STARTING:
                self._failed_starts += 1
            self._backoff = 0 if now_s - self.started_s > _STEADY_S else self._backoff + 1
            self.start_at_s += _BACKOFF_S[min(max(self._backoff - 1, 0), len(_BACKOFF_S) - 1)]
        self.phase = ProcessPhase.WAITING
        return code

    @property
    def num_failed_starts(self) -> int:
        """Starts in a row of which none got ready."""
        return self._failed_starts

    def why_give_up(self, now_s: float) -> str | None:
        """Return why it should not be started again, None if it may be."""
        if self._failed_starts >= FAILED_STARTS_MAX:
            return f"{self.name} ended {self._failed_starts} times before it was ready"
        recent = [at_s for at_s in self._exits_s if now_s - at_s < EXITS_WINDOW_S]
        if len(recent) > EXITS_MAX:
            return f"{self.name} ended {len(recent)} times in {EXITS_WINDOW_S:.0f} s"
        return None

    def delay(self, now_s: float) -> float:
        """It could not be started now, for want of memory or descriptors. Plans the next try, and
        returns in how long.
        """
        self._backoff += 1
        wait_s = _BACKOFF_S[min(self._backoff, len(_BACKOFF_S) - 1)]
        self.start_at_s = now_s + wait_s
        return wait_s

    def put_off(self, now_s: float) -> float:
        """Let it rest instead of giving it up, and count its exits anew. Returns for how long."""
        rest_s, self._put_off_s = self._put_off_s, min(2.0 * self._put_off_s, PUT_OFF_MAX_S)
        self.start_at_s = now_s + rest_s
        self._failed_starts = 0
        self._exits_s.clear()
        return rest_s

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
            self.start_at_s = max(self.start_at_s, now_s)

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

    def _relay(self, output: Output) -> None:
        """Copy its output line by line. In a thread, so that a slow terminal never stops the
        supervisor.
        """
        file = None
        if self._log_path is not None:
            try:
                file = append_private(self._log_path)
            except OSError as error:
                # It is read all the same: whoever writes and is not read stands still.
                log.warning(
                    "%s: what %s says is not kept there (%s)", self._log_path, self.name, error
                )
        with output as lines, file or contextlib.nullcontext():
            for line in lines:
                if (doing := doing_of(line)) is not None:
                    self.doing, self.moved_s = doing, time.monotonic()
                    continue
                whole = as_line(self.name, self._log_format, line, time.time())
                if self._kept is not None:
                    self._kept.write(whole)
                if file is None:
                    write_line(whole)
                    continue
                with contextlib.suppress(OSError):  # The disk is full: the child goes on.
                    file.write(whole)
        if self._kept is not None:
            self._kept.close()
