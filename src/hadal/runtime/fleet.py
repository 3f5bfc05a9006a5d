"""Executor of the fleet role: starts and stops units' processes, here or on nodes.

Makes no decisions. An unwanted process rests: its `Child` object exists, but no process runs.
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
"""Seconds from SIGTERM to SIGKILL. A drained unit has only its last disk writes left to do."""


class FleetExecutor:
    """Link between the fleet role and the processes of units. `send` puts a message on the wire.
    The role first receives the units that run already.
    """

    def __init__(
        self,
        role: Fleet,
        calls: RecordedRole,
        children: Mapping[str, Child],
        send: Callable[[str, AnyMessage], None],
        now_s: float,
    ) -> None:
        """`calls` is called instead of the role, and may record the calls (runtime/recorder)."""
        self._role = role
        self._calls = calls
        self._send = send
        self._more_arguments: tuple[str, ...] = ()
        """Further arguments of processes started from now on."""
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
                child.dismiss()  # Rest until the role asks for it.
        self._kill_at_s: dict[str, float] = {}
        self._wake_s = math.inf
        self._gone: list[str] = []
        """Units that were asked to stop but did not run."""
        self._apply(
            now_s, calls.handle(now_s, UnitsFound(running)) if running else calls.start(now_s)
        )
        for child in children.values():
            if child.is_adopted and not child.is_wanted:
                child.replace()  # Rank of an unwanted unit without leader.

    @property
    def units(self) -> Collection[str]:
        """Names of all units that may run."""
        return self._unit_to_children.keys()

    def tell(self, now_s: float, event: Event) -> None:
        """Pass an event to the role and apply its effects."""
        self._apply(now_s, self._calls.handle(now_s, event))

    def roll_out(self, now_s: float, message: Rollout, more_arguments: tuple[str, ...]) -> None:
        """Replace each unit by one that gets these additional arguments."""
        self._more_arguments = more_arguments
        self.tell(now_s, message)

    @property
    def num_unreplaced(self) -> int:
        """Units left to replace or, if more, starting units plus roles with failed starts."""
        return self._role.num_unreplaced

    @property
    def num_failed(self) -> int:
        """Number of failed starts in a row, summed over roles."""
        return self._role.num_failed

    def ended(self, now_s: float, unit: str, reason: str) -> bool:
        """Handle the end of a unit's first process; the role decides whether it runs again. Return
        True if the process was asked to end.
        """
        was_asked = self._kill_at_s.pop(unit, None) is not None
        for child in self._unit_to_children[unit]:
            child.dismiss()
        self.tell(now_s, UnitDown(unit, reason))
        return was_asked

    def tick(self, now_s: float) -> None:
        """Kill units past their deadline and wake the role if due. Call at least twice a second."""
        for unit, kill_at_s in list(self._kill_at_s.items()):
            if now_s >= kill_at_s:
                log.warning("%s did not stop in time; killing it", unit)
                self._kill_at_s[unit] = math.inf
                for child in self._unit_to_children[unit]:
                    child.signal(signal.SIGKILL)
        gone, self._gone = self._gone, []
        for unit in gone:
            log.info("%s has ended: it was not running", unit)
            self.tell(now_s, UnitDown(unit, "it did not run"))
        if now_s >= self._wake_s:
            self._wake_s = math.inf
            self.tell(now_s, Tick())

    @property
    def num_reviews(self) -> int:
        """Number of decisions that the role has made."""
        return self._role.need.num_reviews

    def seen(self, now_s: float) -> FleetSeen:
        """Return the fleet's state for display."""
        return self._role.seen(now_s)

    def has_other(self, unit: str) -> bool:
        """Return whether another unit of its role is ready, so that this one can be spared."""
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
                    # LiveNodes.keep requests and releases nodes, by the processes that are to run.
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
        """Return the reason of the role's last decision, if that was this `step`; else "". Units
        that died are replaced without a decision.
        """
        decision = self._role.need.decision
        return f" ({decision.why})" if decision is not None and decision.why.step == step else ""

    def _stop(self, now_s: float, unit: str) -> None:
        """Stop a unit: its first process is asked to end, and the ranks are ended after it."""
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
                rank.replace()  # It may run already and wait for its leader.
