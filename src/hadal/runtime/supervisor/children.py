"""The children of a run: wanted processes, their hosts, and the readiness that requests need.

Owns the table of children. Starts and ends none of them (supervisor/starter), and sends nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from hadal.core.config import ROLES, Deployment
from hadal.runtime.cores import allowed_cores, cores_of
from hadal.runtime.nodes import LiveNodes
from hadal.runtime.process.child import Child, ProcessPhase
from hadal.runtime.process.status import ProcessStatus
from hadal.runtime.topology import CONSOLE, ProcessPlan, gateway_names, unit_and_rank


class Children:
    """Table of all processes that a run may have, from its start to its end."""

    def __init__(
        self,
        deployment: Deployment,
        plans: Sequence[ProcessPlan],
        children: Iterable[Child],
        nodes: LiveNodes | None,
        *,
        has_served: bool,
    ) -> None:
        """`nodes`: nodes that units run on; None: they run on this host. `has_served`: an earlier
        supervisor of this run has served.
        """
        self.by_name = {child.name: child for child in children}
        self.plans = {plan.name: plan for plan in plans}
        self.nodes = nodes
        self._has_served = has_served
        self._later_gateways = gateway_names(deployment)[1:]
        self._cores = {} if nodes is not None else _cores_here(deployment, self.plans)

    @property
    def all(self) -> Collection[Child]:
        return self.by_name.values()

    @property
    def has_served(self) -> bool:
        """True once requests could be answered. From then on they wait for missing processes, and a
        process that cannot start does not end the server.
        """
        return self._has_served

    @property
    def is_known(self) -> bool:
        """True if all running processes are known: not while nodes still report earlier ones."""
        return self.nodes is None or not self.nodes.is_adopting

    def note_served(self) -> None:
        """Update `has_served` after a process became ready."""
        self._has_served = self._has_served or self.can_serve()

    def is_here(self, child: Child) -> bool:
        """Return True if the process runs, or would run, on this host."""
        return self.nodes is None or self.plans[child.name].node is None

    def ranks_of(self, unit: str) -> list[Child]:
        """Return the rank processes of a unit; empty for a unit of one process."""
        return [self.by_name[name] for name in self.plans[unit].ready_after]

    def is_ready(self) -> bool:
        """Return True if all processes that requests need are ready; the console is not needed."""
        return all(
            child.phase is ProcessPhase.READY
            for child in self.all
            if child.is_wanted and child.role != CONSOLE
        )

    def can_serve(self) -> bool:
        """Return True if a unit of each role is ready."""
        units = [child for child in self.all if unit_and_rank(child.name)[1] is None]
        return {unit.role for unit in units if unit.phase is ProcessPhase.READY}.issuperset(ROLES)

    @property
    def later_gateways(self) -> list[Child]:
        """Gateways other than the one with the front."""
        return [self.by_name[name] for name in self._later_gateways]

    def other_gateways(self) -> list[Child]:
        """Return the ready gateways, without the one with the front."""
        return [child for child in self.later_gateways if child.phase is ProcessPhase.READY]

    def nodes_in_use(self) -> set[int]:
        """Return the numbers of the nodes on which processes run or are wanted."""
        wanted = [child for child in self.all if child.is_wanted or child.pid]
        numbers = {self.plans[child.name].node for child in wanted}
        return {number for number in numbers if number is not None}

    def why_lost(self, child: Child) -> str:
        """Return the reason for a process's loss if it has no exit code of its own; else empty."""
        return self.nodes.why_lost(child.name) if self.nodes else ""

    def start_times_s(self) -> list[float]:
        """Return the planned start times of this host's waiting processes."""
        return [
            child.backoff.start_at_s
            for child in self.all
            if child.phase is ProcessPhase.WAITING and self.is_here(child)
        ]

    def status(self) -> dict[str, ProcessStatus]:
        """Return each child as status.json shows it, by name."""
        return {
            child.name: child.status(
                self.nodes.host_of(child.name) if self.nodes else "",
                self._cores.get(child.name, ()),
            )
            for child in self.all
        }


def _cores_here(deployment: Deployment, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Return process -> cores of this host that its computing threads take."""
    allowed = allowed_cores()
    return {name: cores_of(deployment, name, allowed) for name in names}
