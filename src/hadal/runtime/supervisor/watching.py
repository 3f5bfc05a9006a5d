"""Watch over running processes: frozen gateways, units that are found silent or stuck, and starts
without progress.

Kills faulty processes; supervisor/exits reacts to their ends as to all others. The front judges
units, and leaders judge their ranks; both ask here for the state of the processes.
"""

from __future__ import annotations

import logging
import signal
import time

from hadal.core.config import Deployment
from hadal.core.messages.gateways import GatewayHeartbeat
from hadal.core.messages.units import Sighting, UnitDown
from hadal.policy.suspicion import start_is_over
from hadal.runtime.process.child import Child, ProcessPhase
from hadal.runtime.process.logs import about
from hadal.runtime.process.watch import ProcessState, Watch, look_at
from hadal.runtime.supervisor.children import Children
from hadal.runtime.supervisor.readiness import Readiness
from hadal.runtime.topology import CONSOLE, gateway_names, judge_of, unit_and_rank
from hadal.runtime.wire import ZmqWire

log = logging.getLogger("hadal.supervisor")

MAX_WAIT_S = 0.5
"""Longest time between two checks of running processes."""


class Watching:
    """Watch over processes by their heartbeats, their judges and /proc."""

    def __init__(
        self, deployment: Deployment, wire: ZmqWire, children: Children, readiness: Readiness
    ) -> None:
        self._gateway_timeout_s = deployment.gateway_timeout_s
        self._unit_timeout_s = deployment.unit_timeout_s
        self._wire = wire
        self._children = children
        self._readiness = readiness
        self._watched = [
            children.by_name[name]
            for name in (*gateway_names(deployment), CONSOLE)
            if name in children.by_name
        ]
        self._gateways = Watch(deployment.gateway_timeout_s, MAX_WAIT_S, self._state_of)

    def gateway_spoke(self, heartbeat: GatewayHeartbeat) -> None:
        """Note a heartbeat of a gateway or the console, and the working units named in it."""
        child = self._children.by_name.get(heartbeat.gateway)
        if child is not None and heartbeat.pid == child.pid:  # Otherwise its predecessor sent it.
            self._gateways.note_alive(time.monotonic(), heartbeat.gateway)
            self._readiness.ready(heartbeat.gateway)
            for unit in heartbeat.units:
                self._readiness.unit_works(unit)

    def see(self, name: str) -> None:
        """Report a process's state to its judge: a unit's to the front, a rank's to its leader."""
        child = self._children.by_name.get(name)
        if child is None or not child.pid:
            return
        nodes = self._children.nodes
        if nodes is not None and not self._children.is_here(child):
            nodes.see(name)
            return
        state = look_at(child.pid)
        self._wire.send(judge_of(name), Sighting(name, state.waited_s, state.is_stopped))

    def given_up(self, message: UnitDown) -> None:
        """Kill a unit that the front found silent or stuck, or a rank that its leader did. SIGKILL
        ends a stopped process as well.
        """
        child = self._children.by_name.get(message.unit)
        if child is None or child.phase is not ProcessPhase.READY:
            return
        is_unit = unit_and_rank(message.unit)[1] is None
        if is_unit and time.monotonic() - child.progress.ready_s < self._unit_timeout_s:
            return  # It was not ready long enough to be silent: its predecessor was meant.
        log.warning(
            "%s %s; its process is ended and started again",
            child.name,
            message.reason,
            extra=about(child.name),
        )
        child.signal(signal.SIGKILL)

    def kill_late_starters(self) -> None:
        """Kill processes that are starting and have made no progress for too long."""
        now_s = time.monotonic()
        for child in self._children.all:
            if child.phase is not ProcessPhase.STARTING:
                continue
            elapsed_s = now_s - self._begun_s(child, now_s)
            if elapsed_s <= child.progress.timeout_s:
                continue
            waited_s = self._state_of(child.name).waited_s
            if start_is_over(elapsed_s, waited_s, child.progress.timeout_s):
                log.error(
                    "%s made no start-up progress for %.0f s (%.0f s of them without a"
                    " processor); its process is ended and started again",
                    child.name,
                    elapsed_s,
                    min(waited_s, elapsed_s),
                    extra=about(child.name),
                )
                child.signal(signal.SIGKILL)

    def _begun_s(self, child: Child, now_s: float) -> float:
        """Return the time since which a starting process makes no progress although it could: a
        leader cannot before its first rank is ready.
        """
        ranks = self._children.ranks_of(child.name)
        ready_s = [rank.progress.ready_s for rank in ranks if rank.phase is ProcessPhase.READY]
        return (
            max(child.progress.moved_s, min(ready_s, default=now_s))
            if ranks
            else child.progress.moved_s
        )

    def kill_hung_gateways(self) -> None:
        """Kill gateways and a console that are stopped or have a frozen event loop. Call it after
        all their messages were handled.
        """
        now_s = time.monotonic()
        working = {
            child.name: child.pid for child in self._watched if child.phase is ProcessPhase.READY
        }
        for name in self._gateways.frozen(now_s, working):
            log.warning(
                "%s (pid %d) sent no heartbeat for %.1f s%s; its process is ended and started again",
                name,
                working[name],
                self._gateway_timeout_s,
                self._gateways.why(name),
            )
            self._children.by_name[name].signal(signal.SIGKILL)
            self._gateways.note_alive(now_s, name)  # Kill it only once.

    def _state_of(self, name: str) -> ProcessState:
        """Return the state of a process, as far as its host reports it."""
        child, nodes = self._children.by_name[name], self._children.nodes
        if nodes is not None and not self._children.is_here(child):
            return ProcessState(nodes.waited_s(name), is_stopped=False)
        return look_at(child.pid)
