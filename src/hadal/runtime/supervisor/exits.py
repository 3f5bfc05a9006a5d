"""The ends of processes: reports them to other processes, and decides on restarts.

process/backoff decides how long a child backs off. The front decides if requests survive: it is
sent UnitDown immediately, or LeaderDown if ranks wait for another leader.
"""

from __future__ import annotations

import logging
import signal
import time

from hadal.core.errors import EXIT_CONFIG
from hadal.core.messages.base import FRONT, NODE_PROVIDER
from hadal.core.messages.units import LeaderDown, UnitDown
from hadal.runtime.process.child import Child, ProcessPhase
from hadal.runtime.process.forks import reap_others
from hadal.runtime.process.logs import about
from hadal.runtime.process.status import ProcessEnd
from hadal.runtime.supervisor.children import Children
from hadal.runtime.supervisor.rollout import Rollouts
from hadal.runtime.supervisor.run_end import EXIT_GAVE_UP, RunEnd
from hadal.runtime.supervisor.starter import Starter
from hadal.runtime.supervisor.status import StatusWriter
from hadal.runtime.topology import CONSOLE, GATEWAY, unit_and_rank
from hadal.runtime.wire import ZmqWire

log = logging.getLogger("hadal.supervisor")

TAKEOVERS_MAX = 2
"""Failed starts of a leader before its waiting ranks are ended: their state may be the cause."""


class Exits:
    """Reaction to the ends of processes."""

    def __init__(
        self,
        wire: ZmqWire,
        children: Children,
        starter: Starter,
        rollouts: Rollouts,
        status: StatusWriter,
        end: RunEnd,
    ) -> None:
        self._wire = wire
        self._children = children
        self._starter = starter
        self._rollouts = rollouts
        self._status = status
        self._end = end
        self._ended_ranks: dict[tuple[str, str], list[str]] = {}
        """(unit, reason) -> ended ranks that were not yet reported to the leader."""

    def reap(self) -> None:
        """Act on the ends of all processes that have ended since the last call."""
        self._reap_each()
        for (unit, reason), (first, *others) in self._ended_ranks.items():
            self._wire.send(unit, UnitDown(first, reason, tuple(others)))
        self._ended_ranks.clear()

    def _reap_each(self) -> None:
        here = [child for child in self._children.all if self._children.is_here(child)]
        reap_others({self._starter.forks_pid, *(child.pid for child in here)})
        for child in self._children.all:
            now_s = time.monotonic()
            lost = self._children.why_lost(child)
            if lost:
                child.excuse()
            code = child.poll(now_s)
            if code is not None:
                self._ended(child, now_s, code, lost or _how(code))

    def _ended(self, child: Child, now_s: float, code: int, reason: str) -> None:
        child.last_end = reason
        self._status.note_end(ProcessEnd(time.time(), child.name, reason, not child.is_wanted))
        if (
            child.name == GATEWAY
            and self._end.is_draining
            and not (code and self._children.other_gateways())
        ):
            log.log(
                logging.INFO if code == 0 else logging.WARNING,
                "the gateway has ended: %s",
                reason,
            )
            child.phase = ProcessPhase.ENDED
            self._end.exit(0)
            return
        self._starter.clear_after(child)
        why = child.backoff.why_give_up(now_s)
        if code == EXIT_CONFIG and child.progress.ready_s < child.progress.started_s:
            why = f"{child.name} cannot start"
        if why is None and self._has_successor(child):
            self._wire.send(FRONT, LeaderDown(child.name, reason))
            log.warning(
                "%s ended: %s; its ranks wait for a new leader",
                child.name,
                reason,
                extra=about(child.name),
            )
            self._status.write()
            return
        self._tell(child, reason)
        is_asked = self._rollouts.ended(child, now_s, reason)
        level = logging.INFO if is_asked else logging.WARNING
        log.log(level, "%s ended: %s", child.name, reason, extra=about(child.name))
        if why is not None:
            self._put_off_or_end(child, now_s, code, f"{why} ({reason})")
        self._status.write()

    def _put_off_or_end(self, child: Child, now_s: float, code: int, why: str) -> None:
        """Restart `child` much later if the run has served or can spare it; else end the run."""
        if self._children.has_served or self._can_spare(child):
            rest_s = child.backoff.put_off(now_s)
            log.error(
                "%s: %s; it is started again in %.0f s",
                why,
                "the others go on without it"
                if self._children.can_serve()
                else "no request is served until it is back",
                rest_s,
                extra=about(child.name),
            )
        else:
            log.error("%s: the server ends", why, extra=about(child.name))
            self._end.exit(EXIT_CONFIG if code == EXIT_CONFIG else EXIT_GAVE_UP)

    def _tell(self, child: Child, reason: str) -> None:
        """Report a unit's end to the front and end its ranks; report a rank's end to its leader."""
        unit, rank = unit_and_rank(child.name)
        if child.name == GATEWAY or child.role in (NODE_PROVIDER, CONSOLE):
            return  # The first message of its successor reports it.
        if rank is not None:
            self._ended_ranks.setdefault((unit, reason), []).append(child.name)
            return
        self._wire.send(FRONT, UnitDown(child.name, reason))
        for other in self._children.ranks_of(unit):
            if other.pid:
                log.warning(
                    "%s ends, because its leader ended and has no successor",
                    other.name,
                    extra=about(other.name),
                )
            other.replace()

    def _has_successor(self, child: Child) -> bool:
        """Return True if the leader's ranks live and its successor may take them over: not if that
        has failed TAKEOVERS_MAX times.
        """
        ranks = self._children.ranks_of(child.name)
        ranks_live = any(rank.phase is ProcessPhase.READY for rank in ranks)
        return child.is_wanted and ranks_live and child.backoff.num_failed_starts < TAKEOVERS_MAX

    def _can_spare(self, child: Child) -> bool:
        """Return True if the server can do without the process: a rank of a unit that works with
        other ranks, a unit of a fleet with others of its role, or the console.
        """
        if child.role == CONSOLE:
            return True
        unit, rank = unit_and_rank(child.name)
        if rank is None and self._rollouts.has_unit(unit):
            return self._rollouts.has_other(unit)
        if rank is None or self._children.by_name[unit].phase is not ProcessPhase.READY:
            return False
        return any(
            other.phase is ProcessPhase.READY
            for other in self._children.ranks_of(unit)
            if other is not child
        )


def _how(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    if -code == signal.SIGBUS:
        return "killed by SIGBUS: a file that it had mapped was truncated, probably a file of the model"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
