"""Host of a leader (scheduler) or a rank: passes messages, results and time to one sans-IO role,
and applies the role's effects.

One thread receives, decides and sends. A second thread computes steps; long copies, layers being
staged and the disk cache have their own threads. The host's thread sleeps in one place only, until
a message, a result, a timer or a signal arrives. The host treats all roles alike. A leader of
several ranks has neither runner nor pool. Only a rank of a unit of several ranks has a stager.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from hadal.comm.mesh.refusals import refused_here
from hadal.core.errors import EXIT_CONFIG, ConfigError
from hadal.core.messages.units import Refused, UnitReport
from hadal.core.seams import Clock, Effect, Event, Execute, Form, Runner, Send, Tick, WakeAt
from hadal.roles.unit.report import with_overhead
from hadal.runtime.compute import Compute
from hadal.runtime.pinning import PinnedTeam
from hadal.runtime.process.process import EXIT_FATAL, EXIT_STUCK
from hadal.runtime.side_work import SideParts, SideWork
from hadal.runtime.wire import ZmqWire

log = logging.getLogger(__name__)

STEP_DEADLINE_S = 120.0
"""Time limit of a step. The leader keeps sending while a step runs, so no failure detector would
end a process with a step that hangs.
"""
SWITCH_INTERVAL_S = 0.0005
"""Seconds a thread may hold the interpreter; Python's default, 5 ms, is several decode steps."""
_MAX_WAIT_S = 0.5
_TELL_REFUSED_S = 2.0
_TELL_AGAIN_S = 20.0
"""Seconds between repeated reports of the same numbers, for a gateway that was restarted."""
_STOP_S = 2.0


class Leader(Protocol):
    """Part of a leader role that a host needs."""

    def handle(self, now_s: float, event: Event) -> list[Effect]: ...


class _RefusalReports:
    """Reporter of refused connections: new counts soon, unchanged ones periodically."""

    def __init__(self, wire: ZmqWire) -> None:
        self._wire = wire
        self._sent_s = -_TELL_AGAIN_S
        self._sent: dict[str, int] = {}

    def send_if_due(self, now_s: float) -> None:
        """Report the connections that this process refused, if there are any and a report is due."""
        kind_to_num = refused_here()
        wait_s = _TELL_AGAIN_S if kind_to_num == self._sent else _TELL_REFUSED_S
        if kind_to_num and now_s - self._sent_s >= wait_s:
            self._sent_s, self._sent = now_s, kind_to_num
            self._wire.send("front", Refused(self._wire.name, kind_to_num))


class UnitHost:
    """One role with its wire and, unless its ranks are elsewhere, its runner and KV pool."""

    def __init__(
        self,
        leader: Leader,
        runner: Runner | None,
        wire: ZmqWire,
        parts: SideParts,
        clock: Clock,
        *,
        step_deadline_s: float,
        news: Callable[[float], list[Effect]] = lambda now_s: [],
        pinned_team: PinnedTeam | None = None,
    ) -> None:
        """`step_deadline_s`: a longer step ends the process, so that the supervisor starts another.

        `news` feeds the role with information that only the process has, such as a rank's progress.
        It is called before every tick and after every wake. `pinned_team` places the computing
        threads; None: the kernel places them.
        """
        self._leader = leader
        self._runner = runner
        self._wire = wire
        self._clock = clock
        self._step_deadline_s = step_deadline_s
        self._news = news
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wire.wake_on(self._wake_fd)
        self._pinned_team = pinned_team
        begin = (lambda: None) if pinned_team is None else partial(pinned_team.enter, clock.now())
        self._compute = None if runner is None else Compute(runner, self.wake, begin)
        self._side_work = SideWork(parts, self.wake)
        self._refusal_reports = _RefusalReports(wire)
        self._wake_at_s: float | None = None
        self._step_ended = False
        """True if a step's end is among the current events, so that a plan made now follows it."""
        self._stopping = False

    @property
    def is_stopping(self) -> bool:
        return self._stopping

    def wake(self) -> None:
        """Wake the host's thread. May be called from any thread or signal handler."""
        os.eventfd_write(self._wake_fd, 1)

    def stop(self) -> None:
        """Leave the loop soon. May be called from any thread or signal handler."""
        self._stopping = True
        self.wake()

    def run(self, first: Sequence[Effect] = ()) -> None:
        """Apply `first`, then serve until `stop`. Raises errors of leader, runner and effects."""
        self._apply(first)
        while not self._stopping:
            messages = self._wire.receive(self._wait_s())
            if self._clear_wake():
                self._take_news()  # Before results: the news names the peer that failed a step.
            results = self._compute.take() if self._compute else []
            beside = self._side_work.take()
            self._step_ended = bool(results)
            # Results first: they free slots and blocks that the messages may want.
            for event in (*results, *beside, *messages):
                self._apply(self._leader.handle(self._clock.now(), event))
            self._tick_if_due()
            self._refusal_reports.send_if_due(self._clock.now())
            if self._pinned_team:
                self._pinned_team.look(self._clock.now())
            if self._compute:
                self._compute.abort_void()
                self._end_if_stuck(self._compute.busy_s())

    def close(self) -> None:
        """Close the wire and the runner, remove the pool's shared memory and end the threads."""
        if self._runner is not None:
            self._runner.abort()  # The other ranks may be gone already: do not wait for them.
        if self._compute and not self._compute.stop(_STOP_S):
            log.warning("this process ends while a step runs")
        self._side_work.stop(_STOP_S)
        self._wire.close()
        self._side_work.close()
        if self._runner is not None:
            self._runner.close()
        os.close(self._wake_fd)

    def _apply(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._send(effect)
            elif isinstance(effect, WakeAt):
                self._wake_at_s = effect.time_s
            elif isinstance(effect, Execute) and self._compute:
                self._compute.submit(effect.plans[0], follows=self._step_ended)
            elif isinstance(effect, Form) and self._compute:
                self._side_work.void_stages(effect.plan.formation)
                self._compute.form(effect.plan)
            elif not self._side_work.begin(effect):
                raise TypeError(f"this host cannot apply the effect {type(effect).__name__}")
        for outcome in self._side_work.take_pulled():  # Small pulls have finished already.
            self._apply(self._leader.handle(self._clock.now(), outcome))

    def _send(self, effect: Send) -> None:
        message = effect.message
        if isinstance(message, UnitReport) and self._compute:
            # Only the host can measure the overhead.
            message = with_overhead(message, self._compute.overhead_ms)
        self._wire.send(effect.to, message)

    def _tick_if_due(self) -> None:
        now_s = self._clock.now()
        if self._wake_at_s is not None and now_s >= self._wake_at_s:
            self._wake_at_s = None
            self._take_news()
            # Read the clock again: the role got the news at a later time than `now_s`, and its time
            # must never go back.
            self._apply(self._leader.handle(self._clock.now(), Tick()))

    def _take_news(self) -> None:
        self._apply(self._news(self._clock.now()))

    def _wait_s(self) -> float:
        if self._wake_at_s is None:
            return _MAX_WAIT_S
        return min(_MAX_WAIT_S, max(0.0, self._wake_at_s - self._clock.now()))

    def _clear_wake(self) -> bool:
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            return False  # Woken by a message or a timer.
        return True

    def _end_if_stuck(self, busy_s: float) -> None:
        if busy_s > self._step_deadline_s:
            log.critical(
                "a step has run for %.0f s; its deadline is %.0f s. Ending.",
                busy_s,
                self._step_deadline_s,
            )
            faulthandler.dump_traceback(all_threads=True)
            os._exit(EXIT_STUCK)  # Any other exit would wait for the stuck thread.


def run_host(make: Callable[[], tuple[UnitHost, Sequence[Effect]]]) -> int:
    """Make a host with its first effects and let it serve until SIGTERM. This is the rest of a
    child process's main.

    Return the exit code: 0 after SIGTERM, EXIT_CONFIG if a restart would not help, else EXIT_FATAL.
    """
    try:
        host, first = make()  # Before there is a host to stop, SIGTERM ends the process.
    except ConfigError as error:
        log.critical("%s", error)
        return EXIT_CONFIG
    signal.signal(signal.SIGTERM, lambda *_: host.stop())
    try:
        host.run(first)
    except Exception:
        log.critical("unexpected error: this process ends", exc_info=True)
        host.close()
        return EXIT_FATAL
    host.close()
    return 0
