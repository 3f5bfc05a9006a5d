"""The fleet role at work: units are processes that the supervisor starts and stops, here or on nodes.

The role decides; this file only moves. A process that is not wanted rests: its child is there and
does not run.
"""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable, Collection, Iterable, Mapping

from hadal.core.messages.every import AnyMessage
from hadal.core.messages.fleet import DrainUnit, KeepUnit, Rollout, UnitsFound
from hadal.core.messages.units import UnitDown
from hadal.core.overview import FleetSeen
from hadal.core.seams import (
    Event,
    FleetEffect,
    OfferNodes,
    Send,
    StartUnit,
    StopUnit,
    Tick,
    WakeAt,
    WithdrawNodes,
)
from hadal.roles.fleet.fleet import Fleet
from hadal.roles.recording import RecordedRole
from hadal.runtime.process.child import Child, ProcessPhase
from hadal.runtime.topology import unit_and_rank

log = logging.getLogger("hadal.fleet")

STOP_S = 10.0
"""Time from SIGTERM to SIGKILL. The unit was drained: nothing waits for it but its last writes to
disk.
"""


class FleetExecutor:
    """All children but the gateway are units' processes. `send` puts a message on the wire. Of
    units that run already the role hears first.
    """

    def __init__(
        self,
        role: Fleet,
        calls: RecordedRole,
        children: Mapping[str, Child],
        send: Callable[[str, AnyMessage], None],
        now_s: float,
    ) -> None:
        """`calls`: what is called instead of the role, as runtime/recorder has it."""
        self._role = role
        self._calls = calls
        self._send = send
        self._more_arguments: tuple[str, ...] = ()
        """Of what is started from now on."""
        self._unit_to_children: dict[str, list[Child]] = {}
        for child in children.values():
            unit = unit_and_rank(child.name)[0]
            if unit in role.table.by_name:
                self._unit_to_children.setdefault(unit, []).append(child)
        running = tuple(
            unit
            for unit, (first, *_) in self._unit_to_children.items()
            if first.phase is ProcessPhase.READY or first.is_adopted
        )
        for unit, of_unit in self._unit_to_children.items():
            for child in of_unit if unit not in running else ():
                child.dismiss()  # Until the role asks for it.
        self._kill_at_s: dict[str, float] = {}
        self._wake_s = math.inf
        self._gone: list[str] = []
        """Units that were to be stopped and did not run."""
        self._apply(
            now_s, calls.handle(now_s, UnitsFound(running)) if running else calls.start(now_s)
        )
        for child in children.values():
            if child.is_adopted and not child.is_wanted:
                child.replace()  # A rank whose leader is gone, of a unit that is not asked for.

    @property
    def units(self) -> Collection[str]:
        """All there may be."""
        return self._unit_to_children.keys()

    def tell(self, now_s: float, event: Event) -> None:
        """Something happened that the role is to hear."""
        self._apply(now_s, self._calls.handle(now_s, event))

    def roll_out(self, now_s: float, message: Rollout, more_arguments: tuple[str, ...]) -> None:
        """Have each unit replaced by one whose processes are given these arguments, too."""
        self._more_arguments = more_arguments
        self.tell(now_s, message)

    @property
    def num_unreplaced(self) -> int:
        """Units that the last rollout has still to replace; 0: it is over."""
        return self._role.num_unreplaced

    @property
    def num_failed(self) -> int:
        """Starts in a row that came to nothing."""
        return self._role.num_failed

    def ended(self, now_s: float, unit: str, reason: str) -> bool:
        """A unit's first process has ended. Whether it runs again is the role's to say; True if it
        was asked to end.
        """
        was_asked = self._kill_at_s.pop(unit, None) is not None
        for child in self._unit_to_children[unit]:
            child.dismiss()
        self.tell(now_s, UnitDown(unit, reason))
        return was_asked

    def tick(self, now_s: float) -> None:
        """Time passed: to be called every half second or so."""
        for unit, kill_at_s in list(self._kill_at_s.items()):
            if now_s >= kill_at_s:
                log.warning("%s does not end; it is killed", unit)
                self._kill_at_s[unit] = math.inf
                for child in self._unit_to_children[unit]:
                    child.signal(signal.SIGKILL)
        gone, self._gone = self._gone, []
        for unit in gone:
            log.info("%s ended: it did not run", unit)
            self.tell(now_s, UnitDown(unit, "it did not run"))
        if now_s >= self._wake_s:
            self._wake_s = math.inf
            self.tell(now_s, Tick())

    @property
    def num_reviews(self) -> int:
        """Decisions that the role has made."""
        return self._role.need.num_reviews

    def seen(self, now_s: float) -> FleetSeen:
        """The fleet as people are shown it."""
        return self._role.seen(now_s)

    def has_other(self, unit: str) -> bool:
        """Whether another unit of its role works, so that it can be done without for a while."""
        role = self._role.table.by_name[unit].role
        return any(
            children[0].phase is ProcessPhase.READY
            for name, children in self._unit_to_children.items()
            if name != unit and children[0].role == role
        )

    def _apply(self, now_s: float, effects: Iterable[FleetEffect]) -> None:
        for effect in effects:
            match effect:
                case StartUnit(unit):
                    self._start(now_s, unit)
                case StopUnit(unit):
                    self._stop(now_s, unit)
                case Send(to, message):
                    self._log_send(message)
                    self._send(to, message)
                case WakeAt(time_s):
                    self._wake_s = time_s
                case OfferNodes() | WithdrawNodes():
                    # LiveNodes.keep asks for nodes by what is to run, and gives them back with it.
                    log.debug("%s", effect)

    def _start(self, now_s: float, unit: str) -> None:
        children = self._unit_to_children[unit]
        if children[0].phase is not ProcessPhase.READY:
            log.info("starting %s%s", unit, self._why("grow"))
        for child in children:
            child.more_arguments = self._more_arguments
            child.want(now_s)

    def _log_send(self, message: AnyMessage) -> None:
        match message:
            case DrainUnit(unit, timeout_s):
                is_old = self._role.table.by_name[unit].is_old
                why = " (rollout)" if is_old else self._why("shrink")
                log.info("draining %s for at most %.0f s%s", unit, timeout_s, why)
            case KeepUnit(unit):
                log.info("keeping %s", unit)

    def _why(self, step: str) -> str:
        """What led to it, if the last decision was such a step; units that died are replaced
        without one.
        """
        decision = self._role.need.decision
        return f" ({decision.why})" if decision is not None and decision.why.step == step else ""

    def _stop(self, now_s: float, unit: str) -> None:
        """The first process ends by itself, and the ranks of a unit are ended when it has."""
        if unit in self._kill_at_s:
            return
        first, *ranks = self._unit_to_children[unit]
        is_running = first.phase in (ProcessPhase.STARTING, ProcessPhase.READY)
        for child in self._unit_to_children[unit]:
            child.dismiss()
        log.info("stopping %s", unit)
        if is_running:
            self._kill_at_s[unit] = now_s + STOP_S
            first.signal(signal.SIGTERM)
        else:
            self._gone.append(unit)
            for rank in ranks:
                rank.replace()  # It may have started before the leader that it waits for.
