"""A leader at work: feeds one sans-IO role its messages, results and time, and applies what it asks for.

One thread receives, decides and sends; steps are computed in a second, long copies made in a third. The thread sleeps
in one place only, until a message, a result, a timer or a signal comes. Knows no role from another.
"""

from __future__ import annotations

import faulthandler
import logging
import os
from collections.abc import Sequence
from typing import Protocol

import msgspec

from hadal.core.messages import Load
from hadal.core.seams import Clock, Effect, Event, Execute, Freed, Pull, Runner, Send, Tick, WakeAt
from hadal.runtime.compute import Compute
from hadal.runtime.copier import Copier
from hadal.runtime.kv_wire import KvPool, KvWire
from hadal.runtime.process import EXIT_STUCK
from hadal.runtime.wire import ZmqWire

log = logging.getLogger(__name__)

_MAX_WAIT_S = 0.5
_STOP_S = 2.0


class Leader(Protocol):
    """The part of a leader role that a host needs."""

    def handle(self, now_s: float, event: Event) -> list[Effect]: ...


class UnitHost:
    """One leader with its rank: runner, KV pool and wire, which it owns from now on."""

    def __init__(
        self, leader: Leader, runner: Runner, wire: ZmqWire, pool: KvPool, clock: Clock, *, step_deadline_s: float
    ) -> None:
        """`step_deadline_s`: a step longer than this ends the process, so that the supervisor starts another."""
        self._leader = leader
        self._runner = runner
        self._wire = wire
        self._pool = pool
        self._clock = clock
        self._step_deadline_s = step_deadline_s
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wire.wake_on(self._wake_fd)
        self._kv_wire = KvWire(pool)
        self._compute = Compute(runner, self.wake)
        self._copier = Copier(self._kv_wire, pool.block_bytes, self.wake)
        self._wake_at_s: float | None = None
        self._step_ended = False
        """A step's end is among the events being handled: a plan made now follows it."""
        self._stopping = False

    def wake(self) -> None:
        """End the host's sleep. From any thread or signal handler."""
        os.eventfd_write(self._wake_fd, 1)

    def stop(self) -> None:
        """Leave the loop soon. From any thread or signal handler."""
        self._stopping = True
        self.wake()

    def run(self, first: Sequence[Effect] = ()) -> None:
        """Apply `first`, then serve until `stop`. Whatever a leader, runner or effect raises is raised."""
        self._apply(first)
        while not self._stopping:
            messages = self._wire.receive(self._wait_s())
            self._clear_wake()
            results = self._compute.take()
            self._step_ended = bool(results)
            # Results first: they free slots and blocks that the messages may want.
            for event in (*results, *self._copier.take(), *messages):
                self._apply(self._leader.handle(self._clock.now(), event))
            self._tick_if_due()
            self._end_if_stuck()

    def close(self) -> None:
        """Free the name, the segment and the threads."""
        if not self._compute.stop(_STOP_S):
            log.warning("leaving in the middle of a step")
        self._copier.stop(_STOP_S)
        self._wire.close()
        self._kv_wire.close()
        self._pool.close()
        self._runner.close()
        os.close(self._wake_fd)

    def _apply(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                message = effect.message
                if isinstance(message, Load):
                    # Only the host can measure this one.
                    message = msgspec.structs.replace(message, overhead_ms=self._compute.overhead_ms)
                self._wire.send(effect.to, message)
            elif isinstance(effect, Execute):
                self._compute.submit(effect.plans[0], follows=self._step_ended)
            elif isinstance(effect, Freed):
                self._pool.free(effect.block_ids)
            elif isinstance(effect, Pull):
                self._copier.submit(effect)
            elif isinstance(effect, WakeAt):
                self._wake_at_s = effect.time_s
            else:
                raise TypeError(f"a leader does not ask for {type(effect).__name__}")
        for outcome in self._copier.take():  # Small pulls are done already.
            self._apply(self._leader.handle(self._clock.now(), outcome))

    def _tick_if_due(self) -> None:
        now_s = self._clock.now()
        if self._wake_at_s is not None and now_s >= self._wake_at_s:
            self._wake_at_s = None
            self._apply(self._leader.handle(now_s, Tick()))

    def _wait_s(self) -> float:
        if self._wake_at_s is None:
            return _MAX_WAIT_S
        return min(_MAX_WAIT_S, max(0.0, self._wake_at_s - self._clock.now()))

    def _clear_wake(self) -> None:
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            return  # Woken by a message or a timer.

    def _end_if_stuck(self) -> None:
        busy_s = self._compute.busy_s()
        if busy_s > self._step_deadline_s:
            log.critical("a step has run for %.0f s; its deadline is %.0f s. Ending.", busy_s, self._step_deadline_s)
            faulthandler.dump_traceback(all_threads=True)
            os._exit(EXIT_STUCK)  # The stuck thread would hold up any other way out.


