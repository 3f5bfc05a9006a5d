"""The children of a run: what is to run, on which host, and whether what requests need works.

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
    """Table of all processes there may be, from the start of the run to its end."""

    def __init__(
        self,
        deployment: Deployment,
        plans: Sequence[ProcessPlan],
        children: Iterable[Child],
        nodes: LiveNodes | None,
        *,
        has_served: bool,
    ) -> None:
        """`nodes`: those that units run on; None: they run here. `has_served`: an earlier
        supervisor of this run did.
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
        """Whether requests could be answered once. From then on they wait for what is missing, and
        nothing that cannot start ends the server.
        """
        return self._has_served

    @property
    def is_known(self) -> bool:
        """Whether it is known what runs: not while nodes report what runs there already."""
        return self.nodes is None or not self.nodes.is_adopting

    def note_served(self) -> None:
        """Note that a process became ready: requests can be answered from now on, or not yet."""
        self._has_served = self._has_served or self.can_serve()

    def is_here(self, child: Child) -> bool:
        """Return whether it runs on this host, where it does."""
        return self.nodes is None or self.plans[child.name].node is None

    def ranks_of(self, unit: str) -> list[Child]:
        """Return the ranks of a unit of many; empty for a unit of one process."""
        return [self.by_name[name] for name in self.plans[unit].ready_after]

    def is_ready(self) -> bool:
        """Return whether all that requests need is; the pages are not among it."""
        return all(
            child.phase is ProcessPhase.READY
            for child in self.all
            if child.is_wanted and child.role != CONSOLE
        )

    def can_serve(self) -> bool:
        """Return whether a unit of each role works."""
        units = [child for child in self.all if unit_and_rank(child.name)[1] is None]
        return {unit.role for unit in units if unit.phase is ProcessPhase.READY}.issuperset(ROLES)

    @property
    def later_gateways(self) -> list[Child]:
        """Gateways beside the one with the front."""
        return [self.by_name[name] for name in self._later_gateways]

    def other_gateways(self) -> list[Child]:
        """Return the gateways that work, beside the one with the front."""
        return [child for child in self.later_gateways if child.phase is ProcessPhase.READY]

    def nodes_in_use(self) -> set[int]:
        """Return the nodes that processes run on or are to run on."""
        wanted = [child for child in self.all if child.is_wanted or child.pid]
        numbers = {self.plans[child.name].node for child in wanted}
        return {number for number in numbers if number is not None}

    def why_lost(self, child: Child) -> str:
        """Return why a process is over that no exit code tells of; empty if there is nothing."""
        return self.nodes.why_lost(child.name) if self.nodes else ""

    def start_times_s(self) -> list[float]:
        """Return the times at which processes of this host are to be started."""
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
