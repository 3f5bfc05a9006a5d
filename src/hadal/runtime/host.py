"""A leader or a rank at work: feeds one sans-IO role its messages, results and time, and applies
what it asks for.

One thread receives, decides and sends. Steps are computed in a second; long copies, layers that are
staged and the disk cache have threads of their own. The thread sleeps in one place only,
until a message, a result, a timer or a signal comes. Knows no role from another; the leader of many
ranks has neither runner nor pool, and only a rank of many has a stager.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import msgspec

from hadal.comm.mesh.refusals import refused_here
from hadal.core.cache import DiskLocation
from hadal.core.errors import EXIT_CONFIG, ConfigError
from hadal.core.messages.pools import Freed, Pull, ReadBlocks, StoreBlocks
from hadal.core.messages.units import Refused, UnitReport
from hadal.core.plans import BlocksRead, BlocksStored, Staged, StagePlan
from hadal.core.seams import (
    Clock,
    DiskNews,
    Effect,
    Event,
    Execute,
    Form,
    Runner,
    Send,
    Stage,
    Tick,
    UsedBlocks,
    WakeAt,
)
from hadal.runtime.compute import Compute
from hadal.runtime.pinning import PinnedTeam
from hadal.runtime.process.process import EXIT_FATAL, EXIT_STUCK
from hadal.runtime.transfer.copier import Copier
from hadal.runtime.transfer.kv import KvWire
from hadal.runtime.transfer.pool import KvPool
from hadal.runtime.wire import ZmqWire

log = logging.getLogger(__name__)

STEP_DEADLINE_S = 120.0
"""What a step may take. Its leader is not silent while it runs, so nobody else would end one that
never ends.
"""
SWITCH_INTERVAL_S = 0.0005
"""How long a thread may hold the interpreter while another wants it; the default is 5 ms, several
decode steps.
"""
_MAX_WAIT_S = 0.5
_TELL_REFUSED_S = 2.0
_TELL_AGAIN_S = 20.0
"""Gateways come and go: a new one is told what the last one knew."""
_STOP_S = 2.0


class Leader(Protocol):
    """The part of a leader role that a host needs."""

    def handle(self, now_s: float, event: Event) -> list[Effect]: ...


class ExpertStager(Protocol):
    """The part of runtime/transfer/stager that a host needs; the leader of many ranks is not to
    load it.
    """

    def submit(self, plan: StagePlan) -> None: ...

    def void(self, formation: int) -> None: ...

    def take(self) -> list[Staged]: ...

    def stop(self, timeout_s: float) -> bool: ...


class BlockDisk(Protocol):
    """The part of runtime/store/disk that a host needs, where it has a pool and there is a disk
    cache.
    """

    def submit(self, effect: ReadBlocks | StoreBlocks) -> None: ...

    def take(self) -> list[BlocksRead | BlocksStored]: ...

    def stop(self, timeout_s: float) -> None: ...


class DiskReader(Protocol):
    """The part of runtime/store/view that a leader's host needs."""

    def take(self) -> list[DiskNews]: ...

    def mark(self, locations: tuple[DiskLocation, ...]) -> None: ...

    def stop(self, timeout_s: float) -> None: ...


Wake = Callable[[], None]


class UnitHost:
    """One role with what is its own from now on: wire, and unless it leads ranks elsewhere, runner
    and KV pool.
    """

    def __init__(
        self,
        leader: Leader,
        runner: Runner | None,
        wire: ZmqWire,
        pool: KvPool | None,
        clock: Clock,
        *,
        step_deadline_s: float,
        news: Callable[[float], list[Effect]] = lambda now_s: [],
        make_stager: Callable[[Wake], ExpertStager] | None = None,
        make_disk: Callable[[Wake], BlockDisk | None] = lambda wake: None,
        make_view: Callable[[Wake], DiskReader | None] = lambda wake: None,
        kv_wire: KvWire | None = None,
        pinned_team: PinnedTeam | None = None,
    ) -> None:
        """`step_deadline_s`: a step longer than this ends the process, so that the supervisor
        starts another.

        `news` feeds the role, before every tick and after every wake, what only the process can
        see: a rank's progress. `make_stager` is given what wakes the host; None where nobody asks
        for a stage. So are `make_disk` and `make_view`, which may make nothing. `kv_wire` pulls
        into the pool; None: from pools of this host alone. `pinned_team`
        places the threads that compute; None: the kernel does.
        """
        self._leader = leader
        self._runner = runner
        self._wire = wire
        self._pool = pool
        self._clock = clock
        self._step_deadline_s = step_deadline_s
        self._news = news
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wire.wake_on(self._wake_fd)
        self._kv_wire = kv_wire or (None if pool is None else KvWire(pool))
        self._pinned_team = pinned_team
        begin = (lambda: None) if pinned_team is None else partial(pinned_team.enter, clock.now())
        self._compute = None if runner is None else Compute(runner, self.wake, begin)
        self._copier = (
            None
            if self._kv_wire is None or pool is None
            else Copier(self._kv_wire, pool.block_bytes, self.wake)
        )
        self._stager = make_stager(self.wake) if make_stager else None
        self._disk = make_disk(self.wake)
        self._view = make_view(self.wake)
        self._wake_at_s: float | None = None
        self._step_ended = False
        """A step's end is among the events being handled: a plan made now follows it."""
        self._stopping = False
        self._told_refused_s = -_TELL_AGAIN_S
        self._told_refused: dict[str, int] = {}

    @property
    def is_stopping(self) -> bool:
        return self._stopping

    def wake(self) -> None:
        """End the host's sleep. From any thread or signal handler."""
        os.eventfd_write(self._wake_fd, 1)

    def stop(self) -> None:
        """Leave the loop soon. From any thread or signal handler."""
        self._stopping = True
        self.wake()

    def run(self, first: Sequence[Effect] = ()) -> None:
        """Apply `first`, then serve until `stop`. Whatever a leader, runner or effect raises is
        raised.
        """
        self._apply(first)
        while not self._stopping:
            messages = self._wire.receive(self._wait_s())
            if self._clear_wake():
                self._take_news()  # Before a failed step: it tells whose fault it was.
            results = self._compute.take() if self._compute else []
            copied = self._copier.take() if self._copier else []
            staged = self._stager.take() if self._stager else []
            from_disk = self._disk.take() if self._disk else []
            news = self._view.take() if self._view else []
            self._step_ended = bool(results)
            # Results first: they free slots and blocks that the messages may want.
            for event in (*results, *copied, *staged, *from_disk, *news, *messages):
                self._apply(self._leader.handle(self._clock.now(), event))
            self._tick_if_due()
            self._tell_refused()
            if self._pinned_team:
                self._pinned_team.look(self._clock.now())
            if self._compute:
                self._compute.abort_void()
                self._end_if_stuck(self._compute.busy_s())

    def close(self) -> None:
        """Free the name, the shared-memory file and the threads."""
        if self._runner is not None:
            self._runner.abort()  # Its peers may be gone already: do not wait for them.
        if self._compute and not self._compute.stop(_STOP_S):
            log.warning("leaving in the middle of a step")
        if self._copier:
            self._copier.stop(_STOP_S)
        if self._stager and not self._stager.stop(_STOP_S):
            log.warning("leaving in the middle of a stage")
        if self._disk:
            self._disk.stop(_STOP_S)  # Before the pool goes, which it copies to and from.
        if self._view:
            self._view.stop(_STOP_S)
        self._wire.close()
        if self._kv_wire:
            self._kv_wire.close()
        if self._pool:
            self._pool.close()
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
                if self._stager:
                    self._stager.void(effect.plan.formation)
                self._compute.form(effect.plan)
            elif isinstance(effect, Stage) and self._stager:
                self._stager.submit(effect.plan)
            elif isinstance(effect, ReadBlocks | StoreBlocks) and self._disk:
                self._disk.submit(effect)
            elif isinstance(effect, UsedBlocks) and self._view:
                self._view.mark(effect.locations)
            elif isinstance(effect, Freed) and self._pool:
                self._pool.free(effect.block_ids)
            elif isinstance(effect, Pull) and self._copier:
                self._copier.submit(effect)
            else:
                raise TypeError(f"this role does not ask for {type(effect).__name__}")
        for outcome in self._copier.take() if self._copier else ():  # Small pulls are done already.
            self._apply(self._leader.handle(self._clock.now(), outcome))

    def _send(self, effect: Send) -> None:
        message = effect.message
        if isinstance(message, UnitReport) and self._compute:
            # Only the host can measure this one.
            message = msgspec.structs.replace(message, overhead_ms=self._compute.overhead_ms)
        self._wire.send(effect.to, message)

    def _tick_if_due(self) -> None:
        now_s = self._clock.now()
        if self._wake_at_s is not None and now_s >= self._wake_at_s:
            self._wake_at_s = None
            self._take_news()
            # The clock is read again: the role heard the news at a later time than `now_s`, and its
            # time never goes back.
            self._apply(self._leader.handle(self._clock.now(), Tick()))

    def _tell_refused(self) -> None:
        """Tell what this process refused, if it listens at all: what is new soon, the rest now and
        then.
        """
        now_s, kind_to_num = self._clock.now(), refused_here()
        wait_s = _TELL_AGAIN_S if kind_to_num == self._told_refused else _TELL_REFUSED_S
        if kind_to_num and now_s - self._told_refused_s >= wait_s:
            self._told_refused_s, self._told_refused = now_s, kind_to_num
            self._wire.send("front", Refused(self._wire.name, kind_to_num))

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
            os._exit(EXIT_STUCK)  # The stuck thread would hold up any other way out.


def run_host(make: Callable[[], tuple[UnitHost, Sequence[Effect]]]) -> int:
    """Make a host with its first effects and let it serve until SIGTERM: the rest of a child
    process's main.

    Returns the exit code: 0 when told to end, EXIT_CONFIG when starting again would not help, else
    EXIT_FATAL.
    """
    try:
        host, first = make()  # Until there is a host to stop, SIGTERM ends the process as it is.
    except ConfigError as error:
        log.critical("%s", error)
        return EXIT_CONFIG
    signal.signal(signal.SIGTERM, lambda *_: host.stop())
    try:
        host.run(first)
    except Exception:
        log.critical("this process cannot go on", exc_info=True)
        host.close()
        return EXIT_FATAL
    host.close()
    return 0
